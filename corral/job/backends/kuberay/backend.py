"""Jobs as RayJobs of a Kubernetes cluster, with the KubeRay operator. See docs/kuberay.md."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from corral.errors import ConfigError, InfraError
from corral.job.backends import folder as files
from corral.job.backends.base import ANY, Capacity, Observation, Placement, Presence
from corral.job.backends.identity import service_id
from corral.job.backends.kuberay import cleanup
from corral.job.backends.kuberay import manifest as manifests
from corral.job.backends.kuberay import pod_states as pods
from corral.job.backends.kuberay.client import KubeClient, Object
from corral.job.backends.kuberay.cluster import Cluster
from corral.job.backends.kuberay.dashboard import ANSWER, Dashboards, Question
from corral.job.backends.kuberay.errors import Invalid, KubeError, NotFound
from corral.job.backends.kuberay.informer import Pace
from corral.job.backends.kuberay.pods import RAY_TOKEN_KEY
from corral.job.backends.kuberay.status import (
    INTERACTIVE,
    UNASKED,
    Answer,
    Heard,
    gone,
    head_given,
    judge,
    lost_head,
    mode_of,
    text,
    was_given,
)
from corral.job.backends.kuberay.transport import Patience
from corral.job.backends.kuberay.way import Wanted, Way
from corral.job.backends.ray_jobs.api import JobsApi, Submission
from corral.job.backends.ray_jobs.attempt import Harvest, boarding_of, submission_of
from corral.job.backends.ray_jobs.note import Note, Stage, read_note, write_note
from corral.job.protocol.agent import BOARDING, TOKEN, AgentSpec, EndRecord, Heartbeat
from corral.job.protocol.submit import Resources
from corral.job.service.settings import Settings

_WEBHOOK = re.compile(r"admission webhook .{1,260} denied the request")

log = logging.getLogger("corral.service.kuberay")


@dataclass(frozen=True)
class Bounds:
    """Seconds. look: between looks at what does not change by itself. fresh: for which an answer of Ray is good.
    wait: that one look waits for Ray. answer: until one that Ray does not give counts as silence. silence: of a
    dashboard, after which a RayJob that failed is judged without it. head: without its head pod, or with another one,
    after which a job is lost. events: between looks for events. removal: until what is still there after a deletion
    is named."""

    look: float = 1.0
    fresh: float = 1.0
    wait: float = 1.5
    answer: float = ANSWER
    silence: float = 20.0
    head: float = 10.0
    events: float = 5.0
    removal: float = cleanup.BOUND


class KubeRayBackend:
    """See backends.base.Backend. Raises ConfigError for settings that no cluster can be reached with."""

    name = "kuberay"
    remote = True

    def __init__(
        self,
        settings: Settings,
        *,
        pace: Pace | None = None,
        patience: Patience | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self.capacity = Capacity(settings.devices, settings.max_nodes, settings.max_devices_per_node)
        self._settings = replace(settings, data_dir=settings.data_dir.resolve())
        self._bounds = bounds or Bounds()
        client = KubeClient.from_settings(settings.kubernetes, patience)
        self._cluster = Cluster(client, service_id(self._settings.data_dir), pace, min(2.0, self._bounds.events / 2))
        self._dashboards = Dashboards(settings.kubernetes, client)
        self._harvest = Harvest(self._settings.data_dir)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ways: dict[str, Way] = {}
        self._questions: dict[str, Question] = {}
        self._stops: dict[str, asyncio.Task[None]] = {}
        self._never: set[str] = set()  # stopped before Ray was given them
        self._headless: dict[str, float] = {}  # since when the head that has the job is not seen
        self._told: dict[str, tuple[float, str]] = {}  # what events said, and when they were read
        if lost := manifests.LOST.get(mode := settings.kubernetes.submission):
            log.warning("kubernetes.submission is %s: %s; InteractiveMode, the default, has none of this", mode, lost)

    async def close(self) -> None:
        """Leave everything as it is."""
        for way in self._ways.values():
            await way.close()
        for question in self._questions.values():
            question.close()
        for stop in self._stops.values():
            stop.cancel()
        await self._cluster.close()

    def refusal(self, resources: Resources, placement: Placement) -> str | None:
        return manifests.refusal(resources, placement, self._settings)

    def manifest(self, submission_id: str, resources: Resources, placement: Placement) -> str | None:
        return manifests.to_yaml(self._manifest(submission_id, resources, placement))

    def attempt_dir(self, submission_id: str) -> Path | None:
        folder = self._folder(submission_id)
        return folder if folder is not None and folder.is_dir() else None

    # Starting -------------------------------------------------------------------------------------------------------

    async def provision(self, spec: AgentSpec, resources: Resources, placement: Placement = ANY) -> None:
        name = spec.submission_id
        self.capacity.check(resources)
        folder = self._folder(name)
        if folder is None:
            raise ConfigError(f"{name!r} is not the id of a submission")
        async with self._locks[name]:
            if (folder / files.END).exists() or _destroyed(folder):
                return
            await asyncio.to_thread(files.write_spec, folder, spec)
            try:
                await self._make(spec, resources, placement)
            except KubeError as error:
                if (meant := _refusal(error)) is None:
                    raise
                raise meant from error
            await asyncio.to_thread(write_note, folder, Note(Stage.SUBMITTED))
            way = self._way(name)
            devices = manifests.asked_of(name, resources, placement, self._settings, self._cluster.owner).ray
            way.wanted = Wanted(self._submission(spec, placement), resources, placement, devices)
            way.start()

    async def _make(self, spec: AgentSpec, resources: Resources, placement: Placement) -> None:
        """The Secret first, as the pods need it, and let it go with the RayJob in the end."""
        name = spec.submission_id
        there = await self._cluster.newest(name)
        if there is not None:
            self._cluster.checked(there, name)
            if there["metadata"].get("deletionTimestamp"):
                return
        else:
            await self._cluster.put_secret(name, self._values(spec, placement))
            there = await self._cluster.make_rayjob(name, self._manifest(name, resources, placement))
        try:
            await self._cluster.own_secret(name, there)
        except NotFound:  # somebody deleted it: pods that have not started yet wait for it
            await self._cluster.put_secret(name, self._values(spec, placement))
            await self._cluster.own_secret(name, there)

    def _values(self, spec: AgentSpec, placement: Placement) -> dict[str, str]:
        """Of the Secret."""
        values = {TOKEN: spec.token, BOARDING: boarding_of(spec, self._settings, self._by_cluster(placement))}
        token = self._dashboards.token()
        return values if token is None else values | {RAY_TOKEN_KEY: token}

    def _manifest(self, submission_id: str, resources: Resources, placement: Placement) -> Object:
        return manifests.manifest(submission_id, resources, placement, self._settings, owner=self._cluster.owner)

    def _way(self, name: str) -> Way:
        if name not in self._ways:
            self._ways[name] = Way(name, self._cluster, self._dashboards, self._bounds.look)
        return self._ways[name]

    def _submission(self, spec: AgentSpec, placement: Placement) -> Submission:
        """All that tells jobs apart lies in the Secret, which the head reads: the Ray job says nothing of it. Ray's own
        variables are those of the head's container, as they are where the operator submits."""
        by_cluster = self._by_cluster(placement)
        made = submission_of(
            spec, self._settings, placement, owner=self._cluster.owner, secret_env=by_cluster, agent_env=False
        )
        return replace(made, env={})

    def _by_cluster(self, placement: Placement) -> set[str]:
        """Secrets that the cluster itself gives to the agent."""
        return set(placement.secrets) & set(self._settings.kubernetes.secrets)

    # Looking --------------------------------------------------------------------------------------------------------

    async def observe(self, submission_id: str) -> Observation:
        folder = self._folder(submission_id)
        if folder is None:
            return Observation(Presence.ABSENT)
        rayjob = await self._cluster.rayjob(submission_id)
        if rayjob is None:
            note = read_note(folder)
            return gone(submission_id) if note and note.stage is Stage.SUBMITTED else Observation(Presence.ABSENT)
        if submission_id in self._never:
            return Observation(Presence.ENDED, "it was stopped before Ray was given it")
        heard, seen = UNASKED, judge(rayjob)
        if seen is None:
            heard = await self._ask(submission_id, rayjob)
            seen = judge(rayjob, heard)
            assert seen is not None
            if _final(rayjob) and seen.presence is Presence.ENDED and heard.answer is Answer.SILENT:
                self._await_dashboard(submission_id)
        if (lost := self._lost(submission_id, rayjob, heard)) is not None and seen.presence is not Presence.ENDED:
            return lost
        if seen.presence is Presence.ENDED:
            if not await self._settled(submission_id, rayjob):
                said = f"{seen.message}; what its agent left in Ray's log is being read"
                return replace(seen, presence=Presence.ACTIVE, message=said, fate=None, exit_code=None)
            if heard.job is not None and heard.job.over:  # its last words are known now
                return judge(rayjob, replace(heard, output=self._harvest.output(submission_id))) or seen
            return seen
        if seen.presence in (Presence.STARTING, Presence.ACTIVE):
            return await self._going(submission_id, rayjob, seen)
        return seen

    async def _going(self, name: str, rayjob: Object, seen: Observation) -> Observation:
        """One that is on its way, or runs: its way goes on, and people are told what it waits for."""
        way = self._way(name)
        if name not in self._stops:
            way.start()
        if seen.presence is Presence.ACTIVE:
            return seen
        trouble = await self._pod_trouble(name, rayjob)
        return replace(seen, message=trouble or way.said or seen.message)

    async def _ask(self, name: str, rayjob: Object) -> Heard:
        question = self._questions.setdefault(name, Question(name, self._bounds.answer))
        return await question.ask(self._dashboards.of(name, rayjob), self._bounds.fresh, self._bounds.wait)

    def _await_dashboard(self, name: str) -> None:
        """Its own word is worth waiting for, a while. Raises InfraError meanwhile."""
        if (silent := self._silence(name)) < self._bounds.silence:
            raise InfraError(f"RayJob {name} failed, and Ray's dashboard does not answer since {silent:.0f} s")

    def _silence(self, name: str) -> float:
        return self._questions[name].silent if name in self._questions else 0.0

    async def _settled(self, name: str, rayjob: Object) -> bool:
        """Whether all is known that the agent left at Ray about its end."""
        if await asyncio.to_thread(self._harvest.end_record, name) is not None:
            return True
        api = self._dashboards.of(name, rayjob)
        heard = await self._ask(name, rayjob)
        if api is None or heard.job is None or not heard.job.over:
            return True
        return await self._harvest.settled(api, name)

    def _lost(self, name: str, rayjob: Object, heard: Heard) -> Observation | None:
        """Whether the head that has the job is gone. Only for a while without it, as views lag behind."""
        given, cluster = head_given(rayjob), text(rayjob.get("status") or {}, "rayClusterName")
        its = self._cluster.pods_of(name, cluster) if given else None
        if its is None or (heard.job is not None and mode_of(rayjob) == INTERACTIVE):
            self._headless.pop(name, None)
            return None
        head = pods.head_of(its)
        if head is not None and pods.uid_of(head) == given:
            self._headless.pop(name, None)
            return None
        since = self._headless.setdefault(name, time.monotonic())
        if time.monotonic() - since < self._bounds.head:
            return None
        said = "its head pod is gone" if head is None else f"its head pod was replaced by {pods.name_of(head)}"
        if trouble := pods.trouble([pod for pod in its if pods.labels_of(pod).get(pods.NODE_TYPE) == "head"]):
            said += f" ({trouble})"
        return lost_head(rayjob, f"{said}; Ray kept the job there, and knows nothing of it now")

    async def _pod_trouble(self, name: str, rayjob: Object) -> str:
        """Why pods do not run; of a job that has none yet, what was noted about it."""
        its = self._cluster.pods_of(name, text(rayjob.get("status") or {}, "rayClusterName")) or []
        if its and not (said := pods.trouble(its)):
            return ""
        at, told = self._told.get(name, (float("-inf"), ""))
        if time.monotonic() - at > self._bounds.events:
            try:
                events = await self._cluster.events_of(name)
            except KubeError as error:
                log.info("no events of %s: %s", name, error)
                events = []
            told = pods.trouble(its, events) if its else pods.complaint(events)
            self._told[name] = time.monotonic(), told
        return told or (said if its else "")

    # What the agent left --------------------------------------------------------------------------------------------

    async def end_record(self, submission_id: str) -> EndRecord | None:
        record = await asyncio.to_thread(self._harvest.end_record, submission_id)
        folder = self._folder(submission_id)
        if record is not None or folder is None:
            return record
        note = read_note(folder)
        if note is None or note.stage is not Stage.SUBMITTED:
            return None
        way = self._ways.get(submission_id)
        if way is not None and way.refused:
            await asyncio.to_thread(_refused, folder, submission_id, way.refused)
            return self._harvest.end_record(submission_id)
        rayjob = await self._cluster.rayjob(submission_id)
        if rayjob is None or not text(rayjob.get("status") or {}, "dashboardURL"):
            return None
        heard = await self._ask(submission_id, rayjob)
        if heard.job is not None and heard.job.over and await self._settled(submission_id, rayjob):
            return self._harvest.end_record(submission_id)
        return None

    async def fetch(self, submission_id: str, watermarks: Mapping[str, int]) -> Heartbeat | None:
        api = await self._with_output(submission_id)
        return None if api is None else await self._harvest.fetch(api, submission_id, watermarks)

    async def _with_output(self, name: str) -> JobsApi | None:
        """Where the output of the job is to be had; None when it is nowhere any more, so that nobody waits for it.

        Raises InfraError when Ray does not answer now.
        """
        rayjob = await self._cluster.rayjob(name) if files.split(name) is not None else None
        api = None if rayjob is None else self._dashboards.of(name, rayjob)
        if rayjob is None or api is None or self._lost(name, rayjob, UNASKED) is not None:
            return None
        heard = await self._ask(name, rayjob)
        if heard.answer is Answer.SILENT:
            seen = judge(rayjob, heard)
            if seen is not None and seen.presence is Presence.ENDED and self._silence(name) >= self._bounds.silence:
                return None
            raise InfraError(f"Ray's dashboard of {name} does not answer since {self._silence(name):.0f} s")
        return api

    # Ending ---------------------------------------------------------------------------------------------------------

    async def stop(self, submission_id: str, grace: float) -> None:
        """Ray's own grace is fixed when a job is submitted; an agent that is told to end needs less than `grace`."""
        if self.attempt_dir(submission_id) is None or submission_id in self._stops:
            return
        task = asyncio.create_task(self._stop(submission_id, grace), name=f"stop of {submission_id}")
        self._stops[submission_id] = task

    async def _stop(self, name: str, grace: float) -> None:
        """Until Ray says that it is over, or has no such job. What cannot be told to end is deleted soon after."""
        await self._way(name).close()  # what was not given to Ray is not given any more
        end, told = time.monotonic() + max(grace, self._bounds.look), False
        while time.monotonic() < end:
            try:
                rayjob = await self._cluster.rayjob(name)
                api = self._dashboards.of(name, rayjob) if rayjob is not None else None
                job = await api.get(name) if api is not None else None
                if job is None and (rayjob is None or not was_given(rayjob)):
                    self._never.add(name)
                if api is None or job is None or job.over:
                    return
                if not told:
                    await api.stop(name)
                    told = True
            except InfraError as error:
                log.info("%s is not told to stop yet: %s", name, error)
            await asyncio.sleep(min(0.25, self._bounds.look))

    async def destroy(self, submission_id: str) -> None:
        folder = self._folder(submission_id)
        if folder is None:
            return
        async with self._locks[submission_id]:
            if folder.is_dir():
                await asyncio.to_thread(write_note, folder, Note(Stage.DESTROYED))
            if (stop := self._stops.pop(submission_id, None)) is not None:
                stop.cancel()
            await self._way(submission_id).close()
            await cleanup.remove(self._cluster, submission_id, self._bounds.removal, self._bounds.look / 2)
            await self._forget(submission_id)
        self._locks.pop(submission_id, None)

    async def list_owned(self) -> list[str]:
        return await self._cluster.owned()

    async def _forget(self, name: str) -> None:
        await self._harvest.forget(name)
        await self._dashboards.forget(name)
        self._ways.pop(name, None)
        self._headless.pop(name, None)
        self._told.pop(name, None)
        self._never.discard(name)
        if (question := self._questions.pop(name, None)) is not None:
            question.close()

    def _folder(self, submission_id: str) -> Path | None:
        known = files.split(submission_id)
        return files.attempt_folder(self._settings.data_dir, *known) if known else None


def _destroyed(folder: Path) -> bool:
    note = read_note(folder)
    return note is not None and note.stage is Stage.DESTROYED


def _refusal(error: KubeError) -> ConfigError | InfraError | None:
    """What it means for a new job; None: it is tried again. A webhook's no is about the job, a quota's about now."""
    if isinstance(error, Invalid) or (error.status < 500 and _WEBHOOK.search(error.message)):
        return ConfigError(f"the cluster refuses the RayJob: {error.message}")
    if error.status == 403 and "exceeded quota" not in error.message:
        return InfraError(f"{error.message}; see docs/kuberay.md for the rights the service needs")
    return None


def _final(rayjob: Object) -> bool:
    return text(rayjob.get("status") or {}, "jobDeploymentStatus") in ("Failed", "Complete")


def _refused(folder: Path, submission_id: str, why: str) -> None:
    """The cluster will never take the job: its end record says so."""
    known = files.split(submission_id)
    assert known is not None, submission_id
    now = time.time()
    record = EndRecord(
        job_id=known[0], attempt=known[1], exit_code=None, failure=why, kind="config", started=now, ended=now
    )
    files.write_private(folder / files.END, record.sealed().model_dump_json() + "\n")
