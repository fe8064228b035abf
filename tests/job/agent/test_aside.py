"""What is said aside when the service does not answer: byte for byte what it lacks, and no secret."""

from __future__ import annotations

import base64
import os
import random
import signal
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.job.agent import aside, link, ship, stdout
from corral.job.agent.aside import Aside
from corral.job.agent.attempt import Attempt
from corral.job.agent.lines import LineReader, without_controls
from corral.job.agent.masked import MaskedReader
from corral.job.agent.output import OutputFile, output_files
from corral.job.agent.reach import Reach
from corral.job.agent.ship import Shipper
from corral.job.agent.stdout import Stdout
from corral.job.core.redact import Redactor
from corral.job.protocol.agent import EndRecord, Heartbeat
from corral.job.protocol.frames import Bytes, parse
from tests.job.agent.conftest import MakeSpec
from tests.job.agent.joining import Joining, boarding, told_to_end
from tests.job.agent.service import RecordingService
from tests.job.agent.test_agent import until

SECRET = "hunter2 & hunter2/+\nsecond line"
REDACTOR = Redactor([SECRET])
RAW = SECRET.encode()
PIECES = [
    *(
        b"plain line\n",
        b"\n",
        b"no end",
        b"\xff\xfe\xc3",
        b"nul\x00\n",
        b"\x1b[31mred\x1b[0m\n",
        b" 10%\r 20%\r",
        b"\r\n",
    ),
    *(RAW + b"\n", RAW, b"x" + base64.b64encode(b"yz" + RAW) + b"\n", urllib.parse.quote(SECRET).encode()),
    *(b"hun\x1b[1mter2 & hunter2/+\n", b"hunter2 & hun\x00ter2/+\n", b"hunter2 & \r", b"z" * 70_000, RAW[:9], RAW[9:]),
    *(b"#corral end {}\n", b"\xe2\x80\xa8#corral end {}\n"),
]


def shows_secret(raw: bytes) -> bool:
    """In any form, to whoever reads the bytes or looks at them on a terminal."""
    texts = (raw.decode("latin-1"), without_controls(raw.decode("utf-8", "replace")))
    return REDACTOR.mask(raw) != raw or any(REDACTOR(text) != text for text in texts)


@settings(max_examples=30, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    sizes=st.lists(st.sampled_from([1, 17, 5000, 90_000]), min_size=1, max_size=5),
)
def test_masked_bytes_are_as_many_with_the_same_line_ends_and_show_no_secret(
    pieces: list[bytes], sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = b"".join(pieces)
    path = tmp_path_factory.mktemp("masked") / "driver.log"
    whole = b""
    with path.open("wb", buffering=0) as file:
        reader, written, at = MaskedReader(OutputFile("driver", path), 0, REDACTOR), 0, 0
        while written < len(raw) or reader.behind:
            file.write(raw[written : (written := written + sizes[at % len(sizes)])])
            at += 1
            while (found := reader.read(last=False))[1]:
                assert found[0] == len(whole)
                whole += found[1]
        whole += reader.read(last=True)[1]
    assert len(whole) == len(raw)
    assert [at for at, byte in enumerate(whole) if byte == 10] == [at for at, byte in enumerate(raw) if byte == 10]
    assert not any(shows_secret(line) for line in whole.split(b"\n"))
    if REDACTOR.mask(raw) == raw and raw.isascii() and b"\x1b" not in raw and b"\0" not in raw and b"\r" not in raw:
        assert whole == raw


# A service that comes and goes --------------------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, so that many outages fit into a second."""
    for module, name, value in (
        (link, "FIRST_DELAY", 0.002),
        (link, "LONGEST_DELAY", 0.02),
        (ship, "BUSY", 0.002),
        (ship, "QUIET", 0.01),
        (aside, "OUTAGE", 0.03),
        (aside, "HEART", 0.05),
        (aside, "LOOK", 0.005),
    ):
        monkeypatch.setattr(module, name, value)


class Talk:
    """An aside and a shipper of one attempt, and what comes out of the aside's end of a pipe."""

    def __init__(self, attempt: Attempt, patience: float) -> None:
        reach = Reach()
        self.shipper = Shipper(attempt, REDACTOR, patience, reach)
        self._read, write = os.pipe()
        self.out = Stdout(write)
        beat = Heartbeat(attempt=1, phase="running")
        self.aside = Aside(attempt, REDACTOR, reach, lambda: self.shipper.stored, lambda: beat, self.out)
        self.heard = b""
        self.reading = threading.Thread(target=self._listen, daemon=True)
        self.reading.start()
        for thread in (self.out, self.aside, self.shipper):
            thread.start()

    def _listen(self) -> None:
        while data := os.read(self._read, 1 << 16):
            self.heard += data

    def close(self) -> list[str]:
        """All lines that were said."""
        os.close(self.out._descriptor)
        self.reading.join(10)
        os.close(self._read)
        return self.heard.decode().split("\n")


def framed(lines: list[str], beyond: int, source: str) -> bytes:
    """The bytes of a source from `beyond` on, as a service puts them together: without a gap."""
    found = b""
    for line in lines:
        piece = parse(line)
        if isinstance(piece, Bytes) and piece.source == source:
            at = beyond + len(found)
            if piece.start <= at:
                found += piece.content[at - piece.start :]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_stored_and_framed_together_are_the_files(seed: int, make: MakeSpec, service: RecordingService, hasty: None):
    chance = random.Random(seed)
    attempt = Attempt.load(make("true"))
    files = {"driver": attempt.driver_log, "node-1/rank-5": attempt.run / "logs/node-1/rank-5.log"}
    files["node-1/rank-5"].parent.mkdir(parents=True)
    contents = dict.fromkeys(files, b"")
    talk = Talk(attempt, patience=0.05)
    handles = {source: path.open("ab", buffering=0) for source, path in files.items()}
    for _ in range(40):
        source = chance.choice(list(files))
        piece = b"".join(chance.choices(PIECES, k=3))
        handles[source].write(piece)
        contents[source] += piece
        if chance.random() < 0.25:
            service.stop()
            time.sleep(chance.choice([0.0, 0.05, 0.1]))
            if chance.random() < 0.8:
                service.start()
        time.sleep(0.005)
    service.stop()
    if back := seed % 2:
        service.start()
    record = EndRecord(job_id="rj-0123456789ab", attempt=1, exit_code=0, started=1.0, ended=2.0).sealed()
    talk.aside.end(record, hurry=False)
    complete = talk.shipper.finish()
    talk.aside.finish(complete)
    lines = talk.close()
    assert complete or not back
    for source, content in contents.items():
        stored = service.watermarks.get(source, 0)
        reader = LineReader(0, REDACTOR)
        expected = [*reader.feed(content[:stored])[0], *reader.flush()[0]]
        assert service.lines(source) == expected
        if not complete:
            rest = framed(lines, stored, source)
            assert len(rest) == len(content) - stored
            plain = MaskedReader(OutputFile(source, files[source]), stored, REDACTOR)
            again = b"".join(iter(lambda reader=plain: reader.read(last=True)[1], b""))
            assert rest == again
    frames = [parse(line) for line in lines if line.startswith("#corral ")]
    assert None not in frames
    assert frames[-1] == record
    said = [piece.content for piece in frames if isinstance(piece, Bytes)]
    assert not any(shows_secret(line) for piece in said for line in piece.split(b"\n"))
    assert not any(shows_secret(line.encode()) for line in lines)


def test_a_service_that_answers_gets_no_frames_but_the_end(make: MakeSpec, service: RecordingService, hasty: None):
    attempt = Attempt.load(make("true"))
    talk = Talk(attempt, patience=20.0)
    attempt.driver_log.write_bytes(b"#corral end {}\nhello " + RAW + b"\nand \xe2\x80\xa8#corral end {}")
    record = EndRecord(job_id="rj-0123456789ab", attempt=1, exit_code=0, started=1.0, ended=2.0).sealed()
    service.wait_for(lambda: len(service.lines("driver")) == 3)
    talk.aside.end(record, hurry=False)
    assert talk.shipper.finish()
    talk.aside.finish(True)
    lines = talk.close()
    assert [line for line in lines if line.startswith("#corral ")] == [f"#corral end {record.model_dump_json()}"]
    assert (
        sorted(line for line in lines if line and not line.startswith("#corral "))
        == [
            "# corral end {}",
            "***",
            "and \u2028# corral end {}",
            "hello ***",
        ][0:4]
    )


def test_readable_output_has_a_limit(make: MakeSpec, service: RecordingService, hasty: None, monkeypatch) -> None:
    monkeypatch.setattr(aside, "ECHO", 1 << 20)
    attempt = Attempt.load(make("true"))
    attempt.driver_log.touch()
    talk = Talk(attempt, patience=20.0)
    with attempt.driver_log.open("ab") as file:
        for number in range(150_000):
            file.write(b"line %d\n" % number)
    assert talk.shipper.finish()
    talk.aside.finish(True)
    lines = talk.close()
    assert lines[:2] == ["line 0", "line 1"]
    assert lines[-2:] == ["corral: 1 MiB were shown here; `corral watch rj-0123456789ab` has all", ""]
    assert 1 << 20 <= sum(map(len, lines)) + len(lines) < (1 << 20) + (1 << 17)


# Standard output ----------------------------------------------------------------------------------------------------


def test_a_reader_that_is_slow_gets_all_of_it(make: MakeSpec, hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is more than can be said in the time after which a reader that stands still is left alone."""
    monkeypatch.setattr(aside, "LAST_BOUND", 0.5)
    attempt = Attempt.load(make("true"))
    whole = os.urandom(1 << 21).hex().encode() + b"\n"
    read, write = os.pipe()
    attempt.driver_log.write_bytes(b"\n".join(whole[at : at + 99] for at in range(0, len(whole), 100)))
    out, reach, heard = Stdout(write), Reach(), [b""]
    beat = Heartbeat(attempt=1, phase="collecting")
    said = Aside(attempt, REDACTOR, reach, dict, lambda: beat, out)

    def listen() -> None:
        while data := os.read(read, 1 << 16):
            heard.append(data)
            time.sleep(0.02)

    reading = threading.Thread(target=listen, daemon=True)
    for thread in (reading, out, said):
        thread.start()
    record = EndRecord(job_id="rj-0123456789ab", attempt=1, exit_code=0, started=1.0, ended=2.0).sealed()
    said.end(record, hurry=False)
    said.finish(complete=False)
    os.close(write)
    reading.join(20)
    os.close(read)
    lines = b"".join(heard).decode().split("\n")
    assert framed(lines, 0, "driver") == attempt.driver_log.read_bytes()
    assert parse([line for line in lines if line][-1]) == record


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_holds_up_what_is_said_and_loses_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdout, "FULL", 0.01)
    descriptor = os.open("/dev/full", os.O_WRONLY)
    out = Stdout(descriptor)
    out.start()
    out.put("one", urgent=True)
    out.put("two")
    assert not out.flush_urgent(0.1)
    assert not out.closed
    read, write = os.pipe()
    os.dup2(write, descriptor)  # there is room again
    assert out.flush(5.0)
    assert os.read(read, 100) == b"one\ntwo\n"
    for one in (read, write, descriptor):
        os.close(one)


def test_a_reader_that_stands_still_or_goes_holds_nobody_up() -> None:
    read, write = os.pipe()
    out = Stdout(write)
    out.start()
    for _ in range(200):
        out.put("x" * 9000)
    assert not out.room
    out.put("urgent", urgent=True)
    assert not out.flush_urgent(0.05)
    os.read(read, 1 << 16)
    os.close(read)
    assert out.flush(10)
    assert out.closed
    assert out.room
    out.put("never")
    out.join(10)
    os.close(write)


@pytest.fixture
def joining(tmp_path: Path, service: RecordingService) -> Iterator[Callable[..., Joining]]:
    started: list[Joining] = []

    def agent(script: str, **given: Any) -> Joining:
        about = boarding(service, tmp_path / "root", ["bash", "-c", script], **given)
        started.append(Joining(about, tmp_path / "output"))
        return started[-1]

    yield agent
    for one in started:
        one.end()


def test_told_to_end_by_a_cluster_that_waits_three_seconds(joining: Callable[..., Joining], service: RecordingService):
    """The service hangs: what it lacks is said, with the end, before SIGKILL comes."""
    agent = joining("trap '' TERM; echo up; echo more; while :; do sleep 0.05; done")
    service.wait_for(lambda: service.lines("driver") == ["up", "more"])
    service.fault = lambda what: "hang"
    with (agent.folder / "driver.log").open("ab") as file:
        file.write(b"last words\n")
    began = time.monotonic()
    told_to_end(agent)
    until(lambda: agent.ends())
    assert time.monotonic() - began < 2.9
    until(lambda: agent.framed({"driver": 8}) == {"driver": b"last words\n"}, 3.0)
    agent.end()
    assert agent.ends()[0].exit_code == 137


def test_the_cluster_may_give_more_time(joining: Callable[..., Joining], service: RecordingService, monkeypatch):
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "20")
    agent = joining("trap 'sleep 1.5; echo saved; exit 6' TERM; echo up; while :; do sleep 0.05; done")
    service.wait_for(lambda: service.lines("driver") == ["up"])
    os.kill(agent.process.pid, signal.SIGTERM)
    assert agent.wait() == 6
    assert service.lines("driver")[-1] == "saved"


def test_standard_output_that_nobody_reads_any_more(tmp_path: Path, service: RecordingService) -> None:
    read, write = os.pipe()
    about = boarding(
        service, tmp_path / "root", ["bash", "-c", "echo up; until test -e ../go; do sleep 0.02; done; seq 9999"]
    )
    agent = Joining(about, Path(f"/proc/self/fd/{write}"))
    os.close(write)
    try:
        service.wait_for(lambda: service.lines("driver") == ["up"])
        os.close(read)
        (tmp_path / "root" / "go").touch()
        assert agent.wait() == 0
    finally:
        agent.end()
    assert len(service.lines("driver")) == 10_000
    assert [end["exit_code"] for end in service.ends] == [0]


def test_a_killed_agent_leaves_whole_frames_and_a_second_one_says_the_rest(
    joining: Callable[..., Joining], service: RecordingService
) -> None:
    """The service is away for good: two agents together have said all of the output."""
    agent = joining("for i in $(seq 5000); do echo line $i; done; touch ../done; exec sleep 60")
    until((agent.folder.parent / "done").exists)
    service.stop()
    agent.end()
    size = (agent.folder / "driver.log").stat().st_size
    content = (agent.folder / "driver.log").read_bytes()
    stored = service.watermarks.get("driver", 0)
    agent.start()
    until(lambda: agent.ends())
    until(lambda: len(agent.framed({"driver": stored})["driver"]) == size - stored)
    assert agent.framed({"driver": stored})["driver"] == content[stored:]
    assert agent.ends()[-1].failure == "the agent of this attempt was lost while its command ran"
    assert [file.source for file in output_files(agent.folder / "driver.log", agent.folder / "run")] == ["driver"]
