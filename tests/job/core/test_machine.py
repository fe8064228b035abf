"""Every way a job can go, walked at random: verdicts hold, ends are reached, steps are allowed ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from corral.job.backends.base import Observation, Presence
from corral.job.core.decide import Decision, Facts, decide
from corral.job.core.machine import ALLOWED, DEADLINES
from corral.job.core.record import JobRecord
from corral.job.protocol.states import TERMINAL, FailureClass, JobState, Status
from corral.job.protocol.verdict import Verdict
from tests.job.core.cases import START, end, heartbeat, job

LIMITS = {"queue": 500.0, "start": 200.0, "run": 1000.0, "idle": 300.0, "hang": 250.0}
HELD = (JobState.PROVISIONING, JobState.PREFLIGHT, JobState.RUNNING)
CAUSES = {"queue", "start", "run", "idle", "hang", "driver"}


class Life(RuleBasedStateMachine):
    """One job with two more attempts, a service that is asked at random moments and restarted with another clock."""

    def __init__(self) -> None:
        super().__init__()
        asked = {"timeouts": LIMITS, "retry": {"infra": 2}, "lease": 400.0}
        self.now = START
        self.job = job(JobState.ACCEPTED, asked=asked, lease_until=START + 400)
        self.facts = Facts(service_started=START)
        self.finals: list[JobState] = []
        self.fixed: dict[int, Verdict] = {}
        self.ends: dict[int, int] = {}

    # The world ------------------------------------------------------------------------------------------------------

    @rule(seconds=st.floats(0.1, 150))
    def time_goes_by(self, seconds):
        self.now += seconds

    @rule(jump=st.floats(-1e6, 1e6))
    def the_service_restarts_with_another_clock(self, jump):
        self.now += jump
        kept = self.facts.end  # on disk
        self.facts = Facts(service_started=self.now, end=kept)

    @precondition(lambda self: self.job.state in HELD)
    @rule(phase=st.sampled_from(["preflight", "running", "collecting"]), stale=st.booleans(), moved=st.booleans())
    def the_agent_is_heard(self, phase, stale, moved):
        heard = heartbeat(phase, attempt=self.job.attempt - stale, progress=7)
        self.facts = replace(self.facts, heard=heard, heard_at=self.now)
        if moved:
            self.facts = replace(self.facts, output_at=self.now, progress_at=self.now)

    @precondition(lambda self: self.job.state in HELD and self.facts.end is None)
    @rule(code=st.sampled_from([0, 1, 3, 75, 78, 124, 137, None]), whole=st.booleans())
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

    @rule()
    def a_client_renews(self):
        if not self.job.terminal:
            self.job = replace(self.job, lease_until=self.now + 400)

    @rule()
    def someone_cancels(self):
        if not self.job.terminal and self.job.cancel is None:
            self.job = replace(self.job, cancel="cancelled_by_user")

    @precondition(lambda self: self.job.state is JobState.COLLECTING)
    @rule()
    def logs_are_complete(self):
        self.facts = replace(self.facts, logs_complete=True)

    @precondition(lambda self: self.job.state is JobState.CLEANING)
    @rule()
    def nothing_is_left(self):
        self.facts = replace(self.facts, absent=True)

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
        if verdict.status is Status.TIMEOUT:
            assert verdict.cause in CAUSES

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
        for _ in range(60):
            if self.job.terminal:
                break
            if not self.step():
                self.now += 100
        assert self.job.terminal, f"still {self.job.state}"
        assert len(self.finals) == 1
        assert decide(self.job, self.facts, self.now + 1e9) is None


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
