"""The native engine: batched decoding on a transformers module, with a cache of its own and refill of finished rows.

Legend: B sequences decoded together, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from corral.config.plan import RolloutPlan, Sampling
from corral.engine.attention import CONTEXT, AttentionContext
from corral.rollout.base import Completion, Request
from corral.rollout.decode import Decoder, capture_on_cuda
from corral.rollout.kv_cache import CacheLayout, KVCache, PrefillAttention, Segment
from corral.rollout.sampling import uniforms

_PREFILL_TOKENS = 8192
"""Prompt tokens of one packed prefill; a longer prompt goes alone."""


class NativeEngine:
    """Generates with a causal LM built with `attn_implementation=ATTENTION`: the trainer's own module or a full copy.

    The module computes in its own dtype, or under autocast in compute_dtype where the trainer does so, and is left as
    it was found (training flags of every submodule, no gradients). At most plan.max_num_seqs sequences, and at most
    cache_bytes of keys and values, are in flight; neither changes the result of a sample. max_length: positions the
    model has; a request beyond it is a bug of the caller. With plan.graphs decode steps come in few sizes, and on cuda
    each is captured as a graph, unless `capture` is off.
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
        capture: bool = True,
    ) -> None:
        parameter = next(module.parameters())
        self._module = module
        self._plan = plan
        self._max_length = max_length
        self._compute_dtype = compute_dtype or parameter.dtype
        self._autocast = self._compute_dtype != parameter.dtype
        self._cache_bytes = cache_bytes
        self._capture = capture
        self._decoder: Decoder | None = None
        self._weights: list[int] = []  # where they are: a captured step reads them there
        self._awake = True
        self._stops = () if plan.ignore_eos else tuple(eos_token_ids)

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, step: int) -> list[Completion]:
        """Completions in the order of the requests; see `RolloutEngine`."""
        if not requests:
            return []
        longest = max(len(r.prompt_ids) for r in requests) + self._plan.response_length
        assert longest <= self._max_length, f"{longest} tokens for a model of {self._max_length} positions"
        assert all(r.prompt_ids for r in requests), "a prompt without tokens"
        decoder = self._room(len(requests), longest)
        flight = _Flight(requests, decoder, self._stops)
        with _generating(self._module):
            while flight.waiting or flight.live:
                while flight.waiting and len(flight.live) < decoder.cache.slots:
                    first, entering = flight.admit()
                    logits = self._prefill(decoder.cache, [r.prompt_ids for r in entering], first)
                    decoder.slots.enter(first, [len(r.prompt_ids) for r in entering], self._streams(entering, step))
                    decoder.slots.record(first, logits, sampling, decoder.stops)
                    flight.advance(first)
                if flight.live:
                    decoder.step(len(flight.live), flight.width, sampling)
                    flight.advance(0)
        return flight.completions()

    def _streams(self, requests: Sequence[Request], step: int) -> Tensor:
        seed, count = self._plan.seed, self._plan.response_length
        return torch.stack([uniforms(seed, step, r.row, r.sample_index, count) for r in requests])

    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[float]:
        """Log-probs of a given response at temperature 1: prefill of the prompt, cached decoding of the response."""
        decoder = self._room(1, len(prompt_ids) + len(response_ids))
        scores = []
        with _generating(self._module):
            for i, token in enumerate(response_ids):
                if i == 0:
                    logits = self._prefill(decoder.cache, [tuple(prompt_ids)], 0)
                else:
                    position = len(prompt_ids) + i - 1
                    at = torch.tensor([position], device=self._device)
                    last = torch.tensor([response_ids[i - 1]], device=self._device)
                    logits = decoder.logits(last, at, position + 1)
                scores.append(float(torch.log_softmax(logits.cpu().double(), dim=-1)[0, token]))
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
        """Free the cache, and what was captured with it. Generating is an error until wake()."""
        self._decoder = None
        self._awake = False

    def wake(self) -> None:
        """Ready again; the cache is allocated at the size the next call needs."""
        self._awake = True

    def close(self) -> None:
        """As sleep(): it owns no more than the cache."""
        self.sleep()

    @property
    def _device(self) -> torch.device:
        """Where the weights are now: the trainer may have moved them since the last call."""
        return next(self._module.parameters()).device

    @property
    def cache_allocated(self) -> int:
        """Bytes of keys and values held now."""
        return 0 if self._decoder is None else self._decoder.cache.store.nbytes

    def _room(self, sequences: int, tokens: int) -> Decoder:
        """A clean cache for that many sequences of that many tokens, or for as many as the limits allow."""
        assert self._awake, "the engine is asleep"
        layout = CacheLayout.of(self._module, self._compute_dtype)
        affordable = max(1, self._cache_bytes // (layout.bytes_per_token * tokens))
        slots = min(sequences, self._plan.max_num_seqs, affordable)
        weights = [x.data_ptr() for x in (*self._module.parameters(), *self._module.buffers())]
        decoder, moved = self._decoder, weights != self._weights
        self._weights = weights
        if decoder is not None and decoder.cache.fits(slots, tokens, layout.device):
            if moved:
                decoder.forget()
            decoder.cache.clear()
            decoder.slots.clear()
            return decoder
        self._decoder = decoder = None  # first: the old and the new one need not fit together
        graphs = self._plan.graphs
        capture = capture_on_cuda() if graphs and self._capture and layout.device.type == "cuda" else None
        cache = KVCache(layout, slots, tokens)
        length = self._plan.response_length
        self._decoder = Decoder(self._forward, cache, length, self._stops, static=graphs, capture=capture)
        return self._decoder

    def _prefill(self, cache: KVCache, prompts: Sequence[tuple[int, ...]], first: int) -> Tensor:
        """[B, V] logits after each prompt, in the slots from `first` on. Equal prompts are computed once and written to
        each of their slots."""
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for slot, prompt in enumerate(prompts, start=first):
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

    def _forward(self, ids: Tensor, positions: Tensor, context: AttentionContext, keep: int | Tensor) -> Tensor:
        # A weight that autocast keeps in its compute dtype lives until the end of the block: none a graph could use.
        kept = not self._plan.graphs
        with torch.autocast(self._device.type, dtype=self._compute_dtype, enabled=self._autocast, cache_enabled=kept):
            logits: Tensor = self._module(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, **{CONTEXT: context}
            ).logits
        return logits


class _Flight:
    """Which request is in which slot, what is still waiting, and what is done."""

    def __init__(self, requests: Sequence[Request], decoder: Decoder, stops: Sequence[int]) -> None:
        self.waiting = deque(range(len(requests)))
        self.live: list[int] = []  # slot -> request
        self._requests = requests
        self._decoder = decoder
        self._stops = frozenset(stops)
        self._counts = [0] * len(requests)  # response tokens so far
        self._done: dict[int, Completion] = {}

    @property
    def width(self) -> int:
        """Tokens of the longest sequence in flight."""
        return max(len(self._requests[i].prompt_ids) + self._counts[i] for i in self.live)

    def admit(self) -> tuple[int, list[Request]]:
        """Take requests that fit the free slots and one packed prefill; equal prompts count once."""
        first, free = len(self.live), self._decoder.cache.slots - len(self.live)
        prompts: set[tuple[int, ...]] = set()
        tokens = 0
        while self.waiting and len(self.live) - first < free:
            prompt = self._requests[self.waiting[0]].prompt_ids
            cost = 0 if prompt in prompts else len(prompt)
            if len(self.live) > first and tokens + cost > _PREFILL_TOKENS:
                break
            tokens += cost
            prompts.add(prompt)
            self.live.append(self.waiting.popleft())
        return first, [self._requests[i] for i in self.live[first:]]

    def advance(self, first: int) -> None:
        """The sequences in the slots from `first` on have one token more; those that are done leave."""
        slots = self._decoder.slots
        for i in self.live[first:]:
            self._counts[i] += 1
        done = slots.finished(first, len(self.live))
        if not done:
            return
        counts = [self._counts[self.live[slot]] for slot in done]
        for slot, count, tokens, log_probs in zip(done, counts, *slots.results(done, max(counts)), strict=True):
            finish = "stop" if tokens[count - 1] in self._stops else "length"
            self._done[self.live[slot]] = Completion(tuple(tokens[:count]), tuple(log_probs[:count]), finish)
        for slot in reversed(done):
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        """Free a slot; the last sequence in flight moves into the gap."""
        last = len(self.live) - 1
        if slot != last:
            moving = self.live[slot] = self.live[last]
            tokens = len(self._requests[moving].prompt_ids) + self._counts[moving] - 1
            self._decoder.cache.move(last, slot, tokens)
        self._decoder.slots.leave(slot, last)
        self.live.pop()

    def completions(self) -> list[Completion]:
        return [self._done[i] for i in range(len(self._requests))]


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
