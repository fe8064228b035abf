"""Memory of a device, as its allocator counts it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes. allocated: of tensors; reserved: what the process took from the device for them. The peaks count from the
    start of the process."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int

    @staticmethod
    def of(device: torch.device) -> DeviceMemory | None:
        """Now; None on the CPU, where tensors have no allocator of their own."""
        if device.type == "cpu":
            return None
        module = torch.get_device_module(device)
        return DeviceMemory(
            module.memory_allocated(device),
            module.memory_reserved(device),
            module.max_memory_allocated(device),
            module.max_memory_reserved(device),
        )

    @staticmethod
    def largest(ranks: Iterable[DeviceMemory | None]) -> DeviceMemory | None:
        """Each number as the rank has it that has most; None when there are none."""
        known = [memory for memory in ranks if memory is not None]
        if not known:
            return None
        return DeviceMemory(
            max(memory.allocated for memory in known),
            max(memory.reserved for memory in known),
            max(memory.peak_allocated for memory in known),
            max(memory.peak_reserved for memory in known),
        )


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard of a sharded one, a plain one itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of this rank's parts; one that several tensors share counts once."""
    storages = (local_part(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
