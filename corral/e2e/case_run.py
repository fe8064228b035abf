"""One case, from nothing to its result: needs, service, jobs, records, checks, parity."""

from __future__ import annotations

import os
import shlex
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from corral import __version__
from corral.e2e import caches
from corral.e2e.attendance import Attended, attend_to, preflight_of, probe
from corral.e2e.baseline import baseline_checks
from corral.e2e.checks import evaluate
from corral.e2e.console import Console
from corral.e2e.judgement import Judged, judged
from corral.e2e.local_service import LocalService, Size
from corral.e2e.parity import compare, parity_checks
from corral.e2e.problems import problems
from corral.e2e.process import Signals
from corral.e2e.read import Found
from corral.e2e.result import Check, JobPart, ParityReport, Result
from corral.e2e.submission import Places, Role, request_of, source_of
from corral.errors import ConfigError, CorralError, DeadlineError, InfraError
from corral.exits import Terminated
from corral.job.client.api import Patience
from corral.job.client.bundle import Bundle, packed
from corral.job.client.endpoint import Endpoint, endpoint
from corral.job.protocol.submit import SubmitRequest

FOLDERS: dict[Role, str] = {"main": "job", "reference": "reference"}
_OWN_SERVICE = 30.0  # seconds; a service of our own that is lost for so long does not come back


@dataclass(frozen=True)
class Options:
    """on: None for a service of the run's own. cache: of needs and recorded generations. prepare: make the needs that
    are missing. reconnect: seconds."""

    on: Endpoint | None
    cache: Path
    prepare: bool = True
    parity: bool = True
    reconnect: float = 600.0


class Interrupted(CorralError):
    """A signal ended the run; the job that ran was cancelled."""

    def __init__(self, number: signal.Signals, detail: str = "") -> None:
        super().__init__(f"{number.name}{f'; {detail}' if detail else ''}")
        self.exit_code = 128 + number


@dataclass
class CaseRun:
    """A case that runs in `folder`, which is its own."""

    found: Found
    folder: Path
    options: Options
    console: Console
    started: float = field(default_factory=time.time)
    commit: str = ""
    jobs: dict[Role, Attended] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    parity: ParityReport | None = None

    def run(self) -> Result:
        """Never raises for what a case, a job, a service or a signal can do."""
        self.result(Judged("INTERRUPTED", "it was killed before its end", InfraError.exit_code)).write(self.folder)
        try:
            self._work()
        except KeyboardInterrupt:
            return self._broken_off(Interrupted(signal.SIGINT))
        except Terminated:
            return self._broken_off(Interrupted(signal.SIGTERM))
        except CorralError as error:
            return self._broken_off(error)
        return self.result(judged(self.checks, self.jobs["main"], self.jobs.get("reference")))

    # The story ------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        case = self.found.case
        if wrong := problems(self.found):
            raise ConfigError("; ".join(wrong))
        if self.options.on is not None:
            probe(self.options.on, self._patience)
        places = self._places()
        source = source_of(self.found, places)
        self.commit = source.commit
        for notice in source.listing.notices:
            self.console.say(f"-- {notice}")
        requests = {role: request_of(self.found, role, places, source) for role in self._roles()}
        with ExitStack() as stack:
            service, where = None, self.options.on
            if where is None:
                service = stack.enter_context(LocalService(self.folder / "service", self._size(), self._secrets()))
                where = endpoint(service.url, env={})
            bundle = stack.enter_context(packed(source.listing))
            try:
                for role, request in requests.items():
                    self._attend(role, where, request.model_copy(update={"bundle": bundle.digest}), bundle)
                    if self.jobs[role].exit_code != 0:
                        break
            finally:
                if service is not None:
                    service.keep = any(job.lost for job in self.jobs.values())
        self._check()
        if case.rollouts is not None and places.rollouts is None and all(check.ok for check in self.checks):
            self._keep_rollouts()

    def _roles(self) -> list[Role]:
        wanted = self.found.case.parity is not None and self.options.parity
        return ["main", "reference"] if wanted else ["main"]

    def _places(self) -> Places:
        case, root, say = self.found.case, self.options.cache, self.console.say
        here = self.options.on is None or self.options.on.loopback
        if here and not self.options.prepare:
            needs = caches.require(case, root)
        elif here:
            with Signals() as signals:
                try:
                    needs = caches.prepare(case, root, say, signals)
                except caches.Interrupted:
                    raise Interrupted(signals.received[0]) from None
            if signals.received:
                raise Interrupted(signals.received[0])
        else:
            needs = caches.look_up(case, root)
            made = ", ".join(str(needs[name]) for name, need in case.needs.items() if need.make is not None)
            if made:
                say(f"-- the service has to have {made}; made there by `corral e2e prepare {case.name} --cache {root}`")
        return Places(needs, caches.rollouts_in(case, root, say) if case.rollouts is not None else None)

    def _attend(self, role: Role, where: Endpoint, request: SubmitRequest, bundle: Bundle) -> None:
        """Raises CorralError when it ended without a verdict."""
        resources = request.resources
        assert resources is not None
        devices = f"{resources.nodes} x {resources.accelerators_per_node} devices"
        self.console.say(f"-- {self.found.case.name}: {'job' if role == 'main' else 'reference job'}, {devices}")
        job = attend_to(where, self._patience, request, bundle, self.folder / FOLDERS[role], self.console)
        self.jobs[role] = job
        if job.lost is not None:
            self.console.say(f"-- {job.lost}")
        if job.interrupted is not None:
            raise Interrupted(job.interrupted, job.line)
        if job.verdict is None:
            error = InfraError(job.line)
            error.exit_code = job.exit_code
            raise error

    def _check(self) -> None:
        """What each job left against what is expected of it, the most telling first."""
        case, records = self.found.case, self.folder / FOLDERS["main"]
        main, reference = self.jobs["main"], self.jobs.get("reference")
        part = self._part("main")
        assert part is not None
        self.checks = [main.pointed(check) for check in evaluate(case, part, records)]
        if main.lost is not None:
            self.checks.insert(1, _lost("records", main.lost))
        if reference is not None:
            self.checks.append(_of_reference(reference))
            if reference.lost is not None:
                self.checks.append(_lost("records of the reference run", reference.lost))
            elif reference.exit_code == 0:
                assert case.parity is not None
                other, divergence = self.folder / FOLDERS["reference"], self.folder / "divergence"
                self.parity = compare(other, records, case.parity, divergence)
                self.checks += parity_checks(self.parity)
        self.checks += baseline_checks(self.found, records)

    def _keep_rollouts(self) -> None:
        recorded = self.folder / FOLDERS["main"] / "rollouts"
        try:
            if kept := caches.publish_rollouts(self.found.case, self.options.cache, recorded):
                self.console.say(f"-- generations are kept for the next run: {kept}")
        except InfraError as error:  # costs the next run time, and this one nothing
            self.console.say(f"-- {error}")

    # Facts ----------------------------------------------------------------------------------------------------------

    @property
    def _patience(self) -> Patience:
        longest = _OWN_SERVICE if self.options.on is None else self.options.reconnect
        return Patience.of(min(longest, self.options.reconnect))

    def _size(self) -> Size:
        case = self.found.case
        shapes = [(case.topology.nodes, case.topology.devices_per_node)]
        if case.parity is not None and self.options.parity:
            shapes.append((case.parity.nodes, case.parity.devices_per_node))
        nodes, devices = zip(*shapes, strict=True)
        return Size(max(nodes), max(devices), max(one * other for one, other in shapes))

    def _secrets(self) -> dict[str, str]:
        """A service of our own knows what our environment does. Raises ConfigError."""
        case = self.found.case
        for name in case.secrets:
            if name not in os.environ:
                raise ConfigError(f"case {case.name}: secret {name} is not set; on local it comes from the environment")
        return {name: os.environ[name] for name in case.secrets}

    def _part(self, role: Role) -> JobPart | None:
        job, folder = self.jobs.get(role), FOLDERS[role]
        return None if job is None else job.part(folder, preflight_of(self.folder / folder))

    def _broken_off(self, error: CorralError) -> Result:
        """Half a run meets no expectations; saying which would only hide the reason."""
        self.checks, reason = [], str(error).removeprefix(f"case {self.found.case.name}: ")
        kind = next((name for cls, name in _CLASSES.items() if isinstance(error, cls)), "user")
        if isinstance(error, Interrupted):
            return self.result(Judged("INTERRUPTED", reason, error.exit_code, "cancel"))
        if isinstance(error, DeadlineError):
            return self.result(Judged("TIMEOUT", reason, error.exit_code, "timeout"))
        return self.result(Judged("FAILED", reason, error.exit_code, kind))

    def result(self, judged: Judged) -> Result:
        case = self.found.case
        return Result(
            case=case.name,
            summary=case.summary,
            status=judged.status,
            reason=" ".join(judged.reason.split()),
            exit_code=judged.exit_code,
            failure_class=judged.failure_class,
            started=self.started,
            seconds=time.time() - self.started,
            where="local" if self.options.on is None else self.options.on.url,
            corral=__version__,
            commit=self.commit,
            checks=self.checks,
            job=self._part("main"),
            reference=self._part("reference"),
            parity=self.parity,
            again=shlex.join(["corral", "e2e", "replay", _shown(self.folder)]),
        )


_CLASSES: dict[type[CorralError], str] = {ConfigError: "config", InfraError: "infra"}


def _of_reference(job: Attended) -> Check:
    return Check(
        group="parity", name="reference run", expected="SUCCEEDED", found=job.line, ok=job.exit_code == 0
    )  # fmt: skip


def _lost(name: str, error: CorralError) -> Check:
    return Check(group="run", name=name, expected="fetched", found=str(error), ok=False)


def _shown(folder: Path) -> str:
    """Relative to the working folder where it lies below it."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
