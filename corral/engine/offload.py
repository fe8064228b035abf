"""Where parameters and optimizer state are between phases: on the device, or parked in host memory.

Parked memory is page-locked, so that copies run at the speed of the bus. What a phase leaves behind is no part of it:
gradients are dropped at the end of an optimizer step, and the keys and values of a rollout when its engine sleeps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from corral.engine.memory import DeviceMemory, bytes_of, local_part

log = logging.getLogger(__name__)


def moved(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """A plain tensor on `device`, from an accelerator to the host page-locked; not waited for.

    `copy` allocates new storage even on the same device.
    """
    if device.type == "cpu" and tensor.device.type != "cpu":
        parked = torch.empty_like(tensor, device=device, pin_memory=True)
        return parked.copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True, copy=copy)


def _moved(tensor: Tensor, device: torch.device, copy: bool) -> Tensor:
    """The same for a sharded tensor, whose local part moves."""
    local = moved(local_part(tensor), device, copy=copy)
    if isinstance(tensor, DTensor):  # from_local would bring it back to the mesh's device
        return DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)  # type: ignore[no-untyped-call]
    return local


def move_parameters(module: nn.Module, device: torch.device, *, copy: bool = False) -> None:
    """Parameters and buffers of a plain or sharded module to `device`; an optimizer keeps referring to the same
    objects.

    `copy` allocates new storage even on the same device.
    """
    # The hook behind Module.to, which knows how to swap sharded parameters; Module.to itself offers neither.
    module._apply(lambda tensor: _moved(tensor, device, copy))  # type: ignore[no-untyped-call]


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device, *, copy: bool = False) -> None:
    """All state tensors of `optimizer` to `device`. Step counters of AdamW too when they live beside the moments."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = _moved(value, device, copy)


@dataclass
class Parking:
    """Moves a model and its optimizer between the device and the host, around phases.

    parameters, optimizer_state: which of the two are parked in `host` memory between phases. When device and host are
    the same kind of memory nothing moves, unless `copy` asks for real copies (a dry run of the same code).
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    host: torch.device
    parameters: bool
    optimizer_state: bool
    copy: bool = False

    def __post_init__(self) -> None:
        self._inside = False
        self._state_inside = False
        self._said: set[str] = set()
        if self.device == self.host and not self.copy:
            if self.parameters or self.optimizer_state:
                log.info("offload is set, but the device's memory is the host's (%s): nothing is moved", self.host)
            self.parameters = self.optimizer_state = False
        if self.parameters:
            self._park("parameters")

    @contextmanager
    def loaded(self, *, optimizer: bool) -> Iterator[None]:
        """Inside, parameters are on the device, and optimizer state too if asked for. May be nested."""
        parameters = self.parameters and not self._inside
        state = optimizer and self.optimizer_state and self.optimizer is not None and not self._state_inside
        if parameters:
            self._load("parameters")
            self._inside = True
        if state:
            self._load("optimizer state")
            self._state_inside = True
        try:
            yield
        finally:
            if state:
                self._park("optimizer state")
                self._state_inside = False
            if parameters:
                self._park("parameters")
                self._inside = False

    def _load(self, what: str) -> None:
        self._move(what, self.device)

    def _park(self, what: str) -> None:
        before = DeviceMemory.of(self.device)
        self._move(what, self.host)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()  # for whoever else uses the device
            self._say(what, before, DeviceMemory.of(self.device))

    def _move(self, what: str, to: torch.device) -> None:
        if what == "parameters":
            move_parameters(self.module, to, copy=self.copy)
        else:
            assert self.optimizer is not None
            move_optimizer_state(self.optimizer, to, copy=self.copy)
        if self.device.type != "cpu":  # the host may read what was parked, and whoever comes next what was loaded
            torch.get_device_module(self.device).synchronize(self.device)

    def _say(self, what: str, before: DeviceMemory | None, after: DeviceMemory | None) -> None:
        """Once: how much left the device, as its allocator saw it."""
        if what in self._said or before is None or after is None or before.allocated == after.allocated:
            return
        self._said.add(what)
        log.info(
            "offload: %s parked, %.2f GiB in host memory; on the device %.2f GiB before, %.2f GiB after",
            *(what, self.held(what) / 2**30, before.allocated / 2**30, after.allocated / 2**30),
        )

    def held(self, what: str) -> int:
        """Bytes of "parameters" (with buffers) or "optimizer state" of this rank, wherever they are."""
        if what == "parameters":
            return bytes_of([*self.module.parameters(), *self.module.buffers()])
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return bytes_of(value for state in states for value in state.values() if isinstance(value, Tensor))
