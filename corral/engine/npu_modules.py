"""Ascend's fused kernels in place of parts of a transformers model: RMSNorm, SwiGLU, rotary embedding.

transformers has no fused form of these for an NPU that is there without fetching kernels over the network. Each part is
replaced only where a probe shows that the model computes the plain form, and that the kernel does on this device; any
other stays the model's own, and the log names it. Names of parameters stay.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from corral.engine.device import plugin

log = logging.getLogger(__name__)

_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_ROTARY = "apply_rotary_pos_emb"
_ROTARY_HEAD = 896  # the kernel's heads are even and narrower


class FusedRMSNorm(nn.Module):
    """y = weight · x / sqrt(mean(x²) + eps) over the last dimension, the mean in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # The kernel takes one dtype. The product of weight and x has the wider one in the model's own norm too.
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        y: Tensor = _torch_npu().npu_rms_norm(x.to(dtype), self.weight.to(dtype), epsilon=self.eps)[0]
        return y


class FusedSwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer, 2020), with the product in one kernel."""

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1)
        y: Tensor = self.down_proj(_torch_npu().npu_swiglu(both, dim=-1))
        return y


class FusedRotary:
    """apply_rotary_pos_emb of a model's module: q [B, H, L, D], k [B, G, L, D], cos and sin [B, L, D].

    The module's function serves every model of that kind in the process, so tensors elsewhere, and what the kernel does
    not cover, go to the function that was there before.
    """

    def __init__(self, plain: Callable[..., tuple[Tensor, Tensor]], device_type: str) -> None:
        self.plain, self.device_type = plain, device_type

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        size = q.shape[-1]
        covered = cos.dim() == 3 and cos.shape[-1] == size and size % 2 == 0 and size < _ROTARY_HEAD
        if q.device.type != self.device_type or unsqueeze_dim != 1 or not covered:
            return self.plain(q, k, cos, sin, unsqueeze_dim)
        return _rotate(q, cos[:, None], sin[:, None]), _rotate(k, cos[:, None], sin[:, None])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, cos.dtype)
    out: Tensor = _torch_npu().npu_rotary_mul(x.to(dtype), cos.to(dtype), sin.to(dtype))
    return out


@torch.no_grad()
def use_fused_modules(model: nn.Module, device: torch.device) -> dict[str, int]:
    """Put the fused parts into `model`, which may still be on the CPU; how many of each kind.

    device: where it will run; the kernels are tried there.
    """
    return {
        "RMSNorm": _fuse_norms(model, device),
        "SwiGLU": _fuse_mlps(model, device),
        "rotary embedding": _fuse_rotary(model, device),
    }


def _fuse_norms(model: nn.Module, device: torch.device) -> int:
    plain: dict[type[nn.Module], bool] = {}
    fused = 0
    for path, module in list(model.named_modules()):
        kind = type(module)
        if not kind.__name__.endswith("RMSNorm"):
            continue
        if kind not in plain:
            plain[kind] = _told(_is_plain_norm(module, device), path, kind, "a plain RMSNorm")
        if plain[kind]:
            model.set_submodule(path, FusedRMSNorm(module.weight, _eps(module)))  # type: ignore[arg-type]
            fused += 1
    return fused


def _is_plain_norm(module: nn.Module, device: torch.device) -> bool:
    weight = getattr(module, "weight", None)
    if _eps(module) is None or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return False
    trial = copy.deepcopy(module).float()
    trial.weight.copy_(torch.linspace(0.5, 1.5, weight.numel()))  # type: ignore[operator]
    x = _probe(3, weight.numel())
    kernel = _torch_npu().npu_rms_norm(x.to(device), trial.weight.to(device), epsilon=_eps(module))[0]  # type: ignore[operator]
    return _close(kernel, trial(x))


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _fuse_mlps(model: nn.Module, device: torch.device) -> int:
    plain: dict[type[nn.Module], bool] = {}
    fused = 0
    for path, module in list(model.named_modules()):
        kind, parts = type(module), dict(module.named_children())
        if not {"gate_proj", "up_proj", "down_proj"} <= parts.keys():
            continue
        if kind not in plain:
            known = set(parts) == set(_MLP) and not list(module.parameters(recurse=False))
            plain[kind] = _told(known and _is_swiglu(module, device), path, kind, "a plain SwiGLU")
        if plain[kind]:
            model.set_submodule(path, FusedSwiGLU(parts["gate_proj"], parts["up_proj"], parts["down_proj"]))
            fused += 1
    return fused


def _is_swiglu(module: Any, device: torch.device) -> bool:
    gate, up = _probe(3, 16), _probe(3, 16, seed=2)
    kernel = _torch_npu().npu_swiglu(torch.cat((gate, up), dim=-1).to(device), dim=-1)
    x = _probe(2, module.gate_proj.in_features).to(module.gate_proj.weight.dtype)
    plain = module.down_proj(silu(module.gate_proj(x)) * module.up_proj(x))
    return _close(kernel, module.act_fn(gate) * up) and _close(plain, module(x))


def _fuse_rotary(model: nn.Module, device: torch.device) -> int:
    """Replaces the function in the Python modules that the model's attention classes come from; how many."""
    fused = 0
    kinds = {type(module) for module in model.modules() if type(module).__name__.endswith("Attention")}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        home = sys.modules[kind.__module__]
        function = getattr(home, _ROTARY, None)
        if function is None:
            continue
        if isinstance(function, FusedRotary):
            fused += 1
        elif _told(_is_plain_rotary(function, device), f"{kind.__module__}.{_ROTARY}", kind, "a plain rotation"):
            setattr(home, _ROTARY, FusedRotary(function, device.type))
            fused += 1
    return fused


def _is_plain_rotary(function: Callable[..., Any], device: torch.device) -> bool:
    if list(inspect.signature(function).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    q, k = _probe(4, 3 * 8).view(1, 4, 3, 8), _probe(2, 3 * 8, seed=2).view(1, 2, 3, 8)
    cos, sin = (_probe(3, 8, seed=seed).view(1, 3, 8).clamp(-1, 1) for seed in (3, 4))
    ours = FusedRotary(function, device.type)(q.to(device), k.to(device), cos.to(device), sin.to(device))
    return all(_close(mine, own) for mine, own in zip(ours, function(q, k, cos, sin), strict=True))


def _probe(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.cpu().float(), b.float(), rtol=1e-3, atol=1e-4)


def _told(plain: bool, path: str, kind: type[nn.Module], what: str) -> bool:
    if not plain:
        log.warning(
            "npu: %s (%s) is not %s as the fused kernel computes it; it stays as it is", path, kind.__name__, what
        )
    return plain


def _torch_npu() -> Any:
    return plugin("npu")
