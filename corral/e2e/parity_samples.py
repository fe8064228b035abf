"""What belongs to samples, in the order in which a step computes it: tokens, scores, log-probs, values, advantages.

Legend: S samples, R response tokens of one side. Token fields are compared on the samples whose tokens are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from corral.e2e.case import Parity
from corral.e2e.parity_gap import Comparison, Gap, failing, gap
from corral.e2e.parity_records import Array, Facts, PhaseRecords, Unreadable
from corral.e2e.parity_spread import Spread, precision
from corral.e2e.result import ParityRow

# Phase, name, role whose ranks made it (None: the driver did). Rewards come last but for advantages where the KL to the
# reference is part of them; the mask is final once rollout correction has seen the old log-probs.
TOKEN_FIELDS = (
    ("log_probs", "rollout_log_probs", "rollout"),
    ("log_probs", "old_log_probs", "actor"),
    ("samples", "response_mask", None),
    ("log_probs", "ref_log_probs", "ref"),
    ("values", "values", "critic"),
    ("rewards", "rewards", None),
    ("advantages", "advantages", None),
    ("advantages", "returns", None),
)
LAYOUT = ("row", "sample_index", "group", "prompt_lengths", "response_lengths", "prompt_ids", "response_ids")


@dataclass(frozen=True)
class Samples:
    """One side of one step. prompt_offsets, response_offsets: [S+1]."""

    records: PhaseRecords
    row: Array
    sample_index: Array
    group: Array
    prompt_ids: Array
    prompt_offsets: Array
    response_ids: Array
    response_offsets: Array

    def __len__(self) -> int:
        return int(self.row.size)

    def prompt(self, i: int) -> Array:
        return self.prompt_ids[self.prompt_offsets[i] : self.prompt_offsets[i + 1]]

    def response(self, i: int) -> Array:
        return self.response_ids[self.response_offsets[i] : self.response_offsets[i + 1]]

    def ranks(self, role: str | None) -> Array | None:
        """[S] global rank that computed a role's part of each sample, where that is known and there was a choice."""
        name = f"rank/{role}"
        if role is None or self.records.index.world == 1 or name not in self.records:
            return None
        ranks = self.records.tensor(name)
        known = ranks.shape == self.row.shape and ranks.dtype.kind == "i" and bool((ranks >= 0).all())
        return ranks if known else None


def read_samples(records: PhaseRecords) -> Samples:
    """Raises Unreadable: a part is missing, or the parts do not fit together."""
    import numpy as np

    arrays = {name: records.tensor(name) for name in LAYOUT}
    for name, array in arrays.items():
        if array.dtype.kind != "i" or array.ndim != 1:
            raise Unreadable(f"{name} is no list of whole numbers")
    offsets = {}
    for kind in ("prompt", "response"):
        lengths, ids = arrays[f"{kind}_lengths"], arrays[f"{kind}_ids"]
        if lengths.shape != arrays["row"].shape or _strange(lengths, ids.size):
            raise Unreadable(f"{kind}_lengths do not fit {kind}_ids")
        offsets[kind] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if any(arrays[name].shape != arrays["row"].shape for name in ("sample_index", "group")):
        raise Unreadable("row, sample_index and group are not of the same samples")
    return Samples(
        records,
        row=arrays["row"],
        sample_index=arrays["sample_index"],
        group=arrays["group"],
        prompt_ids=arrays["prompt_ids"],
        prompt_offsets=offsets["prompt"],
        response_ids=arrays["response_ids"],
        response_offsets=offsets["response"],
    )


def _strange(lengths: Array, tokens: int) -> bool:
    return bool((lengths < 0).any() or (lengths > tokens).any()) or int(lengths.sum()) != tokens


def compare_samples(
    step: int, one: PhaseRecords, many: PhaseRecords, facts: Facts, parity: Parity
) -> Iterator[Comparison]:
    """Rows in the order of computation. one: the reference; facts: of the split run, whose ranks are named."""
    sides = []
    for side in (one, many):
        try:
            sides.append(read_samples(side))
        except Unreadable as error:
            yield failing(step, "samples", "samples", *_sided(side is one, str(error)))
            return
    here, there = sides
    if len(here) != len(there):
        yield failing(step, "samples", "samples", f"{len(here)} samples", f"{len(there)} samples")
        return
    if len(here) == 0:
        yield failing(step, "samples", "samples", "no sample", "no sample")
        return
    at = _Step(step, here, there, facts, parity)
    yield at.whole("prompts", "prompt", None)
    yield at.whole("responses", "response", "rollout")
    yield from at.scores()
    for phase, name, role in TOKEN_FIELDS:
        yield from at.tokens(phase, name, role)


def _sided(reference: bool, text: str) -> tuple[str, str]:
    return (text, "readable") if reference else ("readable", text)


@dataclass(frozen=True)
class _Step:
    step: int
    here: Samples
    there: Samples
    facts: Facts
    parity: Parity

    @cached_property
    def same(self) -> Array:
        """[S] bool: samples whose responses are the same, token by token."""
        import numpy as np

        return np.array([np.array_equal(self.here.response(i), self.there.response(i)) for i in range(len(self.here))])

    @property
    def split(self) -> Samples:
        """The side whose ranks are named."""
        worlds = [side.records.index.world for side in (self.here, self.there)]
        return self.there if worlds[1] >= worlds[0] else self.here

    def whole(self, name: str, kind: str, role: str | None) -> Comparison:
        """Token ids of every prompt, or response; with a prompt goes which sample it is."""
        import numpy as np

        here, there = self.here, self.there
        if kind == "prompt":
            differs = [
                here.row[i] != there.row[i]
                or here.sample_index[i] != there.sample_index[i]
                or here.group[i] != there.group[i]
                or not np.array_equal(here.prompt(i), there.prompt(i))
                for i in range(len(here))
            ]
            numbers = here.prompt_ids.size
        else:
            differs = list(~self.same)
            numbers = here.response_ids.size
        bad = np.array(differs, dtype=bool)
        first = int(bad.argmax())
        texts = (f"{numbers} tokens",) * 2
        if bad.any():
            texts = _first_tokens(here, there, kind, first)
        return self._comparison(
            "samples", name, role, bad, first, texts, gap=None if bad.any() else 0.0, numbers=numbers
        )

    def scores(self) -> Iterator[Comparison]:
        yield from self._arrays("rewards", "scores", None, per_token=False)

    def tokens(self, phase: str, name: str, role: str | None) -> Iterator[Comparison]:
        yield from self._arrays(phase, name, role, per_token=True)

    def _arrays(self, phase: str, name: str, role: str | None, *, per_token: bool) -> Iterator[Comparison]:
        """One field [S] or [R] of both sides; none when neither has it."""
        import numpy as np

        present = [name in side.records for side in (self.here, self.there)]
        if not any(present):
            return
        if not all(present):
            yield failing(self.step, phase, name, *("recorded" if has else "silently missing" for has in present))
            return
        try:
            a, b = self.here.records.tensor(name), self.there.records.tensor(name)
        except Unreadable as error:
            yield failing(self.step, phase, name, "readable", error)
            return
        sizes = [s.response_ids.size if per_token else len(s) for s in (self.here, self.there)]
        if a.shape != (sizes[0],) or b.shape != (sizes[1],):
            yield failing(self.step, phase, name, f"{sizes[0]} and {sizes[1]} entries", f"{a.shape} and {b.shape}")
            return
        same = self.same
        kept, of_sample = [same, same], np.arange(len(self.here))
        if per_token:
            kept = [_of_tokens(same, side) for side in (self.here, self.there)]
            of_sample = _of_tokens(of_sample, self.here)
        if kept[0].any():
            yield self._judged(phase, name, role, (a[kept[0]], b[kept[1]]), of_sample[kept[0]], per_token)

    def _judged(
        self, phase: str, name: str, role: str | None, arrays: tuple[Array, Array], of_sample: Array, per_token: bool
    ) -> Comparison:
        import numpy as np

        a, b = arrays
        found = gap(a, b, self.parity)
        sample = int(of_sample[found.at])
        place = ""
        if per_token:
            length = int(np.diff(self.here.response_offsets)[sample])
            place = f" at token {found.at - int((of_sample < sample).sum())} of {length}"
        bad = np.zeros(len(self.here), dtype=bool)
        bad[of_sample[found.bad]] = True
        texts = tuple(f"{side[found.at].item()!r}{place}" for side in arrays)
        comparison = self._comparison(phase, name, role, bad, sample, texts, gap=found.width, numbers=int(a.size))
        if per_token and not found.ok:
            comparison.evidence.extend(_tokens_words(found, of_sample, arrays))
        return comparison

    def _comparison(
        self,
        phase: str,
        name: str,
        role: str | None,
        bad: Array,
        sample: int,
        texts: tuple[str, ...],
        *,
        gap: float | None,
        numbers: int,
    ) -> Comparison:
        differs = bool(bad.any())
        ranks = self.split.ranks(role)
        told = differs or bool(gap)
        row = ParityRow(
            step=self.step,
            phase=phase,
            name=name,
            reference=texts[0],
            found=texts[1],
            gap=gap,
            ok=not differs,
            rank=int(ranks[sample]) if differs and ranks is not None else None,
            row=int(self.here.row[sample]) if told else None,
            sample=int(self.here.sample_index[sample]) if told else None,
        )
        evidence = []
        if differs:
            updates = self.split.records.index.updates
            evidence = Spread(bad, self.here.row, ranks, role or "", self.facts, updates).words()
        return Comparison(row, numbers, cause=name, evidence=evidence, tensors=(name,))


def _of_tokens(of_samples: Array, side: Samples) -> Array:
    """[R] from [S]: at each token what its sample has."""
    import numpy as np

    of_tokens: Array = np.repeat(of_samples, np.diff(side.response_offsets))
    return of_tokens


def _first_tokens(here: Samples, there: Samples, kind: str, i: int) -> tuple[str, str]:
    """What sample i is on both sides, and where its tokens part."""
    if kind == "prompt" and (here.row[i], here.sample_index[i]) != (there.row[i], there.sample_index[i]):
        return tuple(f"data row {s.row[i]}, sample {s.sample_index[i]}" for s in (here, there))  # type: ignore[return-value]
    a, b = (s.prompt(i) if kind == "prompt" else s.response(i) for s in (here, there))
    shorter = min(a.size, b.size)
    parts = (a[:shorter] != b[:shorter]).nonzero()[0]
    place = int(parts[0]) if parts.size else shorter
    if kind == "prompt" and place == a.size == b.size:
        return f"group {here.group[i]}", f"group {there.group[i]}"
    return _token(a, place), _token(b, place)


def _token(ids: Array, place: int) -> str:
    return f"token {place} is {ids[place]}, of {ids.size}" if place < ids.size else f"ends after {ids.size} tokens"


def _tokens_words(found: Gap, of_sample: Array, arrays: tuple[Array, Array]) -> list[str]:
    """Which tokens of their samples differ, and whether it looks like rounding."""
    import numpy as np

    starts = np.concatenate([[True], of_sample[1:] != of_sample[:-1]])
    ends = np.concatenate([of_sample[1:] != of_sample[:-1], [True]])
    words = [f"{int(found.bad.sum())} of {found.bad.size} tokens differ"]
    if bool((found.bad <= starts).all()):
        words.append("only first tokens of responses differ")
    elif bool((found.bad <= ends).all()):
        words.append("only last tokens of responses differ")
    return words + precision(arrays[0][found.bad], arrays[1][found.bad])
