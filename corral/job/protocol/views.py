"""What the service answers about jobs. Names of variables and secrets are shown, their values never."""

from __future__ import annotations

from pydantic import BaseModel

from corral.job.protocol.states import JobState
from corral.job.protocol.submit import Resources, Timeouts
from corral.job.protocol.verdict import Verdict


class JobView(BaseModel):
    """A job. Times are Unix seconds; state_since: of the present state; admitted and running: of this attempt."""

    job_id: str
    state: JobState
    attempt: int
    owner: str
    repository: str
    commit_sha: str
    branch: str
    github_run_id: str
    github_run_attempt: int
    name_suffix: str
    image: str
    command: list[str]
    env: list[str]
    secrets: list[str]
    labels: dict[str, str]
    resources: Resources
    timeouts: Timeouts
    priority: int
    bundle: str | None = None
    created: float
    state_since: float
    admitted: float | None = None
    running: float | None = None
    finished: float | None = None
    verdict: Verdict | None = None
    cancel: str | None = None
    lease_until: float | None = None
    last_seq: int


class JobList(BaseModel):
    """Newest first. next: give it as `after` for the following page; None: there is none."""

    jobs: list[JobView]
    next: str | None = None


class EventList(BaseModel):
    """Events that are no log lines. next_seq: give it as `after_seq` to go on. done: `final` has been reached."""

    events: list[dict[str, object]]
    next_seq: int
    done: bool


class LeaseView(BaseModel):
    """The answer to a client's heartbeat. lease_until: None for a job without a lease."""

    job_id: str
    state: JobState
    lease_until: float | None = None


class Swept(BaseModel):
    """One job of a workflow that was cleaned up. action: cancelling or already_over."""

    job_id: str
    state: JobState
    action: str


class Sweep(BaseModel):
    """The answer to DELETE of a workflow; without jobs too. pending: jobs whose nodes are not gone yet: ask again."""

    run_id: str
    attempt: int | None
    jobs: list[Swept]
    pending: int


class Waiting(BaseModel):
    """A queued job. ahead: devices that queued jobs before it ask for. starts_next: it fits now."""

    job_id: str
    repository: str
    priority: int
    devices: int
    waited: float
    ahead: int
    starts_next: bool


class QueueView(BaseModel):
    """devices: of the backend, all in all. held: by jobs from admission to the end of clean-up."""

    devices: int
    held: int
    waiting: list[Waiting]


class DryRun(BaseModel):
    """What a submit would do; nothing was stored. state: NEW, or that of the job it would find (created: False). cwd:
    absolute, or inside the folder of the attempt; "" for a job that is there. ahead: jobs that start before it.
    manifest: YAML of what a backend would create for it; None where it creates nothing of that kind."""

    dry_run: bool = True
    job_id: str
    state: str
    created: bool
    command: list[str]
    cwd: str
    resources: Resources
    ahead: int
    notices: list[str]
    manifest: str | None = None


class Version(BaseModel):
    version: str
    protocol: int = 1
    backend: str


class Health(BaseModel):
    status: str
