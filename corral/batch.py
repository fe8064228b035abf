"""The ragged batch every phase speaks: flat tensors plus offsets, one row per sample.

Legend: S samples, P prompt tokens of all samples together, R response tokens of all samples together.
Token j of sample i's response lies at `response_offsets[i] + j` of every token field. Nothing is padded to a width, and
masks are carried, never inferred from token values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

FINISH_REASONS = ("stop", "length", "abort")
"""Why a response ended; `Batch.finish` holds the index into this tuple."""

_SAMPLE_FIELDS = ("row", "sample_index", "group", "finish", "is_padding")
_TOKEN_FIELDS = (
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "sum_pi_squared",
    "rollout_is_weights",
    "sequence_log_ratio",
    "sequence_advantage",
    "selected",
    "values",
    "scores",
    "rewards",
    "advantages",
    "returns",
)


@dataclass(frozen=True)
class Batch:
    """S samples with their tokens and whatever has been computed for them so far.

    prompt_ids [P] int64, prompt_offsets [S+1] int64; response_ids [R] int64, response_offsets [S+1] int64.
    response_mask [R] bool: True where the policy generated the token (EOS included), False on tool and observation
    tokens. row [S]: data row of the prompt; sample_index [S]: which of its n samples; group [S]: equal for one prompt.
    finish [S]: index into FINISH_REASONS. is_padding [S]: a no-op sample that no loss and no metric sees.
    The remaining token fields are [R] floats, None until their phase has run:
    rollout_log_probs (engine), old_log_probs, ref_log_probs, sum_pi_squared (Σ π² of the distribution the token was
    drawn from), rollout_is_weights (multiplies the policy loss), sequence_log_ratio, sequence_advantage and selected
    (statistics of the mini-batch at its present weights, for losses that need them), values (prediction before the
    token), scores (reward, on the last response token), rewards (scores with KL in reward), advantages, returns.
    """

    prompt_ids: Tensor
    prompt_offsets: Tensor
    response_ids: Tensor
    response_offsets: Tensor
    response_mask: Tensor
    row: Tensor
    sample_index: Tensor
    group: Tensor
    finish: Tensor
    is_padding: Tensor
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    sequence_log_ratio: Tensor | None = None
    sequence_advantage: Tensor | None = None
    selected: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    def __post_init__(self) -> None:
        samples, tokens = len(self), int(self.response_offsets[-1])
        if int(self.prompt_offsets[-1]) != self.prompt_ids.numel():
            raise ValueError(
                f"prompt_offsets end at {int(self.prompt_offsets[-1])}, prompt_ids hold {self.prompt_ids.numel()}"
            )
        for name in _SAMPLE_FIELDS:
            if getattr(self, name).shape != (samples,):
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}, expected ({samples},)")
        for name in _TOKEN_FIELDS:
            value = getattr(self, name)
            if value is not None and value.shape != (tokens,):
                raise ValueError(f"{name} has shape {tuple(value.shape)}, expected ({tokens},)")

    def __len__(self) -> int:
        return self.prompt_offsets.numel() - 1

    @property
    def prompt_lengths(self) -> Tensor:
        """[S] int64."""
        return self.prompt_offsets.diff()

    @property
    def response_lengths(self) -> Tensor:
        """[S] int64."""
        return self.response_offsets.diff()

    @property
    def sample_of_token(self) -> Tensor:
        """[R] int64: the sample each response token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.response_lengths)

    @property
    def lengths(self) -> list[int]:
        """Prompt plus response tokens of each sample."""
        return (self.prompt_lengths + self.response_lengths).tolist()

    def prompt(self, sample: int) -> Tensor:
        """Token ids of one prompt."""
        return self.prompt_ids[self.prompt_offsets[sample] : self.prompt_offsets[sample + 1]]

    def response(self, sample: int, field: str = "response_ids") -> Tensor:
        """One sample's slice of a token field."""
        value: Tensor = getattr(self, field)
        return value[self.response_offsets[sample] : self.response_offsets[sample + 1]]

    def with_fields(self, **changes: Tensor) -> Batch:
        """The same samples with some fields set; shapes are checked."""
        return replace(self, **changes)

    def select(self, index: Sequence[int] | Tensor) -> Batch:
        """The samples at `index`, in that order (repeats allowed)."""
        picked = torch.as_tensor(index, dtype=torch.int64)
        changes: dict[str, Tensor] = {name: getattr(self, name)[picked] for name in _SAMPLE_FIELDS}
        prompt_at, changes["prompt_offsets"] = gather_rows(self.prompt_offsets, picked)
        response_at, changes["response_offsets"] = gather_rows(self.response_offsets, picked)
        changes["prompt_ids"] = self.prompt_ids[prompt_at]
        for name in _TOKEN_FIELDS:
            value = getattr(self, name)
            if value is not None:
                changes[name] = value[response_at]
        return replace(self, **changes)

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """The samples of all parts, in order. A field has to be set in all of them or in none."""
        changes: dict[str, Tensor | None] = {}
        for f in fields(Batch):
            values = [getattr(part, f.name) for part in parts]
            if any(v is None for v in values):
                if not all(v is None for v in values):
                    raise ValueError(f"{f.name} is set in some of the parts only")
                changes[f.name] = None
            elif f.name.endswith("_offsets"):
                changes[f.name] = _offsets(torch.cat([v.diff() for v in values]))
            else:
                changes[f.name] = torch.cat(values)
        return Batch(**changes)  # type: ignore[arg-type]

    def padded(self, count: int) -> Batch:
        """This batch and `count` no-op samples: one prompt token, one masked response token, zeros everywhere."""
        if count == 0:
            return self
        tokens = torch.zeros(count, dtype=torch.int64)
        changes: dict[str, Tensor] = {
            name: torch.zeros(count, dtype=getattr(self, name).dtype)
            for name in (*_SAMPLE_FIELDS, *_TOKEN_FIELDS)
            if getattr(self, name) is not None
        }
        changes["is_padding"] = torch.ones(count, dtype=torch.bool)
        changes["group"] = torch.full((count,), -1, dtype=self.group.dtype)
        pad = Batch(
            prompt_ids=tokens,
            prompt_offsets=torch.arange(count + 1),
            response_offsets=torch.arange(count + 1),
            **changes,
        )
        return Batch.concat([self, pad])

    @staticmethod
    def from_samples(
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        row: Sequence[int],
        sample_index: Sequence[int],
        group: Sequence[int],
        finish: Sequence[str],
        rollout_log_probs: Sequence[Sequence[float]] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Batch:
        """A batch of single-turn samples: every response token was generated by the policy."""
        flat = [token for response in responses for token in response]
        log_probs = None
        if rollout_log_probs is not None:
            log_probs = torch.tensor([x for sample in rollout_log_probs for x in sample], dtype=dtype)
        return Batch(
            prompt_ids=torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64),
            prompt_offsets=_offsets(torch.tensor([len(p) for p in prompts], dtype=torch.int64)),
            response_ids=torch.tensor(flat, dtype=torch.int64),
            response_offsets=_offsets(torch.tensor([len(r) for r in responses], dtype=torch.int64)),
            response_mask=torch.ones(len(flat), dtype=torch.bool),
            row=torch.tensor(row, dtype=torch.int64),
            sample_index=torch.tensor(sample_index, dtype=torch.int64),
            group=torch.tensor(group, dtype=torch.int64),
            finish=torch.tensor([FINISH_REASONS.index(reason) for reason in finish], dtype=torch.uint8),
            is_padding=torch.zeros(len(prompts), dtype=torch.bool),
            rollout_log_probs=log_probs,
        )


def _offsets(lengths: Tensor) -> Tensor:
    """[S] lengths to [S+1] offsets."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def gather_rows(offsets: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
    """Flat positions of the picked rows' tokens [their sum], and the offsets [len(picked)+1] of the gathered rows."""
    lengths = offsets.diff()[picked]
    out = _offsets(lengths)
    start = torch.repeat_interleave(offsets[:-1][picked] - out[:-1], lengths)
    return start + torch.arange(int(out[-1])), out
