"""Every way a job can go, walked at random: verdicts hold, ends are reached, steps are allowed ones.

A walk that cancels and restarts as readily as it goes on ends before anything has run and proves nothing, so what
disturbs is rare here, and the test asserts which steps and which verdicts its walks have seen.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from corral.job.backends.base import Observation, Presence
from corral.job.core.decide import Decision, Facts, decide
from corral.job.core.machine import ALLOWED, DEADLINES
from corral.job.core.record import JobRecord
from corral.job.protocol.states import TERMINAL, FailureClass, JobState, Status
from corral.job.protocol.verdict import Verdict
from tests.job.core.cases import START, end, heartbeat, job

LIMITS = {"queue": 500.0, "start": 500.0, "run": 500.0, "idle": 250.0, "hang": 250.0}
HELD = (JobState.PROVISIONING, JobState.PREFLIGHT, JobState.RUNNING)
PHASES = ("preflight", "running", "running", "collecting")
CODES = (0, 0, 1, 3, 75, 75, 78, 124, 137, None)
RARELY = st.integers(0, 11).map(lambda drawn: drawn == 11)


class Life(RuleBasedStateMachine):
    """One job with two more attempts, a service that is asked at random moments and restarted with another clock."""

    seen: ClassVar[Counter[tuple[JobState, JobState]]] = Counter()  # steps taken while walking, not at its end
    verdicts: ClassVar[Counter[tuple[JobState, str, str]]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.facts = Facts(service_started=START)
        self.finals: list[JobState] = []
        self.fixed: dict[int, Verdict] = {}
        self.ends: dict[int, int] = {}
        self.walking = True
        self.job = job(JobState.ACCEPTED)

    @initialize(leased=RARELY, retries=st.integers(0, 2), tight=st.sampled_from(sorted(LIMITS)), waits=RARELY)
    def a_job_is_submitted(self, leased, retries, tight, waits):
        """One limit may well strike; the others would only end most walks before it."""
        timeouts = {kind: limit if kind == tight else limit * 20 for kind, limit in LIMITS.items()}
        asked = {"retry": {"infra": retries}, "lease": 400.0 if leased else None, "timeouts": timeouts}
        self.job = job(JobState.ACCEPTED, asked=asked, lease_until=START + 400 if leased else None)
        self.step()
        if tight != "queue" and not waits:
            self.it_is_admitted()

    # The world ------------------------------------------------------------------------------------------------------

    @rule(seconds=st.floats(0.1, 20) | st.just(130.0))
    def time_goes_by(self, seconds):
        self.now += seconds
        self.step()

    @rule(really=RARELY, jump=st.floats(-1e6, 1e6))
    def the_service_restarts_with_another_clock(self, really, jump):
        if not really:
            return
        self.now += jump
        kept = self.facts.end  # on disk
        self.facts = Facts(service_started=self.now, end=kept)

    @precondition(lambda self: self.job.state in HELD)
    @rule(phase=st.sampled_from(["running", "preflight", "collecting"]), stale=RARELY, moved=st.booleans())
    def the_agent_is_heard(self, phase, stale, moved):
        heard = heartbeat(phase, attempt=self.job.attempt - stale, progress=7)
        self.facts = replace(self.facts, heard=heard, heard_at=self.now)
        if moved:
            self.facts = replace(self.facts, output_at=self.now, progress_at=self.now)
        self.step()
        self.step()

    @precondition(lambda self: self.job.state in HELD and self.facts.end is None)
    @rule(code=st.sampled_from([0, 75, 137, 3, 78, 124, None]), whole=st.booleans())
    def the_command_ends(self, code, whole):
        record = end(code, attempt=self.job.attempt)
        self.facts = replace(self.facts, end=record if whole else record.model_copy(update={"exit_code": 99}))
        if whole and self.job.attempt not in self.fixed:
            self.ends[self.job.attempt] = -1 if code is None else code

    @precondition(lambda self: self.job.state in HELD)
    @rule()
    def the_backend_says_that_it_is_over(self):
        seen = Observation(Presence.ABSENT, "gone")
        self.facts = replace(self.facts, observation=seen, ended_seen_at=self.facts.ended_seen_at or self.now)

    @precondition(lambda self: self.job.lease_until is not None and not self.job.terminal)
    @rule()
    def a_client_renews(self):
        self.job = replace(self.job, lease_until=self.now + 400)

    @rule(really=RARELY)
    def someone_cancels(self, really):
        if really and not self.job.terminal and self.job.cancel is None:
            self.job = replace(self.job, cancel="cancelled_by_user")

    @precondition(lambda self: self.job.state is JobState.COLLECTING)
    @rule()
    def logs_are_complete(self):
        self.facts = replace(self.facts, logs_complete=True)
        self.step()

    @precondition(lambda self: self.job.state is JobState.CLEANING)
    @rule()
    def nothing_is_left(self):
        self.facts = replace(self.facts, absent=True)
        self.step()

    # The service ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.job.state is JobState.QUEUED and self.job.cancel is None)
    @rule()
    def it_is_admitted(self):
        self.apply(Decision(JobState.PROVISIONING, "admitted"))

    @rule()
    def it_is_asked(self):
        self.step()

    def step(self) -> bool:
        decision = decide(self.job, self.facts, self.now)
        assert decide(self.job, self.facts, self.now) == decision
        if decision is None:
            return False
        self.apply(decision)
        return True

    def apply(self, decision: Decision) -> None:
        before: JobRecord = self.job
        assert not before.terminal
        assert decision.to in ALLOWED[before.state], f"{before.state} -> {decision.to}"
        assert decision.message
        assert "\n" not in decision.message
        if self.walking:
            self.seen[before.state, decision.to] += 1
            if decision.verdict is not None:
                self.verdicts[before.state, decision.verdict.status, decision.verdict.cause] += 1
        changes = decision.changes(before, self.now)
        if decision.verdict is not None:
            assert before.attempt not in self.fixed, "a second verdict of one attempt"
            self.fixed[before.attempt] = decision.verdict
            self.check_verdict(decision.verdict, before)
        self.job = replace(before, state=decision.to, version=before.version + 1, state_since=self.now, **changes)
        if decision.to in TERMINAL:
            self.finals.append(decision.to)
        if before.state is JobState.RETRYING and decision.to is JobState.QUEUED:
            self.facts = Facts(service_started=self.facts.service_started)

    def check_verdict(self, verdict: Verdict, before: JobRecord) -> None:
        if before.state in HELD and before.attempt in self.ends and self.facts.end is not None:
            code = self.ends[before.attempt]
            assert (verdict.status is Status.SUCCEEDED) == (code == 0)
            assert verdict.exit_code == (None if code == -1 else code)
        elif verdict.status is Status.TIMEOUT:
            assert verdict.cause in DEADLINES[before.state]
        else:
            assert verdict.status is not Status.SUCCEEDED, "success without an end record"

    # What always holds ----------------------------------------------------------------------------------------------

    @invariant()
    def the_verdict_holds(self):
        state = self.job.state
        if state in (JobState.COLLECTING, JobState.CLEANING, JobState.RETRYING) or self.job.terminal:
            assert self.job.verdict == self.fixed[self.job.attempt]
        else:
            assert self.job.verdict is None
        if self.job.terminal:
            assert self.job.verdict is not None
            assert state == self.job.verdict.status
            assert self.job.finished is not None

    @invariant()
    def only_infra_was_tried_again(self):
        for attempt in range(1, self.job.attempt):
            assert self.fixed[attempt].failure_class is FailureClass.INFRA
        assert self.job.attempt <= 3

    @invariant()
    def there_is_one_end(self):
        assert len(self.finals) == int(self.job.terminal)

    def teardown(self) -> None:
        """From wherever it is, a job that nobody looks after any more ends by its limits alone."""
        self.walking = False
        for _ in range(300):
            if self.job.terminal:
                break
            if not self.step():
                self.now += 300
        assert self.job.terminal, f"still {self.job.state}"
        assert len(self.finals) == 1
        assert decide(self.job, self.facts, self.now + 1e9) is None


def test_no_sequence_that_hypothesis_finds_breaks_a_rule():
    walks = settings(max_examples=60, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(Life, settings=walks)


def walk(dice: random.Random) -> None:
    """One walk whose odds let a job get somewhere; Hypothesis likes to leave whole rules out of a run."""

    def chance(one_in: int) -> bool:
        return dice.randrange(one_in) == 0

    life = Life()
    tight = dice.choice(sorted(LIMITS))
    life.a_job_is_submitted(leased=chance(5), retries=dice.randrange(3), tight=tight, waits=chance(5))
    for _ in range(30):
        state, agents = life.job.state, life.job.state in HELD
        moves = [
            (6, lambda: life.time_goes_by(dice.choice([0.5, 5.0, 20.0, 130.0]))),
            (1, lambda: life.someone_cancels(chance(6))),
            (1, lambda: life.the_service_restarts_with_another_clock(chance(2), dice.uniform(-1e6, 1e6))),
        ]
        if state is JobState.QUEUED and life.job.cancel is None:
            moves.append((3, life.it_is_admitted))
        if agents:
            moves.append((9, lambda: life.the_agent_is_heard(dice.choice(PHASES), chance(6), chance(2))))
            moves.append((1, life.the_backend_says_that_it_is_over))
        if agents and life.facts.end is None:
            moves.append((1, lambda: life.the_command_ends(dice.choice(CODES), not chance(4))))
        if state is JobState.COLLECTING:
            moves.append((9, life.logs_are_complete))
        if state is JobState.CLEANING:
            moves.append((9, life.nothing_is_left))
        if life.job.lease_until is not None and not life.job.terminal:
            moves.append((1, life.a_client_renews))
        dice.choices([move for _, move in moves], [weight for weight, _ in moves])[0]()
        life.the_verdict_holds()
        life.only_infra_was_tried_again()
        life.there_is_one_end()
    life.teardown()


def test_walks_take_every_step_and_see_every_verdict():
    Life.seen.clear()
    Life.verdicts.clear()
    for seed in range(800):
        walk(random.Random(seed))

    # FAILED needs a refusal while the job waits, NOT_FOUND a backend that forgot it; the world here has neither, and
    # ACCEPTED is left at once.
    waits = (JobState.ACCEPTED, JobState.QUEUED)
    unseen = {(at, to) for at in ALLOWED for to in ALLOWED[at]} - set(Life.seen)
    unseen -= {(at, JobState.FAILED) for at in waits} | {(JobState.CLEANING, JobState.NOT_FOUND)}
    unseen -= {(JobState.ACCEPTED, JobState.CANCELLED), (JobState.ACCEPTED, JobState.TIMEOUT)}
    assert not unseen, f"steps that no walk took: {sorted(unseen)}"

    seen = {(str(status), cause) for _, status, cause in Life.verdicts}
    wanted = {("SUCCEEDED", "exit_code"), ("FAILED", "exit_code"), ("FAILED", "killed"), ("FAILED", "agent_lost")}
    wanted |= {("FAILED", "preflight"), ("CANCELLED", "cancelled_by_user"), ("CANCELLED", "lease")}
    wanted |= {("TIMEOUT", kind) for kind in ("driver", *LIMITS)}
    assert not wanted - seen, f"verdicts that no walk saw: {sorted(wanted - seen)}"
    cancelled_in = {at for at, status, _ in Life.verdicts if status == Status.CANCELLED}
    assert cancelled_in >= {JobState.QUEUED, *HELD}
    assert min(Life.seen[JobState.RUNNING, JobState.COLLECTING], Life.seen[JobState.CLEANING, JobState.SUCCEEDED]) > 30
