"""Prometheus metrics of one service."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from corral.job.core.record import JobRecord
from corral.job.protocol.states import TERMINAL, JobState

MEDIA_TYPE = CONTENT_TYPE_LATEST
_WAITS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600)
_LATENCIES = (0.005, 0.02, 0.1, 0.5, 2, 10)


class Metrics:
    """Kept apart from the process-wide registry, so that two services in one process do not count together."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.jobs = Gauge("corral_jobs", "Jobs that are not over, by state", ["state"], registry=self.registry)
        self.ended = Counter("corral_jobs_ended", "Jobs that reached their end", ["state"], registry=self.registry)
        self.admissions = Counter("corral_admissions", "Attempts that left the queue", registry=self.registry)
        self.queue_wait = Histogram(
            "corral_queue_wait_seconds", "From queued to admitted", buckets=_WAITS, registry=self.registry
        )
        self.lines = Counter("corral_ingested_lines", "Log lines received from agents", registry=self.registry)
        self.bytes = Counter("corral_ingested_bytes", "Raw bytes of those lines", registry=self.registry)
        self.watchers = Gauge("corral_watchers", "Open watches", registry=self.registry)
        self.requests = Histogram(
            "corral_request_seconds",
            "Requests, by route and status class; a watch counts for as long as it is open",
            ["method", "route", "status"],
            buckets=_LATENCIES,
            registry=self.registry,
        )

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in {"GET", "HEAD", "POST", "PUT", "DELETE"} else "other"
        self.requests.labels(method, route, f"{status // 100}xx" if status else "cut").observe(seconds)

    def observe_change(self, before: JobRecord, after: JobRecord) -> None:
        """Count what a transition means. Times are Unix seconds of the service's clock."""
        if before.state is JobState.QUEUED and after.state is JobState.PROVISIONING:
            self.admissions.inc()
            self.queue_wait.observe(max(0.0, after.state_since - before.state_since))
        elif after.terminal and not before.terminal:
            self.ended.labels(after.state.value).inc()

    def render(self, active: Iterable[JobRecord], watchers: int) -> bytes:
        states = Tally(job.state for job in active)
        for state in JobState:
            if state not in TERMINAL:
                self.jobs.labels(state.value).set(states[state])
        self.watchers.set(watchers)
        return generate_latest(self.registry)
