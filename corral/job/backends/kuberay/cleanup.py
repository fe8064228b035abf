"""Removing all of a submission, and saying what keeps it when it stays.

A finaliser is a promise of whoever set it to clean something up. It is never taken off here: what it stands for (a
queue's quota, a store) would be lost without a word. So an object that nobody lets go stays, is named, and the reaper
tries again.
"""

from __future__ import annotations

import asyncio
import time

from corral.errors import InfraError
from corral.job.backends.kuberay.client import PODS, RAYCLUSTERS, RAYJOBS, SECRETS, Kind, Object
from corral.job.backends.kuberay.cluster import Cluster
from corral.job.backends.kuberay.errors import Conflict
from corral.job.backends.kuberay.pod_states import name_of, uid_of
from corral.job.backends.kuberay.pods import SUBMISSION

BOUND = 60.0  # seconds until what is still there is named
LOOK = 0.5  # seconds between looks
_ORDER = (RAYJOBS, RAYCLUSTERS, PODS, SECRETS)
_WORDS = {RAYJOBS: "RayJob", RAYCLUSTERS: "RayCluster", PODS: "pod", SECRETS: "Secret"}


async def remove(cluster: Cluster, submission_id: str, bound: float = BOUND, look: float = LOOK) -> None:
    """Delete the RayJob, and with it what was made from it; returns when all of it is gone.

    Raises InfraError that names what is left after `bound` seconds, and why.
    """
    end, pause = time.monotonic() + bound, 0.05
    while left := await _left(cluster, submission_id):
        await _delete(cluster, left)
        if time.monotonic() > end:
            raise InfraError(_said(left, bound))
        await asyncio.sleep(pause)
        pause = min(look, 2 * pause)


async def _left(cluster: Cluster, submission_id: str) -> list[tuple[Kind, Object]]:
    selector = f"{cluster.selector},{SUBMISSION}={submission_id}"
    return [(kind, thing) for kind in _ORDER for thing in (await cluster.client.list(kind, selector=selector)).items]


async def _delete(cluster: Cluster, left: list[tuple[Kind, Object]]) -> None:
    """What is not on its way out yet. A RayCluster and its pods go with their owner: only orphans are deleted here, as
    the operator would make anew what it misses."""
    there = {kind for kind, _ in left}
    for kind, thing in left:
        if thing["metadata"].get("deletionTimestamp"):
            continue
        orphaned = (kind is RAYCLUSTERS and RAYJOBS not in there) or (
            kind is PODS and not there & {RAYJOBS, RAYCLUSTERS}
        )
        if kind in (RAYJOBS, SECRETS) or orphaned:
            try:
                await cluster.client.delete(kind, name_of(thing), uid=uid_of(thing))
            except Conflict:
                continue  # another of that name by now, which the next look tells


def _said(left: list[tuple[Kind, Object]], bound: float) -> str:
    parts = []
    for kind, thing in left[:4]:
        finalizers = thing["metadata"].get("finalizers") or []
        why = ""
        if finalizers:
            why = f" (finaliser {', '.join(finalizers)} is not removed; is whoever set it running?)"
        elif kind is PODS and thing["metadata"].get("deletionTimestamp"):
            why = f" (on node {(thing.get('spec') or {}).get('nodeName', '?')}, which does not confirm its end)"
        parts.append(f"{_WORDS[kind]} {name_of(thing)}{why}")
    more = f"; and {len(left) - 4} more" if len(left) > 4 else ""
    return f"still there {bound:.0f} s after it was deleted: {'; '.join(parts)}{more}"
