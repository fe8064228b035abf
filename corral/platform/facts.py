"""What a device type is to the rest of the program: names and variables, nothing that needs the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """Facts about one device type.

    `ray_resource` is the name under which Ray counts the devices; `backend` is the torch.distributed backend string;
    `visible_devices` is the variable that limits what a process sees (None where processes are logical devices);
    `compute_dtype` is the default of forward and backward. The collective check sends `probe` MiB at first; a pair of
    ranks at or above `fast_enough` MiB/s is never slow, and one below `of_no_use` MiB/s always is.
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
