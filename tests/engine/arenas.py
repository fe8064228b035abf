"""Two memories on one CPU: what offload moves to the host or the device is counted there for as long as it lives."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from corral.engine import offload
from corral.engine.memory import local_part

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
"""The same memory under two names that differ: `Parking` sees two places, and its moves are copies."""


class Arenas:
    """Counts allocations. In force from `watch` on, for tensors that offload moves."""

    def __init__(self) -> None:
        self._held: list[tuple[str, StorageWeakRef, int]] = []

    def adopt(self, place: str, tensors: Iterable[Tensor]) -> None:
        """These are in `place`; a storage counts once, as that in which it was first."""
        for x in tensors:
            storage = local_part(x).untyped_storage()
            known = {held.cdata for _, held, _ in self._held if not held.expired()}
            if (ref := StorageWeakRef(storage)).cdata not in known:
                self._held.append((place, ref, storage.nbytes()))

    def bytes(self, place: str) -> int:
        """Of the storages in `place` that anybody still holds."""
        return sum(size for where, storage, size in self._held if where == place and not storage.expired())

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        plain = offload.moved

        def counted(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
            out = plain(tensor, device, copy=True)
            self.adopt("device" if device == DEVICE else "host", [out])
            return out

        patch.setattr(offload, "moved", counted)
