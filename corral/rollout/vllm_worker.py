"""What the workers of vllm do for the trainer. vllm makes their class a base of its own worker, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class TakesWeights:
    """Beside the attributes of vllm's worker."""

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load full parameters, named as in the model's folder, as if they were read from it; tied ones come once.

        Raises ValueError: see VllmEngine.update_weights.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        worker: Any = self
        model = worker.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(_once(weights))
            finalize_layerwise_reload(model, worker.model_config)
            for module in model.modules():
                if isinstance(module, ParallelLMHead):  # on the CPU a tied one still holds a packed copy of the old
                    module.quant_method.process_weights_after_loading(module)
        if missing := sorted(wanted - loaded):
            raise ValueError(f"{len(missing)} of {len(wanted)} weights did not arrive, among them {missing[0]!r}")


def _once(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    seen = set()
    for name, tensor in weights:
        if name in seen:
            raise ValueError(f"weight {name!r} came twice")
        seen.add(name)
        yield name, tensor
