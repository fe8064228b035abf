"""What the workers of vllm do for the trainer. vllm makes their class a base of its own worker, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class TakesWeights:
    """Beside the attributes of vllm's worker."""

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load full parameters, named as in the model's folder, as if they were read from it; tied ones come once.

        Raises ValueError: see VllmEngine.update_weights.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        worker: Any = self
        model = worker.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        on_cpu = worker.device.type == "cpu"
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
            if on_cpu:
                _unpack_experts(model)
            initialize_layerwise_reload(model)
            loaded = _load(model, weights)
            finalize_layerwise_reload(model, worker.model_config)
            if on_cpu:
                _pack_head(model)
        if missing := sorted(wanted - loaded):
            raise ValueError(f"{len(missing)} of {len(wanted)} weights did not arrive, among them {missing[0]!r}")


def _load(model: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """The names of vllm's own parameters that were loaded."""
    given = _Given(weights)
    try:
        loaded: set[str] = model.load_weights(iter(given))
    except (AssertionError, RuntimeError) as error:
        if given.loading is None:
            raise
        what = str(error) or repr(error)
        raise ValueError(f"weight {given.loading!r}, or one of its layer, does not fit: {what}") from error
    return loaded


def _unpack_experts(model: nn.Module) -> None:
    """Without a kernel they are taken as if they came from a file: with one, what is new is not packed for it."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_head(model: nn.Module) -> None:
    """A tied one holds a packed copy of the old embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class _Given:
    """The weights, each once. loading: the name of the one that vllm has, None while the trainer makes the next."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.loading: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        seen = set()
        for name, tensor in self._weights:
            if name in seen:
                raise ValueError(f"weight {name!r} came twice")
            seen.add(name)
            self.loading = name
            yield name, tensor
            self.loading = None
