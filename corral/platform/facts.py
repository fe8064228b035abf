"""What a device type is to the rest of the program: names and variables, nothing that needs the device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Platform:
    """Facts about one device type.

    `ray_resource` is the name under which Ray counts the devices; `backend` is the torch.distributed backend string;
    `visible_devices` is the variable that limits what a process sees (None where processes are logical devices);
    `compute_dtype` is the default of forward and backward. The collective check sends `probe` MiB at first; a pair of
    ranks at or above `fast_enough` MiB/s is never slow, and one below `of_no_use` MiB/s always is.

    `averages`: its collectives can average; where they cannot, sums are divided. `plugin` is the package that teaches
    torch the device type, made for one minor version of torch each; None: torch knows it. `dtypes` are those the device
    trains in. `forks_after_import`: a process that has imported torch may be forked. `allocator`: the variable with
    options of torch's allocator, where the memory pool of vllm depends on them. `environment`: variables of a rank,
    unless they are set; `deterministic`: more of them for a run that has to repeat itself to the bit. `peaks`: part of
    a device's name, the first that fits counts → bfloat16 operations a second of its matrix units, dense, in units of
    1e12, as its maker states them.
    """

    device: str
    ray_resource: str
    backend: str
    visible_devices: str | None
    compute_dtype: str
    device_files: str | None  # glob under /dev; None: always present
    probe: float
    fast_enough: float
    of_no_use: float
    averages: bool = True
    plugin: str | None = None
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16")
    forks_after_import: bool = True
    allocator: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    deterministic: Mapping[str, str] = field(default_factory=dict)
    peaks: Mapping[str, float] = field(default_factory=dict)

    def peak(self, name: str) -> float | None:
        """bfloat16 operations a second of the device that calls itself so; None when it is not known."""
        return next((tera * 1e12 for part, tera in self.peaks.items() if _names(part, name)), None)


def _names(part: str, name: str) -> bool:
    """Whether a device's name has that part, as the whole of a number: A40 is no part of RTX A4000."""
    return re.search(re.escape(part) + (r"(?!\d)" if part[-1].isdigit() else ""), name, re.IGNORECASE) is not None
