"""What agents say in the logs of their Ray jobs: nothing of it is lost or taken twice, however the log gets here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.errors import InfraError
from corral.job.backends.folder import attempt_folder
from corral.job.backends.ray_jobs import harvest as harvesting
from corral.job.backends.ray_jobs import raw as raw_files
from corral.job.backends.ray_jobs.api import JobsApi
from corral.job.backends.ray_jobs.harvest import Harvest
from corral.job.backends.ray_jobs.raw import RawFiles
from corral.job.backends.ray_jobs.tail import LONGEST_LINE, Tail
from corral.job.protocol.agent import EndRecord, Heartbeat
from corral.job.protocol.frames import MARK, Bytes, data_frames, frame
from tests.job.backends.contract import until
from tests.job.backends.ray_jobs.dashboard import Close, Dashboard, Job

JOB = "rj-0123456789ab"
NAME = f"{JOB}-a1"
ENTRYPOINT = "python3 -m corral.job.agent.join # 0011223344556677"
RAY_SAYS = f"Runtime env is setting up.\nRunning entrypoint for job {NAME}: {ENTRYPOINT}\n"
GROWING = "".join(f"line {number} äöü\n" for number in range(4000)).encode()
SOURCES = {"driver": GROWING, "node-0/rank-0": GROWING[:50_000], "node-1/rank-3": b"x" * 20_000 + b"\n"}


def end(sources: dict[str, bytes], exit_code: int = 7, attempt: int = 1) -> EndRecord:
    sizes = {source: len(content) for source, content in sources.items()}
    return EndRecord(
        job_id=JOB, attempt=attempt, exit_code=exit_code, started=1.0, ended=2.0, sources=sizes
    ).sealed()  # fmt: skip


def text(sources: dict[str, bytes], *more: str) -> str:
    """As an agent prints it that no service answers, with some of what people are to read."""
    lines = []
    for source, content in sources.items():
        lines += [line for piece in data_frames(source, 0, content) for line in (f"read me: {source}", piece)]
    return "".join(f"{line}\n" for line in [*lines, frame(Heartbeat(attempt=1, phase="running")), *more])


def folder_of(data_dir: Path) -> Path:
    folder = attempt_folder(data_dir, JOB, 1)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def brought(folder: Path) -> dict[str, bytes]:
    found = {"driver": (folder / "driver.log").read_bytes()}
    for path in (folder / "run/logs").glob("*/*.log"):
        found[f"{path.parent.name}/{path.stem}"] = path.read_bytes()
    return found


async def fetched(harvest: Harvest, api: JobsApi, folder: Path, sources: dict[str, bytes] | None) -> list[object]:
    """Fetch until these are here, or anything at all; what was heard on the way. Each fetch may be cut short by a busy
    machine."""
    heard: list[object] = []

    async def here() -> bool:
        heard.append(await harvest.fetch(api, NAME, {}))
        return (folder / "driver.log").exists() and sources in (None, brought(folder))

    await until(here)
    return heard


CLOSES = {
    "ray's own": [],
    "1000 in the middle": [Close(30_000, 1000)],
    "1006 in the middle": [Close(30_000, None)],
    "1009 in the middle": [Close(30_000, 1009)],
    "again and again": [Close(5_000), Close(9_000, None), Close(9_000, 1009), Close(70_000), Close(10)],
    "nothing at all": [Close(0, 1000)] * 50,
    "nothing, and cut": [Close(0, None)] * 50,
}


@pytest.mark.parametrize("over", [True, False], ids=["over", "running"])
@pytest.mark.parametrize("closes", CLOSES.values(), ids=CLOSES)
def test_all_of_it_comes_once_however_the_socket_ends(closes, over, tmp_path, monkeypatch):
    monkeypatch.setattr(harvesting, "PAUSE", 0.01)
    monkeypatch.setattr(harvesting, "IDLE", 0.1)
    folder = folder_of(tmp_path)
    job = Job(entrypoint=ENTRYPOINT, log=RAY_SAYS + text(SOURCES, frame(end(SOURCES)) if over else "still going"))

    async def life() -> None:
        async with Dashboard(jobs={NAME: job}, closes=list(closes), piece=777) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            if over:
                job.end(7)
                await until(lambda: harvest.settled(api, NAME))
                assert harvest.end_record(NAME) == end(SOURCES)
            heard = await fetched(harvest, api, folder, SOURCES)
            assert [one for one in heard if one] == [Heartbeat(attempt=1, phase="running")]
            assert await harvest.fetch(api, NAME, {}) is None  # no news
            assert brought(folder) == SOURCES
            assert harvest.end_record(NAME) == (end(SOURCES) if over else None)
            await harvest.forget(NAME)

    asyncio.run(life())


def test_a_log_that_grows_is_followed_and_read_on_behind_what_is_known(tmp_path, monkeypatch):
    """The dashboard dies and comes back in the middle; afterwards the job ends."""
    monkeypatch.setattr(harvesting, "PAUSE", 0.01)
    monkeypatch.setattr(harvesting, "IDLE", 0.1)
    folder = folder_of(tmp_path)
    whole = RAY_SAYS + text(SOURCES)
    job = Job(entrypoint=ENTRYPOINT, log=whole[: len(whole) // 3])

    async def life() -> None:
        dashboard = Dashboard(jobs={NAME: job})
        harvest = Harvest(tmp_path)
        async with dashboard:
            api = JobsApi(dashboard.address)
            await fetched(harvest, api, folder, None)
            job.log = whole[: len(whole) // 2]
            await harvest.fetch(api, NAME, {})
            assert dashboard.count(f"GET /api/jobs/{NAME}/logs/tail") == 1
        with pytest.raises(InfraError, match="does not answer"):
            await harvest.fetch(api, NAME, {})
        async with dashboard:
            job.log = whole + frame(end(SOURCES)) + "\n"
            job.end(7)
            await until(lambda: harvest.settled(api, NAME))
            await harvest.fetch(api, NAME, {})
        assert brought(folder) == SOURCES
        assert harvest.end_record(NAME) == end(SOURCES)

    asyncio.run(life())


def test_a_giant_line_holds_up_the_socket_but_not_us(tmp_path, monkeypatch):
    """Ray's inner socket dies of a line of more than 4 MiB, and the outer one ends with 1000 and without a word."""
    monkeypatch.setattr(harvesting, "PAUSE", 0.01)
    monkeypatch.setattr(harvesting, "IDLE", 0.1)
    folder = folder_of(tmp_path)
    giant = "y" * (5 << 20)
    job = Job(entrypoint=ENTRYPOINT, log=f"{RAY_SAYS}{giant}\n{text(SOURCES)}")

    async def life() -> None:
        async with Dashboard(jobs={NAME: job}, closes=[Close(0)] * 1000) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            assert any(await fetched(harvest, api, folder, SOURCES))
            await harvest.forget(NAME)

    asyncio.run(life())


def test_a_log_that_ray_cannot_read_any_more_is_given_up_in_the_end(tmp_path, monkeypatch):
    """One invalid byte: the socket ends with 1000 at once, and GET answers 500 from then on."""
    monkeypatch.setattr(harvesting, "PAUSE", 0.01)
    monkeypatch.setattr(harvesting, "GIVE_UP", 0.5)
    monkeypatch.setattr(harvesting, "SETTLE_BOUND", 0.1)
    folder_of(tmp_path)
    job = Job(entrypoint=ENTRYPOINT)
    job.end(7)
    codec = (500, "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff")

    async def life() -> None:
        answers = [("GET .*/logs", codec)] * 1000
        async with Dashboard(jobs={NAME: job}, closes=[Close(0)] * 1000, answers=answers) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            assert not await harvest.settled(api, NAME)
            await until(lambda: harvest.settled(api, NAME))
            assert harvest.end_record(NAME) is None
            assert harvest.output(NAME) is None

    asyncio.run(life())


def test_another_log_is_taken_from_its_start(tmp_path, monkeypatch):
    """The prefix differs, so nothing of it is skipped; frames may come twice without harm."""
    monkeypatch.setattr(harvesting, "PAUSE", 0.01)
    monkeypatch.setattr(harvesting, "IDLE", 0.1)
    folder = folder_of(tmp_path)
    job = Job(entrypoint=ENTRYPOINT, log=RAY_SAYS + text({"driver": GROWING[:9000]}))

    async def life() -> None:
        async with Dashboard(jobs={NAME: job}) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            await fetched(harvest, api, folder, {"driver": GROWING[:9000]})
            job.log = "Ray moved it.\n" + RAY_SAYS + text(SOURCES, frame(end(SOURCES)))
            job.end(7)
            await until(lambda: harvest.settled(api, NAME))
            await harvest.fetch(api, NAME, {})

    asyncio.run(life())
    assert brought(folder) == SOURCES


def test_what_an_earlier_job_of_this_id_left_is_not_read(tmp_path):
    """Ray deletes a job, but not its log, and the next one of that id goes on in the same file."""
    folder = folder_of(tmp_path)
    old = RAY_SAYS.replace("7766", "0000").replace("# 00", "# 99") + text({"driver": b"old\n" * 10}, frame(end({}, 0)))
    job = Job(entrypoint=ENTRYPOINT, log=old + RAY_SAYS + text({"driver": b"new\n"}, frame(end({"driver": b"new\n"}))))
    job.end(7)

    async def life() -> None:
        async with Dashboard(jobs={NAME: job}) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            await until(lambda: harvest.settled(api, NAME))
            await harvest.fetch(api, NAME, {})
            assert harvest.end_record(NAME) == end({"driver": b"new\n"})

    asyncio.run(life())
    assert brought(folder) == {"driver": b"new\n"}


def test_an_end_record_that_comes_first_is_not_the_end_of_the_output(tmp_path):
    """An agent that is told to end says that at once, and then what else it has."""
    folder = folder_of(tmp_path)
    job = Job(entrypoint=ENTRYPOINT, log=f"{RAY_SAYS}{frame(end(SOURCES))}\n{text(SOURCES)}")
    job.end(7)

    async def life() -> None:
        async with Dashboard(jobs={NAME: job}, piece=500) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            await until(lambda: harvest.settled(api, NAME))
            await harvest.fetch(api, NAME, {})
            assert harvest.all_here(NAME)

    asyncio.run(life())
    assert brought(folder) == SOURCES


def test_what_is_not_for_this_attempt_or_not_whole_is_not_believed(tmp_path):
    folder_of(tmp_path)
    half = frame(end({}))
    said = [
        frame(Heartbeat(attempt=2, phase="running")),
        half[:-9],
        half.replace('"exit_code":7', '"exit_code":0'),
        frame(end({}, attempt=2)),
        f"{MARK}end {{}}",
    ]
    job = Job(entrypoint=ENTRYPOINT, log=RAY_SAYS + "".join(f"{line}\n" for line in [*said, "Traceback", "Error: so"]))
    job.end(1)

    async def life() -> None:
        async with Dashboard(jobs={NAME: job}) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            await until(lambda: harvest.settled(api, NAME))
            assert harvest.end_record(NAME) is None
            assert harvest.output(NAME) == ["Traceback", "Error: so"]
            assert await harvest.fetch(api, NAME, {}) is None

    asyncio.run(life())


def test_what_is_stored_already_leaves_a_hole_and_what_is_missing_none(tmp_path, monkeypatch):
    monkeypatch.setattr(harvesting, "IDLE", 0.1)
    folder = folder_of(tmp_path)
    late = "".join(f"{line}\n" for line in data_frames("driver", 30_000, GROWING[30_000:40_000]))
    job = Job(entrypoint=ENTRYPOINT, log=RAY_SAYS + late)

    async def life() -> None:
        async with Dashboard(jobs={NAME: job}) as dashboard:
            harvest, api = Harvest(tmp_path), JobsApi(dashboard.address)
            await harvest.fetch(api, NAME, {"driver": 29_000})
            assert not (folder / "driver.log").exists()  # what lies between may come over HTTP

            async def here() -> bool:
                await harvest.fetch(api, NAME, {"driver": 31_000})
                return (folder / "driver.log").exists() and (folder / "driver.log").stat().st_size == 40_000

            await until(here)
            await harvest.forget(NAME)

    asyncio.run(life())
    content = (folder / "driver.log").read_bytes()
    assert content[31_000:] == GROWING[31_000:40_000]
    assert len(content) == 40_000


@given(st.data())
def test_raw_files_never_hold_anything_but_the_output(tmp_path_factory, data):
    """Pieces in any order, twice, overlapping, with a watermark that grows: no gap beyond it, and in the end all."""
    folder = tmp_path_factory.mktemp("raw")
    truth = bytes(data.draw(st.lists(st.integers(1, 255), min_size=1, max_size=60), label="truth"))
    size = st.integers(0, len(truth))
    raw, mark = RawFiles(folder), 0
    steps = data.draw(st.lists(st.tuples(size, size, size), max_size=20), label="steps")
    for one, other, grown in [*steps, (0, len(truth), 0)]:
        first, last = sorted((one, other))
        if grown > mark and data.draw(st.booleans()):
            mark = grown
            raw.stored({"driver": mark})
        raw.put(Bytes("driver", first, truth[first:last]))
        path = folder / "driver.log"
        content = path.read_bytes() if path.exists() else b""
        assert content[mark:] == truth[mark : len(content)]
    assert raw.covers({"driver": len(truth)})


def test_a_piece_waits_for_the_one_before_it(tmp_path):
    raw = RawFiles(tmp_path)
    for start in (20, 10, 30):
        raw.put(Bytes("driver", start, b"%010d" % start))
    assert not (tmp_path / "driver.log").exists()
    raw.put(Bytes("driver", 0, b"%010d" % 0))
    assert (tmp_path / "driver.log").read_bytes() == b"".join(b"%010d" % start for start in (0, 10, 20, 30))


def test_pieces_that_wait_for_ever_do_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_files, "MOST_WAITING", 100)
    raw = RawFiles(tmp_path)
    for start in range(10, 400, 10):
        raw.put(Bytes("driver", start, b"0123456789"))
    assert raw.dropped
    raw.put(Bytes("driver", 0, b"0123456789"))
    assert (tmp_path / "driver.log").stat().st_size < 400


class Pieces:
    """A log in memory that is sent in pieces, and breaks off."""

    def __init__(self, seed: int) -> None:
        self.log, self._random = "", random.Random(seed)

    async def tail(self, submission_id: str) -> AsyncIterator[str]:
        at, stop = 0, self._random.choice([self._random.randint(0, len(self.log)), len(self.log)])
        while at < stop:
            size = self._random.randint(1, 40)
            yield self.log[at : min(stop, at + size)]
            at += size

    async def logs(self, submission_id: str) -> str:
        return self.log


LINES = st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=60), max_size=20)


@given(st.integers(0, 1 << 30), LINES, LINES)
def test_a_tail_takes_every_line_once_in_order(seed, first, more):
    """And again from the start when the log is another one."""
    pieces, taken, restarts = Pieces(seed), [], []
    tail = Tail(pieces, NAME, taken.append, lambda: (restarts.append(1), taken.clear()))

    async def read(lines: list[str]) -> None:
        pieces.log = "".join(f"{line}\n" for line in lines)
        for _ in range(3):
            await tail.once()
        await tail.whole()
        assert taken == lines
        assert await tail.whole() == len(pieces.log)

    asyncio.run(read(first))
    asyncio.run(read(first + more))
    assert restarts == []
    asyncio.run(read(["another", *more]))


def test_lines_that_are_no_frames_may_be_as_long_as_they_like():
    pieces, taken = Pieces(1), []
    pieces.log = "z" * (2 * LONGEST_LINE) + "\nshort\n" + "z" * (2 * LONGEST_LINE)
    tail = Tail(pieces, NAME, taken.append, taken.clear)
    asyncio.run(tail.whole())
    assert (taken, tail.last_line()) == (["", "short"], "")
