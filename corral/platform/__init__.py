"""Facts about device types, and which one this machine has. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corral.platform.cpu import CPU
from corral.platform.cuda import CUDA
from corral.platform.facts import Platform
from corral.platform.npu import NPU

__all__ = ["CPU", "CUDA", "NPU", "PLATFORMS", "Platform", "detect", "instead", "platform"]

PLATFORMS: dict[str, Platform] = {facts.device: facts for facts in (NPU, CUDA, CPU)}
"""Device type → facts, in the order in which `detect` looks."""


def platform(device: str) -> Platform:
    """The facts of a device type; KeyError for a name that is none of npu, cuda, cpu."""
    return PLATFORMS[device]


def detect(device_folder: Path = Path("/dev")) -> Platform:
    """The device type of this machine, from its device files: npu, else cuda, else cpu."""
    for facts in PLATFORMS.values():
        if facts.device_files is None or any(device_folder.glob(facts.device_files)):
            return facts
    return CPU


def instead(resources: Mapping[str, float], wanted: str) -> str:
    """What a node has that has none of the `wanted` accelerators: " and 4 GPU", by Ray's names; "" without any."""
    if wanted == CPU.ray_resource or resources.get(wanted, 0) > 0:
        return ""
    others = [facts.ray_resource for facts in (NPU, CUDA) if facts.ray_resource != wanted]
    return "".join(f" and {resources[name]:g} {name}" for name in others if resources.get(name, 0) > 0)
