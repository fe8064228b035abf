"""FSDP2 over the flat world, and the compute dtype. In a world of one the module stays plain."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from corral.config.plan import EnginePlan
from corral.engine.distributed import Parallel
from corral.errors import ConfigError
from corral.platform import platform


def shard(model: PreTrainedModel, plan: EnginePlan, at: Parallel, device: torch.device) -> PreTrainedModel:
    """The model on `device`, its parameters sharded over all ranks; whole and plain in a world of one.

    Layers move to the device and are sharded one after the other, so the whole model is never on one device.
    ConfigError: the two dtypes do not go together, or the model does not declare its layers.
    """
    if plan.compute_dtype != plan.master_dtype and plan.compute_dtype not in ("bfloat16", "float16"):
        raise ConfigError(f"{plan.role}: cannot compute in {plan.compute_dtype} with {plan.master_dtype} weights")
    if at.mesh is None:
        return model.to(device)
    policy = MixedPrecisionPolicy()
    if plan.compute_dtype != plan.master_dtype:
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, plan.compute_dtype), reduce_dtype=getattr(torch, plan.master_dtype)
        )
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=at.mesh, mp_policy=policy, reshard_after_forward=plan.reshard_after_forward)
    fully_shard(model, mesh=at.mesh, mp_policy=policy, reshard_after_forward=plan.reshard_after_forward)
    if not platform(device.type).averages:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    # A value model returns a view; nothing here writes into it, which is what the warning is about.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    return model


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of a transformers model, by the class names it declares as not to be split."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"{type(model).__name__} declares no layers (_no_split_modules), so it cannot be sharded")
    return layers


def own_rows(tensor: DTensor) -> tuple[Tensor, int]:
    """This rank's rows of a tensor sharded by FSDP2, and the number of the first: equal chunks, the last shorter."""
    if tuple(tensor.placements) != (Shard(0),):
        raise ValueError(f"{tensor.placements} is not a split by rows over one mesh")
    rows, world = tensor.shape[0], tensor.device_mesh.size()
    chunk = -(-rows // world)
    return tensor.to_local(), min(rows, tensor.device_mesh.get_local_rank() * chunk)


def sync_gradients(model: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over the world: only that of the last micro-batch has to."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)


def reshard(model: nn.Module) -> None:
    """Free whole parameters that a forward pass without a backward pass has left behind (reshard_after_forward off)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def autocast(plan: EnginePlan, device: torch.device, at: Parallel) -> AbstractContextManager[object]:
    """The compute dtype in a world of one, where no sharding policy casts."""
    if at.mesh is not None or plan.compute_dtype == plan.master_dtype:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, plan.compute_dtype))
