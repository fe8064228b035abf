"""Logs of Ray jobs that come to a service in trouble: a disk that refuses, a cluster that answers now and then, ends
that are larger than usual. What was said is taken all the same, and nothing is deleted before it was."""

from __future__ import annotations

import asyncio

import pytest

from corral.errors import InfraError
from corral.job.backends.folder import read_end
from corral.job.backends.ray_jobs import harvest as harvesting
from corral.job.backends.ray_jobs.api import JobsApi
from corral.job.backends.ray_jobs.harvest import Harvest
from corral.job.protocol.agent import Heartbeat, RankProgress
from corral.job.protocol.frames import data_frames, frame
from tests.job.backends.contract import until
from tests.job.backends.ray_jobs.dashboard import Close, Dashboard, Job
from tests.job.backends.test_ray_jobs_log import (
    ENTRYPOINT,
    GROWING,
    JOB,
    NAME,
    RAY_SAYS,
    SOURCES,
    brought,
    end,
    folder_of,
    text,
)

BEAT = Heartbeat(attempt=1, phase="running")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harvesting, "PAUSE", 0.01)
    monkeypatch.setattr(harvesting, "IDLE", 0.1)


def over(log: str) -> Job:
    job = Job(entrypoint=ENTRYPOINT, log=RAY_SAYS + log)
    job.end(7)
    return job


def test_a_disk_that_refuses_in_the_middle_of_the_output_costs_none_of_it(tmp_path):
    """All of the log comes at once, and one of its sources cannot be written for a while."""
    folder = folder_of(tmp_path)
    (folder / "run").write_text("in the way")

    async def life() -> None:
        async with Dashboard(jobs={NAME: over(text(SOURCES, frame(end(SOURCES))))}, piece=1 << 20) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            for _ in range(2):
                with pytest.raises(InfraError, match="cannot be kept"):
                    await harvest.fetch(api, NAME, {})
                assert not harvest.all_here(NAME)
            (folder / "run").unlink()
            await harvest.fetch(api, NAME, {})
            assert harvest.all_here(NAME)
            assert harvest.end_record(NAME) == end(SOURCES)

    asyncio.run(life())
    assert brought(folder) == SOURCES


def test_a_disk_that_refuses_a_piece_that_had_waited(tmp_path):
    """What lay before it was stored another way meanwhile."""
    folder = folder_of(tmp_path)
    path = folder / "run/logs/node-0/rank-0.log"
    late = data_frames("node-0/rank-0", 1000, GROWING[1000:2000])

    async def life() -> None:
        async with Dashboard(jobs={NAME: over("".join(f"{line}\n" for line in late))}) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            await harvest.fetch(api, NAME, {})
            path.parent.mkdir(parents=True)
            path.symlink_to("nowhere")
            with pytest.raises(InfraError, match="cannot be kept"):
                await harvest.fetch(api, NAME, {"node-0/rank-0": 1000})
            path.unlink()
            await harvest.fetch(api, NAME, {"node-0/rank-0": 1000})

    asyncio.run(life())
    assert path.read_bytes()[1000:] == GROWING[1000:2000]


def test_an_end_that_cannot_be_kept_is_not_taken_for_none(tmp_path):
    """Until the disk takes it, nothing is settled, or the job would count as one whose agent was lost."""
    folder = folder_of(tmp_path)

    def full(*_: object) -> None:
        raise InfraError("no space")

    async def life() -> None:
        async with Dashboard(jobs={NAME: over(text({}, frame(end({}))))}) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(harvesting.files, "write_private", full)
                for _ in range(3):
                    with pytest.raises(InfraError):
                        await harvest.settled(api, NAME)
            await until(lambda: harvest.settled(api, NAME))
            assert harvest.end_record(NAME) == end({})

    asyncio.run(life())
    assert read_end(folder, JOB, 1) == end({})


def test_what_was_stored_is_remembered_when_the_cluster_does_not_answer_at_first(tmp_path):
    """A new service asks, gets no answer, and then gives the job back to a cluster that answers again: what its agent
    said beyond what is stored comes here before its log is deleted."""
    folder = folder_of(tmp_path)
    rest = {"driver": GROWING}
    late = "".join(f"{line}\n" for line in data_frames("driver", 30_000, GROWING[30_000:]))

    async def life() -> None:
        trouble = [(f"GET /api/jobs/{NAME}", (503, "later"))]
        async with Dashboard(jobs={NAME: over(late + frame(end(rest)))}, answers=trouble) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            with pytest.raises(InfraError):
                await harvest.fetch(api, NAME, {"driver": 30_000})
            await harvest.fetch(api, NAME, {})
            assert harvest.all_here(NAME)

    asyncio.run(life())
    assert (folder / "driver.log").read_bytes()[30_000:] == GROWING[30_000:]


def test_an_end_of_thousands_of_ranks_is_read(tmp_path):
    """So is what their agent says of them while they run."""
    folder_of(tmp_path)
    sizes = {f"node-{number // 8}/rank-{number}": b"" for number in range(4096)}
    ranks = [
        RankProgress(rank=number, node=number // 8, calls=1 << 40, state="working", method="update" * 10, time=1.8e9)
        for number in range(4096)
    ]
    beat, record = BEAT.model_copy(update={"ranks": ranks}), end(sizes)
    assert len(frame(record)) > 90_000

    async def life() -> None:
        async with Dashboard(jobs={NAME: over(f"{frame(beat)}\n{frame(record)}\n")}) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            await until(lambda: harvest.settled(api, NAME))
            assert harvest.end_record(NAME) == record
            assert await harvest.fetch(api, NAME, {}) == beat

    asyncio.run(life())


def test_thousands_of_ranks_do_not_stop_the_service_while_their_output_is_read(tmp_path, monkeypatch):
    """Whether all is here is not looked for after each line."""
    looks = []
    covers = harvesting.RawFiles.covers
    monkeypatch.setattr(harvesting.RawFiles, "covers", lambda *of: looks.append(of) or covers(*of))
    folder = folder_of(tmp_path)
    sources = {f"node-0/rank-{number}": b"a line\n" for number in range(300)}
    job = over(f"{frame(end(sources))}\n{text(sources)}")

    async def life() -> None:
        async with Dashboard(jobs={NAME: job}, piece=150) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            await harvest.fetch(api, NAME, {})
            assert harvest.all_here(NAME)

    asyncio.run(life())
    assert len(list((folder / "run/logs/node-0").iterdir())) == 300
    assert len(looks) < len(job.log) / 150 / 4


def test_a_log_that_comes_slowly_is_not_given_up(tmp_path, monkeypatch):
    """The socket breaks off again and again, each time a little later, for longer than a silent log is waited for."""
    monkeypatch.setattr(harvesting, "PAUSE", 0.1)
    monkeypatch.setattr(harvesting, "GIVE_UP", 1.0)
    folder = folder_of(tmp_path)
    job = over(text(SOURCES, frame(end(SOURCES))))
    closes = [Close(len(job.log) * part // 16, None) for part in range(1, 16)]

    async def life() -> None:
        refused = [("GET .*/logs", (500, "UnicodeDecodeError"))] * 15
        async with Dashboard(jobs={NAME: job}, closes=closes, answers=refused) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            await harvest.fetch(api, NAME, {})
            assert harvest.all_here(NAME)
            assert dashboard.closes == []

    asyncio.run(life())
    assert brought(folder) == SOURCES


def test_a_heartbeat_that_says_the_same_as_the_last_one_is_a_heartbeat(tmp_path):
    """A job that prints nothing lives too. What is read once more, after a break, is no news."""
    folder_of(tmp_path)
    job = Job(entrypoint=ENTRYPOINT, log=f"{RAY_SAYS}{frame(BEAT)}\n")

    async def life() -> None:
        async with Dashboard(jobs={NAME: job}) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            heard = [await harvest.fetch(api, NAME, {}) for _ in range(3)]
            assert heard.count(BEAT) == 1
            job.log += f"{frame(BEAT)}\n"
            heard = [await harvest.fetch(api, NAME, {}) for _ in range(3)]
            assert heard.count(BEAT) == 1
            job.log = f"Ray moved it.\n{job.log}"
            job.end(0)
            assert [await harvest.fetch(api, NAME, {}) for _ in range(3)] == [None] * 3
            await harvest.forget(NAME)

    asyncio.run(life())
