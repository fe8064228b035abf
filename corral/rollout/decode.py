"""The decode step: one more token for every sequence in flight, and nothing of it decided on the host.

The step reads and writes preallocated tensors in place, waits for nothing and has no shape that depends on data. So it
can be captured once as a device graph and replayed: thousands of kernel launches become one.

Legend: S slots of the cache, B slots of one step, R response tokens at most, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from corral.config.plan import Sampling
from corral.engine.attention import AttentionContext
from corral.errors import ConfigError, TrainingError
from corral.platform import PLATFORMS
from corral.rollout.kv_cache import DecodeAttention, KVCache
from corral.rollout.sampling import draw

_WIDTH = 128
"""Tokens of the smallest width of a static step; further ones are its doubles."""

Run = Callable[[], None]
Capture = Callable[[Run], Run]


class Forward(Protocol):
    """ids, positions [rows, tokens] → logits [rows, kept, V]; keep as `logits_to_keep` of transformers."""

    def __call__(self, ids: Tensor, positions: Tensor, context: AttentionContext, keep: int | Tensor) -> Tensor: ...


class Slots:
    """What the sequences in flight have so far. They lie in the first slots without gaps; the rest hold nothing.

    tokens, positions [S]: the last token and where it is; counts [S]: response tokens; drawn, log_probs, uniform
    [S, R]; ended [S].
    """

    def __init__(self, slots: int, response_length: int, device: torch.device) -> None:
        self.tokens, self.positions, self.counts = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._numbers = torch.arange(slots, device=device)
        self.drawn = torch.zeros(slots, response_length, dtype=torch.int64, device=device)
        self.log_probs, self.uniform = (
            torch.zeros(slots, response_length, dtype=torch.float64, device=device) for _ in range(2)
        )
        self._flags = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        self.ended, self._broken = self._flags[:-1], self._flags[-1]
        self._live = torch.zeros((), dtype=torch.int64, device=device)

    def clear(self) -> None:
        """No sequence is in flight."""
        for x in (self.positions, self.counts, self._flags, self._live):
            x.zero_()

    def enter(self, first: int, prompt_lengths: Sequence[int], uniform: Tensor) -> None:
        """Sequences begin in the slots from `first` on, each with its random stream [R]."""
        rows = slice(first, first + len(prompt_lengths))
        self.positions[rows] = torch.tensor(prompt_lengths) - 1
        self.counts[rows] = 0
        self.uniform[rows] = uniform
        self._live.fill_(rows.stop)

    def record(self, first: int, logits: Tensor, sampling: Sampling, stops: Tensor) -> None:
        """Draw the next token of the slots from `first` on by logits [B, V]. Slots that hold nothing stay so."""
        rows = slice(first, first + logits.shape[0])
        at = self.counts[rows, None]
        logits = logits.to(self.tokens.device)
        tokens, log_probs = draw(logits, self.uniform[rows].gather(1, at)[:, 0], sampling)
        self.drawn[rows].scatter_(1, at, tokens[:, None])
        self.log_probs[rows].scatter_(1, at, log_probs[:, None])
        self.tokens[rows] = tokens
        live = self._numbers[rows] < self._live
        self.counts[rows].add_(live)
        self.positions[rows].add_(live)
        stopped = (tokens[:, None] == stops).any(dim=1)
        self.ended[rows] = stopped | (self.counts[rows] == self.drawn.shape[1])
        self._broken.logical_or_((live & ~log_probs.isfinite()).any())

    def finished(self, first: int, last: int) -> list[int]:
        """Which of the slots [first, last) have ended with their last token. Waits for the device.

        Raises TrainingError when any logits were not finite.
        """
        *ended, broken = self._flags.tolist()
        if broken:
            raise TrainingError("rollout: the model's logits are not finite; its weights have diverged or are damaged")
        return [slot for slot in range(first, last) if ended[slot]]

    def results(self, slots: Sequence[int], longest: int) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens and log-probs of some slots, the first `longest` of each."""
        at = torch.tensor(slots, device=self.drawn.device)
        return self.drawn[at, :longest].tolist(), self.log_probs[at, :longest].tolist()

    def leave(self, slot: int, last: int) -> None:
        """Slot `last`, the last one in flight, moves to `slot`, whose sequence is over."""
        if slot != last:
            for x in (self.tokens, self.positions, self.counts, self.drawn, self.log_probs, self.uniform):
                x[slot] = x[last]
        self.positions[last].zero_()
        self.counts[last].zero_()
        self._live.fill_(last)


class Decoder:
    """A cache with the sequences in it, and the step.

    Tokens are drawn in float64: on the device of the cache, or on the host where that device has no float64.

    static: steps come in few sizes (powers of two, of slots and of tokens) and compute unused slots and masked
    positions along, so that each size can be captured. capture: makes a replayable step of one that has run before.
    """

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        response_length: int,
        stops: Sequence[int],
        *,
        static: bool = False,
        capture: Capture | None = None,
    ) -> None:
        self.cache = cache
        known = PLATFORMS.get(cache.device.type)
        draws_on = cache.device if known is None or "float64" in known.dtypes else torch.device("cpu")
        self.slots = Slots(cache.slots, response_length, draws_on)
        self.stops = torch.tensor(stops, dtype=torch.int64, device=draws_on)
        self._forward = forward
        self._static = static
        self._capture = capture
        self._replays: dict[tuple[int, int, Sampling], Run | None] = {}

    def step(self, live: int, width: int, sampling: Sampling) -> None:
        """The next token of the `live` sequences in flight, none of which is longer than `width` with it."""
        if not self._static:
            self._run(live, width, sampling)
            return
        slots = _size(live, 1, self.cache.slots)
        width = _size(width, _WIDTH, self.cache.length)
        size = (slots, width, sampling)
        replay = self._replays.get(size)
        if self._capture is not None and size in self._replays:
            replay = self._replays[size] = replay or self._capture(lambda: self._run(slots, width, sampling))
            replay()
        else:
            self._run(slots, width, sampling)  # the first one warms up what may not be captured
            self._replays[size] = None

    def forget(self) -> None:
        """Drop what was captured: the weights have moved."""
        self._replays.clear()

    def _run(self, slots: int, width: int, sampling: Sampling) -> None:
        now = self.slots
        logits = self.logits(now.tokens[:slots], now.positions[:slots], width)
        now.record(0, logits, sampling, self.stops)

    def logits(self, tokens: Tensor, positions: Tensor, width: int) -> Tensor:
        """[B, V] after one more token [B] at positions [B], all below `width`, of the first B slots."""
        tokens, positions = tokens.to(self.cache.device), positions.to(self.cache.device)
        context = DecodeAttention(self.cache, positions, width)
        return self._forward(tokens[:, None], positions[:, None], context, keep=0)[:, 0]


def _size(number: int, smallest: int, largest: int) -> int:
    """The first of smallest, 2·smallest, 4·smallest, ..., largest that holds `number`."""
    size = smallest
    while size < number:
        size *= 2
    return min(size, largest)


def capture_on_cuda() -> Capture:
    """CUDA graphs that share one pool of memory.

    ConfigError: the model's forward cannot be captured, because it waits for the device.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        try:
            # Another thread may wait for its collectives meanwhile; that is none of this capture's business.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            # Ending a capture that has failed fails too, and that error says nothing of the first one.
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            reason = str(first).strip().splitlines()[0]
            raise ConfigError(
                f"the decode step cannot be captured as a CUDA graph: {reason}; set "
                "actor_rollout_ref.rollout.enforce_eager=True"
            ) from error
        return graph.replay

    return capture
