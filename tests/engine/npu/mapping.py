"""The NPU's path on CPU tensors: inside, the device type npu means tensors in host memory and collectives by gloo, with
the NPU's kernels and limits, and torch_npu is the stand-in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from corral.engine import device, kernels
from corral.engine.kernels import npu
from corral.platform import CPU, NPU, PLATFORMS

STANDIN = Path(__file__).parent / "standin"


@contextmanager
def npu_on_cpu() -> Iterator[ModuleType]:
    """The stand-in, imported."""
    sys.path.insert(0, str(STANDIN))
    _forget()
    try:
        standin = device.plugin("npu")
        assert standin is not None
        kernels._BY_DEVICE["cpu"] = npu.attend
        PLATFORMS["cpu"] = replace(CPU, dtypes=NPU.dtypes, averages=NPU.averages)
        PLATFORMS["npu"] = replace(NPU, device="cpu", device_files=None, backend="gloo", visible_devices=None)
        standin.CALLS.clear()
        yield standin
    finally:
        PLATFORMS["cpu"], PLATFORMS["npu"] = CPU, NPU
        kernels._BY_DEVICE.pop("cpu", None)
        sys.path.remove(str(STANDIN))
        _forget()


def _forget() -> None:
    sys.modules.pop("torch_npu", None)
    device.plugin.cache_clear()
    npu._causal_mask.cache_clear()


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[int, ...], scaling: float) -> torch.Tensor:
    """[L, H, D] in float64, one query at a time, differentiable."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    rows = []
    for at in range(q.shape[0]):
        start = max(bound for bound in bounds if bound <= at)
        heads = []
        for head in range(q.shape[1]):
            kv = head // group
            weights = torch.softmax(k[start : at + 1, kv] @ q[at, head] * scaling, 0)
            heads.append(weights @ v[start : at + 1, kv])
        rows.append(torch.stack(heads))
    return torch.stack(rows)
