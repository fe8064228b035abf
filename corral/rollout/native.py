"""The native engine: batched decoding on a transformers module, with a cache of its own and refill of finished rows.

Legend: N requests of a call, R response tokens at most, B sequences decoded together, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from corral.config.plan import RolloutPlan, Sampling
from corral.engine.attention import CONTEXT, AttentionContext
from corral.errors import TrainingError
from corral.rollout.base import Completion, Request
from corral.rollout.kv_cache import CacheLayout, DecodeAttention, KVCache, PrefillAttention, Segment
from corral.rollout.sampling import draw, uniforms

_PREFILL_TOKENS = 8192
"""Prompt tokens of one packed prefill; a longer prompt goes alone."""


class NativeEngine:
    """Generates with a causal LM built with `attn_implementation=ATTENTION`: the trainer's own module or a full copy.

    The module computes in its own dtype, or under autocast in compute_dtype where the trainer does so, and is left as
    it was found (training flags of every submodule, no gradients). At most plan.max_num_seqs sequences, and at most
    cache_bytes of keys and values, are in flight; neither changes the result of a sample. max_length: positions the
    model has; a request beyond it is a bug of the caller.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        eos_token_ids: Sequence[int],
        plan: RolloutPlan,
        max_length: int,
        compute_dtype: torch.dtype | None = None,
        cache_bytes: int = 4 << 30,
    ) -> None:
        parameter = next(module.parameters())
        self._module = module
        self._plan = plan
        self._max_length = max_length
        self._compute_dtype = compute_dtype or parameter.dtype
        self._autocast = self._compute_dtype != parameter.dtype
        self._cache_bytes = cache_bytes
        self._cache: KVCache | None = None
        self._awake = True
        self._stops = () if plan.ignore_eos else tuple(eos_token_ids)

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, step: int) -> list[Completion]:
        """Completions in the order of the requests; see `RolloutEngine`."""
        if not requests:
            return []
        longest = max(len(r.prompt_ids) for r in requests) + self._plan.response_length
        assert longest <= self._max_length, f"{longest} tokens for a model of {self._max_length} positions"
        assert all(r.prompt_ids for r in requests), "a prompt without tokens"
        cache = self._room(len(requests), longest)
        call = _Call.begin(requests, self._plan, step, self._device)
        stops = torch.tensor(self._stops, dtype=torch.int64, device=self._device)
        waiting = deque(range(len(requests)))
        live: list[int] = []  # slot -> request
        with _generating(self._module):
            while waiting or live:
                while waiting and len(live) < cache.slots:
                    entering = _admit(requests, waiting, cache.slots - len(live))
                    slots = range(len(live), len(live) + len(entering))
                    live += entering
                    logits = self._prefill(cache, [requests[i].prompt_ids for i in entering], slots)
                    done = call.record(entering, logits, sampling, stops)
                    _leave(cache, live, [slots[i] for i in done], call)
                if live:
                    done = call.record(live, self._decode(cache, *call.heads(live)), sampling, stops)
                    _leave(cache, live, done, call)
        return call.completions(ended_by=self._stops)

    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[float]:
        """Log-probs of a given response at temperature 1: prefill of the prompt, cached decoding of the response."""
        cache = self._room(1, len(prompt_ids) + len(response_ids))
        scores = []
        with _generating(self._module):
            for i, token in enumerate(response_ids):
                if i == 0:
                    logits = self._prefill(cache, [tuple(prompt_ids)], range(1))
                else:
                    position = len(prompt_ids) + i - 1
                    at = torch.tensor([position], device=self._device)
                    logits = self._decode(cache, torch.tensor([response_ids[i - 1]], device=self._device), at, position)
                scores.append(float(torch.log_softmax(logits.double(), dim=-1)[0, token]))
        return scores

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy full parameters into the module in place; names as in its `named_parameters()` (tied weights once).

        Raises ValueError on a name too many, too few or twice, and on another shape.
        """
        missing = dict(self._module.named_parameters())
        known = set(missing)
        for name, tensor in weights:
            if name not in missing:
                raise ValueError(f"weight {name!r} {'came twice' if name in known else 'is not in the rollout model'}")
            target = missing.pop(name)
            if target.shape != tensor.shape:
                raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
            target.copy_(tensor)
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(known)} weights did not arrive, among them {next(iter(missing))!r}"
            )

    def sleep(self) -> None:
        """Free the cache. Generating is an error until wake()."""
        self._cache = None
        self._awake = False

    def wake(self) -> None:
        """Ready again; the cache is allocated at the size the next call needs."""
        self._awake = True

    @property
    def _device(self) -> torch.device:
        """Where the weights are now: the trainer may have moved them since the last call."""
        return next(self._module.parameters()).device

    @property
    def cache_allocated(self) -> int:
        """Bytes of keys and values held now."""
        return 0 if self._cache is None else self._cache.store.nbytes

    def _room(self, sequences: int, tokens: int) -> KVCache:
        """A clean cache for that many sequences of that many tokens, or for as many as the limits allow."""
        assert self._awake, "the engine is asleep"
        layout = CacheLayout.of(self._module, self._compute_dtype)
        affordable = max(1, self._cache_bytes // (layout.bytes_per_token * tokens))
        slots = min(sequences, self._plan.max_num_seqs, affordable)
        cache = self._cache
        if cache is not None and cache.slots >= slots and cache.length >= tokens and cache.device == layout.device:
            cache.clear()
            return cache
        self._cache = cache = None  # first: the old and the new one need not fit together
        self._cache = KVCache(layout, slots, tokens)
        return self._cache

    def _prefill(self, cache: KVCache, prompts: Sequence[tuple[int, ...]], slots: Sequence[int]) -> Tensor:
        """[B, V] logits after each prompt. Equal prompts are computed once and written to each of their slots."""
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for prompt, slot in zip(prompts, slots, strict=True):
            slots_of.setdefault(prompt, []).append(slot)
        segments: list[Segment] = []
        for prompt, targets in slots_of.items():
            start = segments[-1].end if segments else 0
            segments.append(Segment(start, start + len(prompt), tuple(targets)))
        ids = [token for prompt in slots_of for token in prompt]
        positions = [p for prompt in slots_of for p in range(len(prompt))]
        logits = self._forward(
            torch.tensor([ids], device=self._device),
            torch.tensor([positions], device=self._device),
            PrefillAttention(cache, segments),
            keep=torch.tensor([s.end - 1 for s in segments], device=self._device),
        )[0]
        index = {prompt: i for i, prompt in enumerate(slots_of)}
        return logits[torch.tensor([index[prompt] for prompt in prompts], device=self._device)]

    def _decode(self, cache: KVCache, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """[B, V] logits after one more token [B] at positions [B] of the first B slots."""
        context = DecodeAttention(cache, positions, longest)
        return self._forward(tokens[:, None], positions[:, None], context, keep=0)[:, 0]

    def _forward(self, ids: Tensor, positions: Tensor, context: AttentionContext, keep: int | Tensor) -> Tensor:
        with torch.autocast(self._device.type, dtype=self._compute_dtype, enabled=self._autocast):
            logits: Tensor = self._module(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, **{CONTEXT: context}
            ).logits
        return logits


@dataclass
class _Call:
    """What a call to generate has so far, one row per request."""

    tokens: Tensor  # [N, R] int64
    log_probs: Tensor  # [N, R] float64
    uniform: Tensor  # [N, R] float64
    prompt_lengths: list[int]
    counts: list[int]  # response tokens so far

    @classmethod
    def begin(cls, requests: Sequence[Request], plan: RolloutPlan, step: int, device: torch.device) -> _Call:
        shape = (len(requests), plan.response_length)
        streams = [uniforms(plan.seed, step, r.row, r.sample_index, plan.response_length) for r in requests]
        return cls(
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            log_probs=torch.zeros(shape, dtype=torch.float64, device=device),
            uniform=torch.stack(streams).to(device),
            prompt_lengths=[len(r.prompt_ids) for r in requests],
            counts=[0] * len(requests),
        )

    def heads(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, int]:
        """The last token [B] and its position [B] for each row, and the largest position."""
        device = self.tokens.device
        positions = [self.prompt_lengths[i] + self.counts[i] - 1 for i in rows]
        at = torch.tensor([(i, self.counts[i] - 1) for i in rows], device=device)
        return self.tokens[at[:, 0], at[:, 1]], torch.tensor(positions, device=device), max(positions)

    def record(self, rows: Sequence[int], logits: Tensor, sampling: Sampling, stops: Tensor) -> list[int]:
        """Draw and store the next token of each row; returns the indices into `rows` that are done."""
        at = torch.tensor([(i, self.counts[i]) for i in rows], device=self.tokens.device)
        where = (at[:, 0], at[:, 1])
        tokens, log_probs = draw(logits, self.uniform[where], sampling)
        self.tokens[where] = tokens
        self.log_probs[where] = log_probs
        if not bool(log_probs.isfinite().all()):
            raise TrainingError("rollout: the model's logits are not finite; its weights have diverged or are damaged")
        stopped = torch.isin(tokens, stops).tolist()
        for i in rows:
            self.counts[i] += 1
        cap = self.tokens.shape[1]
        return [b for b, i in enumerate(rows) if stopped[b] or self.counts[i] == cap]

    def completions(self, *, ended_by: Sequence[int]) -> list[Completion]:
        stops = frozenset(ended_by)
        tokens, log_probs = self.tokens.tolist(), self.log_probs.tolist()
        out = []
        for ids, values, count in zip(tokens, log_probs, self.counts, strict=True):
            finish = "stop" if ids[count - 1] in stops else "length"
            out.append(Completion(tuple(ids[:count]), tuple(values[:count]), finish))
        return out


def _admit(requests: Sequence[Request], waiting: deque[int], free: int) -> list[int]:
    """Take requests that fit the free slots and one packed prefill; equal prompts count once."""
    entering: list[int] = []
    prompts: set[tuple[int, ...]] = set()
    tokens = 0
    while waiting and len(entering) < free:
        prompt = requests[waiting[0]].prompt_ids
        cost = 0 if prompt in prompts else len(prompt)
        if entering and tokens + cost > _PREFILL_TOKENS:
            break
        tokens += cost
        prompts.add(prompt)
        entering.append(waiting.popleft())
    return entering


def _leave(cache: KVCache, live: list[int], done: Sequence[int], call: _Call) -> None:
    """Free the slots that are done; the last live sequence moves into the gap."""
    for slot in sorted(done, reverse=True):
        last = len(live) - 1
        if slot != last:
            live[slot] = live[last]
            cache.move(last, slot, call.prompt_lengths[live[last]] + call.counts[live[last]] - 1)
        live.pop()


@contextmanager
def _generating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, no gradient checkpointing), no gradients; every training flag is put back."""
    flags = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, training in flags:
            m.training = training
