"""Where parameters and optimizer state are between phases: on the device, or parked in host memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


def move_parameters(module: nn.Module, device: torch.device, *, copy: bool = False) -> None:
    """Parameters and buffers of a plain or sharded module to `device`; an optimizer keeps referring to the same
    objects.

    `copy` allocates new storage even on the same device.
    """
    # The hook behind Module.to, which knows how to swap sharded parameters; Module.to itself offers no copy.
    module._apply(lambda tensor: tensor.to(device, copy=copy))  # type: ignore[no-untyped-call]


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device, *, copy: bool = False) -> None:
    """All state tensors of `optimizer` to `device`. Step counters of AdamW too when they live beside the moments."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device, copy=copy)


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
        if self.device == self.host and not self.copy:
            if self.parameters or self.optimizer_state:
                log.info("offload is set, but the device's memory is the host's (%s): nothing is moved", self.host)
            self.parameters = self.optimizer_state = False
        if self.parameters:
            move_parameters(self.module, self.host, copy=self.copy)

    @contextmanager
    def loaded(self, *, optimizer: bool) -> Iterator[None]:
        """Inside, parameters are on the device, and optimizer state too if asked for. May be nested."""
        parameters = self.parameters and not self._inside
        state = optimizer and self.optimizer_state and self.optimizer is not None and not self._state_inside
        if parameters:
            move_parameters(self.module, self.device, copy=self.copy)
            self._inside = True
        if state:
            self._move_state(self.device)
            self._state_inside = True
        try:
            yield
        finally:
            if state:
                self._move_state(self.host)
                self._state_inside = False
            if parameters:
                move_parameters(self.module, self.host, copy=self.copy)
                self._inside = False

    def _move_state(self, device: torch.device) -> None:
        assert self.optimizer is not None
        move_optimizer_state(self.optimizer, device, copy=self.copy)
