"""What a device graph does, on the CPU: a step is recorded once, and replayed without its Python code.

Recording keeps every operator with the very tensors it was given, as a graph keeps addresses; it changes nothing, as
capturing does not compute. A replay runs the operators again on these tensors. So whatever the step decided on the host
while it was recorded is decided for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = (
    *("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_consecutive"),
    *("unique_dim", "repeat_interleave.Tensor", "lift_fresh", "item", "nonzero_static"),
)
"""Operators that wait for the device, have a shape that depends on data, or bring a number from the host."""


class Watching(TorchDispatchMode):
    """Records operators; fails on one that no graph can hold. `shapes` has the name and shapes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.")
        assert not any(name == bad or name.startswith(f"{bad}.") for bad in WAITING), f"{name} cannot be captured"
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tree_leaves(value):
                    self._keep(x)
        if "out" in kwargs:
            self._keep(kwargs["out"])
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def _keep(self, x: Tensor) -> None:
        """The bytes of x's storage before anything was written to it."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.before:
            flat = torch.tensor([], dtype=torch.uint8).set_(storage)
            self.before[storage.data_ptr()] = (flat, flat.clone())

    @property
    def shapes(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [
            (str(func), tuple(tuple(x.shape) for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)))
            for func, args, kwargs, out in self.calls
        ]


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """Stand-in for a CUDA graph capture: see above."""
    with torch.no_grad(), Watching() as seen:
        run()
    for flat, content in seen.before.values():
        flat.copy_(content)

    def replay() -> None:
        with torch.no_grad():
            for func, args, kwargs, out in seen.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    return replay
