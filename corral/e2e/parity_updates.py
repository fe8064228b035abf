"""Optimizer steps in their order (mini-batch, denominators, statistics, gradients), then the weights they led to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from corral.e2e.case import Parity
from corral.e2e.parity_factor import Ratio, factor_words, parts_words, statistics_words
from corral.e2e.parity_gap import Comparison, distance, failing, numbers_equal, tensor_gap
from corral.e2e.parity_records import Facts, PhaseRecords, Summary, Unreadable, UpdateRecord
from corral.e2e.result import ParityRow


def compare_updates(
    step: int, one: PhaseRecords, many: PhaseRecords, facts: Facts, parity: Parity
) -> Iterator[Comparison]:
    """Rows in the order of computation. one: the reference; facts: of the split run."""
    here, there = one.index.updates, many.index.updates
    if [u.name for u in here] != [u.name for u in there]:
        yield failing(step, "gradients", "optimizer steps", _steps(here), _steps(there))
        return
    sides = _Sides(step, one, many, facts, parity)
    for a, b in zip(here, there, strict=True):
        yield from sides.update(a, b)


def compare_weights(
    step: int, one: PhaseRecords, many: PhaseRecords, facts: Facts, parity: Parity
) -> Iterator[Comparison]:
    """One row a role."""
    sides = _Sides(step, one, many, facts, parity)
    for role in dict.fromkeys(s.role for records in (one, many) for s in records.index.weights):
        summaries = [[s for s in records.index.weights if s.role == role] for records in (one, many)]
        yield from sides.tensors("weights", f"{role}/weights", f"weights/{role}/", *summaries)


def _steps(updates: Sequence[UpdateRecord]) -> str:
    return ", ".join(update.name for update in updates) or "none"


@dataclass(frozen=True)
class _Sides:
    step: int
    one: PhaseRecords
    many: PhaseRecords
    facts: Facts
    parity: Parity

    def update(self, a: UpdateRecord, b: UpdateRecord) -> Iterator[Comparison]:
        rows = [str(sorted(u.rows)) for u in (a, b)]
        yield self._texts(f"{a.name}/mini-batch", *rows, numbers=len(a.rows), cause="mini-batch")
        yield from self._numbers(f"{a.name}/denominators", a.denominators, b.denominators, "denominators", [])
        parts = statistics_words(a, b, self.facts) + parts_words(a, b, self.facts.sp.get(a.role, 1), self.parity)
        yield from self._numbers(f"{a.name}/statistics", a.sums(), b.sums(), "statistics", parts)
        for gradients in self.tensors(
            "gradients", f"{a.name}/gradients", f"gradients/{a.name}/", a.gradients, b.gradients
        ):
            gradients.evidence.extend([] if gradients.row.ok else parts)
            yield gradients
        if a.grad_norm is not None or b.grad_norm is not None:
            norms = [{"norm": u.grad_norm} if u.grad_norm is not None else {} for u in (a, b)]
            yield from self._numbers(f"{a.name}/grad_norm", norms[0], norms[1], "grad_norm", [])
        skipped = ["skipped" if u.skipped else "taken" for u in (a, b)]
        yield self._texts(f"{a.name}/skipped", *skipped, numbers=1, cause="skipped")

    def tensors(
        self, phase: str, name: str, prefix: str, here: Sequence[Summary], there: Sequence[Summary]
    ) -> Iterator[Comparison]:
        """Every tensor of one role: whole where both sides have it, else by the two numbers of its summary."""
        whole = [side.under(prefix) for side in (self.one, self.many)]
        if whole[0] and whole[1]:
            params = [set(side) for side in whole]
        else:
            params = [{s.param for s in side} for side in (here, there)]
        if params[0] != params[1]:
            yield failing(self.step, phase, name, *_unlike(*params), cause=name.split("/")[-1])
            return
        if not params[0]:
            return
        try:
            if whole[0] and whole[1]:
                yield self._whole(phase, name, [(p, whole[0][p]) for p in _ordered(here, params[0])])
            else:
                yield self._summaries(phase, name, here, {s.param: s for s in there})
        except Unreadable as error:
            yield failing(self.step, phase, name, "readable", error, cause=name.split("/")[-1])

    def _whole(self, phase: str, name: str, params: Sequence[tuple[str, str]]) -> Comparison:
        import numpy as np

        worst: _Worst | None = None
        bad, numbers, ratios = [], 0, []
        for param, key in params:
            a, b = self.one.tensor(key), self.many.tensor(key)
            if a.shape != b.shape:
                return failing(self.step, phase, name, f"{param} {a.shape}", f"{param} {b.shape}", name.split("/")[-1])
            if a.size == 0:
                continue
            found = tensor_gap(a, b, self.parity)
            numbers += a.size
            place = f"{param}{list(map(int, np.unravel_index(found.at, a.shape)))}" if a.shape else param
            texts = tuple(f"{place} = {side.reshape(-1)[found.at].item()!r}" for side in (a, b))
            candidate = _Worst(found.ok, found.width, *texts)
            worst = candidate if worst is None or candidate.wider_than(worst) else worst
            if not found.ok:
                bad.append(param)
                ratios.append(Ratio.of(a, b))
        return self._row(phase, name, worst, bad, len(params), numbers, ratios, tuple(key for _, key in params))

    def _summaries(self, phase: str, name: str, here: Sequence[Summary], there: dict[str, Summary]) -> Comparison:
        worst: _Worst | None = None
        bad, ratios = [], []
        for a in here:
            b = there[a.param]
            for kind, x, y in (("norm", a.norm, b.norm), ("dot", a.dot, b.dot)):
                # A dot is as good as random against the norm, and may be near zero: rounding goes with the norm.
                ok = numbers_equal(x, y, self.parity, scale=max(abs(x), a.norm))
                candidate = _Worst(ok, distance(x, y), f"{kind} of {a.param} = {x!r}", f"{kind} of {a.param} = {y!r}")
                worst = candidate if worst is None or candidate.wider_than(worst) else worst
                if not ok and a.param not in bad:
                    bad.append(a.param)
                    ratios.append(Ratio.of_summaries(a, b))
        return self._row(phase, name, worst, bad, len(here), 2 * len(here), ratios, ())

    def _row(
        self,
        phase: str,
        name: str,
        worst: _Worst | None,
        bad: list[str],
        params: int,
        numbers: int,
        ratios: Sequence[Ratio],
        keys: tuple[str, ...],
    ) -> Comparison:
        at = worst or _Worst(True, 0.0, "no entries", "no entries")
        row = ParityRow(
            step=self.step, phase=phase, name=name, reference=at.reference, found=at.found, gap=at.width, ok=not bad
        )
        evidence = []
        if bad:
            listed = ", ".join(bad[:3]) + (", ..." if len(bad) > 3 else "")
            evidence = [f"{len(bad)} of {params} tensors differ" + (f" ({listed})" if len(bad) < params else "")]
            evidence += factor_words(ratios, self.facts, name.split("/")[0]) if phase == "gradients" else []
        return Comparison(row, numbers, cause=name.split("/")[-1], evidence=evidence, tensors=keys)

    def _texts(self, name: str, here: str, there: str, *, numbers: int, cause: str) -> Comparison:
        row = ParityRow(
            step=self.step,
            phase="gradients",
            name=name,
            reference=here,
            found=there,
            gap=0.0 if here == there else None,
            ok=here == there,
        )
        return Comparison(row, numbers, cause)

    def _numbers(
        self, name: str, here: dict[str, float], there: dict[str, float], cause: str, evidence: list[str]
    ) -> Iterator[Comparison]:
        """One row for numbers that have names; the widest gap among those that are not equal, if any."""
        if here.keys() != there.keys():
            yield failing(self.step, "gradients", name, *_unlike(set(here), set(there)), cause=cause)
            return
        worst: _Worst | None = None
        for key, x in here.items():
            y = there[key]
            candidate = _Worst(numbers_equal(x, y, self.parity), distance(x, y), f"{key} = {x!r}", f"{key} = {y!r}")
            worst = candidate if worst is None or candidate.wider_than(worst) else worst
        if worst is not None:
            row = ParityRow(
                step=self.step,
                phase="gradients",
                name=name,
                reference=worst.reference,
                found=worst.found,
                gap=worst.width,
                ok=worst.ok,
            )
            yield Comparison(row, len(here), cause, [] if worst.ok else list(evidence))


@dataclass(frozen=True)
class _Worst:
    """The widest gap so far; one that is not equal is wider than any that is, and what is no number widest of all."""

    ok: bool
    width: float | None
    reference: str
    found: str

    def wider_than(self, other: _Worst) -> bool:
        return self._key > other._key

    @property
    def _key(self) -> tuple[bool, float]:
        return not self.ok, math.inf if self.width is None else self.width


def _ordered(here: Sequence[Summary], params: set[str]) -> list[str]:
    """In the order of the model where the summaries give it."""
    return [*dict.fromkeys(s.param for s in here if s.param in params), *sorted(params - {s.param for s in here})]


def _unlike(here: set[str], there: set[str]) -> tuple[str, str]:
    """What only one side has, by name."""
    only_here, only_there = sorted(here - there), sorted(there - here)
    if only_here:
        more = f" and {len(only_here) - 1} more" if len(only_here) > 1 else ""
        return f"{only_here[0]}{more}", "silently missing"
    more = f" and {len(only_there) - 1} more" if len(only_there) > 1 else ""
    return "silently missing", f"{only_there[0]}{more}"
