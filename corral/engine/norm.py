"""RMSNorm for the verification dtype.

transformers computes RMSNorm in float32 whatever the model's dtype. In float64 that rounding turns differences of 1e-16
(another split of the same work) into 1e-8, which Adam amplifies. A float64 model therefore gets norms that compute in
the dtype of their input; every other dtype keeps the model's own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from corral.errors import ConfigError


class InputDtypeRMSNorm(nn.Module):
    """y = weight · x / sqrt(mean(x²) + eps) over the last dimension, in the dtype of x (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


@torch.no_grad()
def use_full_precision_norms(model: nn.Module) -> None:
    """Replaces every RMSNorm of `model` by one that computes in the input's dtype; parameter names stay.

    ConfigError: a norm of another kind, which would keep rounding to float32.
    """
    for path, module in list(model.named_modules()):
        kind = type(module).__name__
        if not kind.endswith("RMSNorm"):
            continue
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if eps is None or not isinstance(weight, nn.Parameter):
            raise ConfigError(f"dtype float64: {path} is a {kind} Corral does not know; use float32")
        norm = InputDtypeRMSNorm(weight, eps)
        probe = torch.linspace(-2.0, 3.0, 3 * weight.numel(), dtype=weight.dtype, device=weight.device).view(3, -1)
        if not torch.allclose(norm(probe), module(probe), rtol=1e-4, atol=1e-5):
            raise ConfigError(f"dtype float64: {path} ({kind}) is not a plain RMSNorm; use float32")
        model.set_submodule(path, norm)
