"""From tokens to rewards: decode each response, score it, put the score on its last token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from corral.batch import Batch
from corral.data.prompts import Prompt
from corral.errors import DataError
from corral.rewards.pool import RewardItem, RewardPool, Score


class Scorer:
    """Scores samples with the pool's function; the tokenizer is needed for the text a scorer reads, nothing else."""

    def __init__(self, pool: RewardPool, tokenizer: Any) -> None:
        self._pool = pool
        self._tokenizer = tokenizer

    def score(self, batch: Batch, prompts: Sequence[Prompt]) -> list[Score]:
        """One score a sample; prompts[i] is the prompt of sample i."""
        texts = self.texts(batch)
        return self._pool.score(
            [
                RewardItem(
                    row=prompt.row,
                    data_source=prompt.data_source,
                    solution=text,
                    ground_truth=prompt.ground_truth,
                    extra_info=prompt.extra_info,
                )
                for text, prompt in zip(texts, prompts, strict=True)
            ]
        )

    def texts(self, batch: Batch) -> list[str]:
        """The responses as text, special tokens skipped."""
        ids = [batch.response(i).tolist() for i in range(len(batch))]
        texts: list[str] = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts


def token_level(batch: Batch, scores: Tensor) -> Tensor:
    """[R] in the dtype of the log-probs: each sample's score [S] on its last response token, zeros elsewhere.

    An empty response has no token to carry its score.
    """
    assert batch.rollout_log_probs is not None
    out = torch.zeros_like(batch.rollout_log_probs)
    answered = batch.response_lengths > 0
    out[batch.response_offsets[1:][answered] - 1] = scores[answered].to(out.dtype)
    return out


def values_of(scores: Sequence[Score], rows: Sequence[int], key: str, needed_by: str) -> Tensor:
    """[S] float64: one number a sample, "score" (also "reward") or a value the scorer returned beside it.

    rows: data row of each sample, for messages. needed_by: the setting that asks for it. Raises DataError naming row
    and key when a scorer did not return it, or it is not a finite number.
    """
    return torch.tensor(
        [_value(score, row, key, needed_by) for score, row in zip(scores, rows, strict=True)], dtype=torch.float64
    )


def _value(score: Score, row: int, key: str, needed_by: str) -> float:
    if key in ("score", "reward"):
        return score.value
    where = f"reward of row {row}: {needed_by} needs {key!r}"
    if key not in score.extra:
        there = ", ".join(["score", *score.extra])
        raise DataError(f"{where}, and the function returned {there}; return a dict that has it")
    value = score.extra[key]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where} as a finite number, and the function returned {value!r:.80}")
    return float(value)
