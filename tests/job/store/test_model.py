"""Any order of appends, events, moves, restarts and reads gives what a plain list in memory gives."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from corral.job.core.clock import Clock
from corral.job.core.machine import ALLOWED
from corral.job.protocol.events import ALL_TYPES
from corral.job.protocol.states import TERMINAL, Status
from corral.job.protocol.verdict import Verdict
from corral.job.store import writing
from corral.job.store.store import Ended, Misfit, Stale, Store
from tests.job.store.jobs import batch, chunk, new_job, place_of

SOURCES = ("driver", "node-0/rank-0", "node-0/rank-1", "node-1/rank-3")
TEXTS = st.lists(st.text(max_size=30), max_size=6)
OTHER = ("phase", "preflight", "warning", "error")


class StoreMachine(RuleBasedStateMachine):
    """The model: `told`, a list of events without times, and `marks`."""

    url: ClassVar[str | None] = None
    folder: ClassVar[Path]
    jobs: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.store = self._open()
        StoreMachine.jobs += 1
        self.job_id = f"rj-{StoreMachine.jobs:012x}"
        self.told: list[dict[str, Any]] = []
        self.marks: dict[str, int] = {}
        self.sent: list[Any] = []

    def _open(self) -> Store:
        return Store(self.url, self.folder, Clock(), roll=1500)

    def _tell(self, kind: str, **fields: Any) -> None:
        self.told.append({"seq": len(self.told) + 1, "type": kind, **fields})

    @initialize()
    def submit(self) -> None:
        self.job = new_job(self.store, self.job_id)
        self._tell("status", status="ACCEPTED")
        self._tell("status", status="QUEUED")

    @rule(parts=st.lists(st.tuples(st.sampled_from(SOURCES), TEXTS), min_size=1, max_size=4))
    def append_lines(self, parts: list[tuple[str, list[str]]]) -> None:
        marks, chunks = dict(self.marks), []
        for source, lines in parts:
            if lines:
                chunks.append(chunk(source, marks.get(source, 0), lines))
                marks[source] = chunks[-1].end
        if self.job.terminal:
            with pytest.raises(Ended):
                self.store.append_logs(self.job_id, batch(*chunks))
            return
        assert self.store.append_logs(self.job_id, batch(*chunks)) == marks
        self.marks = marks
        for part in chunks:
            node, rank = place_of(part.source)
            for text, offset in zip(part.lines, part.offsets, strict=True):
                self._tell("log", source=part.source, node=node, rank=rank, src_off=offset, line=text)
        self.sent += chunks

    @precondition(lambda self: self.sent and not self.job.terminal)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        again = data.draw(st.lists(st.sampled_from(self.sent), min_size=1, max_size=3))
        assert self.store.append_logs(self.job_id, batch(*again)) == self.marks

    @precondition(lambda self: not self.job.terminal)
    @rule(source=st.sampled_from(SOURCES), shift=st.integers(-3, 3).filter(bool))
    def send_what_does_not_fit(self, source: str, shift: int) -> None:
        start = self.marks.get(source, 0) + shift
        if start < 0:
            return
        fits = chunk("driver", self.marks.get("driver", 0), ["fits"])
        misfit = chunk(source if source != "driver" else "node-9/rank-9", max(start, 1), ["longer than the shift"])
        if source == "driver":
            misfit = misfit.model_copy(update={"start": 1})
        with pytest.raises(Misfit) as refused:
            self.store.append_logs(self.job_id, batch(fits, misfit))
        assert refused.value.watermarks == self.marks

    @rule(kind=st.sampled_from(OTHER), message=st.text(max_size=40))
    def append_event(self, kind: Any, message: str) -> None:
        if self.job.terminal:
            with pytest.raises(Ended):
                self.store.append(self.job_id, kind, {"message": message}, 1)
            return
        assert self.store.append(self.job_id, kind, {"message": message}, 1) == len(self.told) + 1
        self._tell(kind, message=message)

    @precondition(lambda self: not self.job.terminal)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        stale = self.job
        to = data.draw(st.sampled_from(sorted(ALLOWED[self.job.state])))
        changes = {}
        if to in TERMINAL:
            changes["verdict"] = Verdict(status=Status(to.value), cause="c", message="m")
        self.job = self.store.transition(self.job, to, message="moved", **changes)
        self._tell("status", status=to.value)
        if to in TERMINAL:
            self._tell("final", status=to.value)
        with pytest.raises(Stale):
            self.store.transition(stale, to, message="late", **changes)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self._open()

    @rule(
        after=st.integers(0, 80),
        types=st.sets(st.sampled_from(sorted(ALL_TYPES))),
        ranks=st.none() | st.sets(st.sampled_from([0, 1, 3, 9])),
        max_bytes=st.integers(1, 3000),
    )
    def read(self, after: int, types: set[str], ranks: set[int] | None, max_bytes: int) -> None:
        wanted = [
            event
            for event in self.told[after:]
            if event["type"] in types and (event["type"] != "log" or ranks is None or event["rank"] in ranks)
        ]
        seen, cursor = [], after
        while True:
            chosen = None if ranks is None else frozenset(ranks)
            page = self.store.read(self.job_id, cursor, types=frozenset(types), ranks=chosen, max_bytes=max_bytes)
            lines = page.data.split(b"\n")[:-1]
            assert len(page.data) <= max_bytes or len(lines) == 1
            seen += [json.loads(line) for line in lines]
            assert page.done == (self.job.terminal and page.next_seq >= len(self.told))
            if page.next_seq == cursor:
                break
            cursor = page.next_seq
        assert cursor == max(after, len(self.told))
        assert [{name: got[name] for name in want} for got, want in zip(seen, wanted, strict=True)] == wanted

    @invariant()
    def remembers(self) -> None:
        if hasattr(self, "job"):
            assert self.store.watermarks(self.job_id, 1) == self.marks
            now = self.store.get(self.job_id)
            assert now is not None
            assert (now.state, now.version, now.last_seq) == (self.job.state, self.job.version, len(self.told))

    def teardown(self) -> None:
        self.store.close()


@pytest.mark.parametrize("effort", [(10, 20), pytest.param((120, 40), marks=pytest.mark.slow)])
def test_the_store_is_the_model(url, monkeypatch, effort):
    monkeypatch.setattr(writing, "PIECE", 400)
    folder = Path(tempfile.mkdtemp(prefix="model-"))
    monkeypatch.setattr(StoreMachine, "url", url)
    monkeypatch.setattr(StoreMachine, "folder", folder, raising=False)
    examples, steps = effort
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    shutil.rmtree(folder)
