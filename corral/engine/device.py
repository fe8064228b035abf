"""Is the device of a rank there, and can torch use it? The one place that imports the package that makes torch able to.

torch itself knows cpu and cuda. For an Ascend NPU it is torch_npu that registers the device type "npu" and the backend
"hccl", and brings the fused kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from corral.errors import ConfigError
from corral.platform import platform

DEVICES = Path("/dev")


@cache
def plugin(device: str) -> ModuleType | None:
    """The package that teaches torch this device type, imported; None for one that torch knows.

    Raises ConfigError when it is not installed, was made for another torch, or does not load.
    """
    name = platform(device).plugin
    if name is None:
        return None
    wanted = minor(torch.__version__)
    if importlib.util.find_spec(name) is None:
        raise _refusal(device, f"{name}: not installed", f"install {name.replace('_', '-')}=={wanted}.*")
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise _refusal(device, f"{name}: does not load ({reason[0]})", "see docs/ascend.md") from error
    made_for = minor(module.__version__)
    if made_for != wanted:
        raise _refusal(
            device,
            f"{name} {module.__version__}: made for torch {made_for}, and this is torch {torch.__version__}",
            f"install {name.replace('_', '-')}=={wanted}.*",
        )
    return module


def require(device: str, count: int = 1) -> None:
    """Raise ConfigError, with what was looked for, unless torch can use at least `count` devices of this type here."""
    facts = platform(device)
    if facts.device_files is None:
        return
    plugin(device)
    seen = torch.get_device_module(device).device_count()
    if seen < count:
        many = "" if count == 1 else f", and {count} are needed"
        raise _refusal(device, f"torch {torch.__version__}: sees {seen} devices{many}", "run where they are")


def be_deterministic(device: str) -> None:
    """From here on this process computes the same bits from the same numbers. Before anything is on the device: its
    libraries read their variables once. An operator that has no deterministic form says so with a warning."""
    for name, value in platform(device).deterministic.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True, warn_only=True)


@contextmanager
def deterministic_backward(device: torch.device) -> Iterator[None]:
    """Around backward passes: what was asked of `be_deterministic`, without exceptions.

    PyTorch's fused attention on cuda adds up the gradient of the queries in any order, unless an operator that has no
    deterministic form is an error rather than a warning (aten/native/transformers/cuda/attention_backward.cu). No
    operator of these backward passes is such a one; sampling, in its forward passes, has one.
    """
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled() or not warns:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def minor(version: str) -> str:
    """2.13 of 2.13.0+cpu."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _refusal(device: str, found: str, fix: str) -> ConfigError:
    pattern = platform(device).device_files
    files = len(list(DEVICES.glob(pattern))) if pattern else 0
    return ConfigError(
        f"trainer.device={device}: looked for {DEVICES}/{pattern}: {files or 'none'}; {found}; {fix}, or set "
        "trainer.device=cpu"
    )
