"""What of a Kubernetes namespace belongs to this service: its RayJobs, and what was made from them."""

from __future__ import annotations

import asyncio
import time

from corral.errors import ConfigError
from corral.job.backends.folder import split
from corral.job.backends.kuberay.client import EVENTS, PODS, RAYCLUSTERS, RAYJOBS, SECRETS, KubeClient, Object
from corral.job.backends.kuberay.errors import AlreadyExists, KubeError, NotFound
from corral.job.backends.kuberay.informer import Informer, Pace
from corral.job.backends.kuberay.manifest import MANAGED_BY
from corral.job.backends.kuberay.pod_states import labels_of, name_of, of_cluster, uid_of
from corral.job.backends.kuberay.pods import SERVICE, SUBMISSION

LOOK_UP = 5.0  # seconds that a look at one object may take; less than the service gives `observe`
TOO_OLD = 120.0  # seconds without a word from the server after which a view of ours is not believed


class Cluster:
    """owner: of labels, tells the objects of one service from those of others. share_events: seconds for which a list
    of events is good. All methods raise KubeError."""

    def __init__(self, client: KubeClient, owner: str, pace: Pace | None = None, share_events: float = 2.0) -> None:
        self.client, self.owner = client, owner
        self._share_events, self._events_until = share_events, float("-inf")
        self._events: list[Object] = []
        self._listing = asyncio.Lock()
        self.selector = f"{SERVICE}={owner}"
        self.rayjobs = Informer(client, RAYJOBS, selector=self.selector, pace=pace)
        self.pods = Informer(client, PODS, selector=self.selector, pace=pace)

    async def close(self) -> None:
        await self.rayjobs.close()
        await self.pods.close()
        await self.client.close()

    def follow(self) -> None:
        """Begin to follow what is there, in the loop that runs."""
        self.rayjobs.start()
        self.pods.start()

    def owns(self, thing: Object, submission_id: str) -> bool:
        labels = labels_of(thing)
        return labels.get(SERVICE) == self.owner and labels.get(SUBMISSION) == submission_id

    async def rayjob(self, submission_id: str) -> Object | None:
        """As last heard; one that we know nothing of is looked up. None: there is none, or it is not ours."""
        self.follow()
        found = self.rayjobs.get(submission_id) if self._fresh(self.rayjobs) else None
        if found is None:
            found = await self.newest(submission_id)
        return found if found is not None and self.owns(found, submission_id) else None

    async def newest(self, submission_id: str) -> Object | None:
        """The RayJob of that name as the server has it now, whoever made it.

        Raises KubeError also for a 404 that does not speak of this object: of a server that has no RayJobs (yet, or
        while KubeRay is updated), or of something in front of it. Nobody's job is gone because of that.
        """
        try:
            async with asyncio.timeout(LOOK_UP):
                return await self.client.get(RAYJOBS, submission_id)
        except NotFound as error:
            if f'"{submission_id}" not found' not in error.message:
                raise
            return None
        except TimeoutError:
            said = self.rayjobs.trouble or f"no answer in {LOOK_UP:.0f} s"
            raise KubeError(
                0, "Timeout", f"the API server does not say what there is of {submission_id}: {said}"
            ) from None

    def pods_of(self, submission_id: str, raycluster: str = "") -> list[Object] | None:
        """Its pods as last heard, of one RayCluster when that is named, the head first; None: not known now."""
        self.follow()
        if not self._fresh(self.pods):
            return None
        every = [pod for pod in self.pods.items() if labels_of(pod).get(SUBMISSION) == submission_id]
        return of_cluster(every, raycluster) if raycluster else every

    async def events_of(self, name: str) -> list[Object]:
        """What was noted about a RayJob and what was made from it, oldest first. All who ask within a moment share one
        list, as there is one for the whole namespace only."""
        async with self._listing:
            if time.monotonic() >= self._events_until:
                self._events = (await self.client.list(EVENTS)).items
                self._events_until = time.monotonic() + self._share_events
        involved = [(str((one.get("involvedObject") or {}).get("name", "")), one) for one in self._events]
        about = [one for its, one in involved if its == name or its.startswith(f"{name}-")]
        return sorted(about, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""))

    async def owned(self) -> list[str]:
        """Submission ids of all that exists, also of what lost its RayJob."""
        found: set[str] = set()
        for kind in (RAYJOBS, RAYCLUSTERS, SECRETS):
            for thing in (await self.client.list(kind, selector=self.selector)).items:
                found.add(labels_of(thing).get(SUBMISSION, ""))
        return sorted(name for name in found if split(name) is not None)

    # Making ---------------------------------------------------------------------------------------------------------

    async def make_rayjob(self, submission_id: str, body: Object) -> Object:
        """The one RayJob of that name: made now, or before. Raises ConfigError when it is another's."""
        try:
            return await self.client.create(RAYJOBS, body)
        except AlreadyExists:
            pass
        except KubeError as error:
            # The answer is lost, or the server failed after it had done it: what is there tells.
            found = await self.newest(submission_id) if error.status in (0, 500, 502, 503, 504) else None
            if found is None:
                raise
        found = await self.newest(submission_id)
        if found is None:
            raise KubeError(0, "Gone", f"RayJob {submission_id} was there and is gone; tried again")
        return self.checked(found, submission_id)

    def checked(self, rayjob: Object, submission_id: str) -> Object:
        """Raises ConfigError for a RayJob that this service did not make."""
        if self.owns(rayjob, submission_id):
            return rayjob
        raise ConfigError(
            f"RayJob {submission_id} in namespace {self.client.namespace} is there and this service did not make it; "
            "another service that uses the namespace was sent the same job, or it was made by hand: delete it, or give "
            "this service a namespace of its own"
        )

    async def put_secret(self, submission_id: str, values: dict[str, str]) -> None:
        """The Secret of that name with exactly these values, whatever an earlier try left: it is never changed, only
        made anew. Raises ConfigError when there is one that this service did not make."""
        labels = {MANAGED_BY: "corral", SERVICE: self.owner, SUBMISSION: submission_id}
        body: Object = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": submission_id, "labels": labels},
            "type": "Opaque",
            "immutable": True,
            "stringData": values,
        }
        try:
            await self.client.create(SECRETS, body)
            return
        except AlreadyExists:
            there = await self.client.get(SECRETS, submission_id)
        if not self.owns(there, submission_id):
            raise ConfigError(
                f"Secret {submission_id} in namespace {self.client.namespace} is there and this service did not make "
                "it; delete it"
            )
        await self.client.delete(SECRETS, submission_id, uid=uid_of(there))
        await self.client.create(SECRETS, body)

    async def own_secret(self, submission_id: str, rayjob: Object) -> None:
        """Let the Secret go with its RayJob, whoever deletes that."""
        patch = {"metadata": {"ownerReferences": [owner_reference(rayjob)]}}
        await self.client.patch(SECRETS, submission_id, patch)

    def _fresh(self, informer: Informer) -> bool:
        return informer.synced.is_set() and informer.age() < TOO_OLD


def owner_reference(rayjob: Object) -> Object:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "name": name_of(rayjob),
        "uid": uid_of(rayjob),
        "blockOwnerDeletion": False,
    }
