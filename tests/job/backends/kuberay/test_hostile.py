"""What others do to a job's objects, or have in the same namespace: nothing of ours is left, nothing of theirs touched."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from corral.errors import InfraError
from tests.job.backends.kuberay.incident import scene
from tests.job.backends.kuberay.place import FAST, Kubernetes_, kubernetes


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Kubernetes_]:
    with kubernetes(tmp_path, runs=False) as cluster:
        yield cluster


def test_a_pod_that_stays_is_waited_for_and_named(it: Kubernetes_) -> None:
    """As on a node that no longer answers: its devices are not free, so the job is not said to be gone."""

    async def life() -> None:
        async with scene(it, bounds=replace(FAST, removal=0.3)) as at:
            await at.runs()
            (pod,) = it.kube.objects("pods")
            it.kube.patch("pods", pod["metadata"]["name"], {"metadata": {"finalizers": ["example.com/slow"]}})
            with pytest.raises(InfraError, match=f"pod {pod['metadata']['name']} .*example.com/slow"):
                await at.backend.destroy(at.name)
            it.kube.patch("pods", pod["metadata"]["name"], {"metadata": {"finalizers": []}})
            await at.backend.destroy(at.name)
            it.nothing_left()

    asyncio.run(life())
