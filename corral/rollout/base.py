"""What an engine that generates has to offer, whatever runs underneath."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from corral.config.plan import Sampling


@dataclass(frozen=True)
class Request:
    """One sample to generate. `row` and `sample_index`, with the seed and the step, key its random stream."""

    prompt_ids: tuple[int, ...]
    row: int
    sample_index: int


@dataclass(frozen=True)
class Completion:
    """token_ids include the end-of-sequence token when finish is "stop". log_probs are of the sampled tokens under the
    temperature-scaled distribution over the whole vocabulary, as the trainer computes them."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: str  # one of corral.batch.FINISH_REASONS


class RolloutEngine(Protocol):
    """One replica. Calls are synchronous; a replica serves one caller."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, step: int) -> list[Completion]:
        """Completions in the order of the requests; a completion does not depend on what else is in the call."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over full parameters by name, in the trainer's order and names."""
        ...

    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[float]:
        """Log-probs of a given response at temperature 1, by the same arithmetic that generates (the weight probe)."""
        ...

    def sleep(self) -> None:
        """Give memory back until wake()."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None:
        """Free what it holds; nothing is called afterwards."""
        ...
