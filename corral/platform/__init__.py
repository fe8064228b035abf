"""Facts about device types, and which one this machine has. Standard library only."""

from __future__ import annotations

from pathlib import Path

from corral.platform.cpu import CPU
from corral.platform.cuda import CUDA
from corral.platform.facts import Platform
from corral.platform.npu import NPU

__all__ = ["CPU", "CUDA", "NPU", "PLATFORMS", "Platform", "detect", "platform"]

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
