"""Every byte of the files becomes a stored line once and in order, whatever happens to the service on the way."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time

import psutil
import pytest

from corral.job.agent import link, ship
from corral.job.agent.attempt import Attempt
from corral.job.agent.lines import LineReader
from corral.job.agent.ship import Shipper
from corral.job.core.redact import Redactor
from tests.job.agent.conftest import MakeSpec, Start, end_of
from tests.job.agent.service import FAULTS, RecordingService

SECRET = "hunter2-hunter2"
REDACTOR = Redactor([SECRET])
PIECES = [
    *(b"plain line\n", b"\n", b"no end", b"\xff\xfe\xc3", "é中🙂\n".encode(), b"nul\x00\n", b"\x1b[31mred\x1b[0m\n"),
    *(
        b" 10%\r 20%\r",
        b"\r\n",
        SECRET.encode() + b"\n",
        SECRET.encode(),
        b"z" * 70_000,
        b"\x1b[" * 3000,
        b"a\tb\n" * 300,
    ),
]


def expected(data: bytes) -> list[tuple[int, str]]:
    reader = LineReader(0, REDACTOR)
    lines, offsets = reader.feed(data)
    last = reader.flush()
    return list(zip(offsets + last[1], lines + last[0], strict=True))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, so that many faults fit into a second."""
    monkeypatch.setattr(link, "FIRST_DELAY", 0.002)
    monkeypatch.setattr(link, "LONGEST_DELAY", 0.02)
    monkeypatch.setattr(ship, "BUSY", 0.002)
    monkeypatch.setattr(ship, "QUIET", 0.01)


@pytest.mark.parametrize("seed", range(4))
def test_random_faults(seed: int, make: MakeSpec, service: RecordingService, hasty: None, monkeypatch):
    chance = random.Random(seed)
    monkeypatch.setattr(ship, "BATCH_LINES", chance.choice([1, 7, 2000]))
    monkeypatch.setattr(ship, "BATCH_BYTES", chance.choice([100, 5000, 1 << 20]))
    monkeypatch.setattr(ship, "BATCH_CHUNKS", chance.choice([1, 64]))
    monkeypatch.setattr(ship, "LEAST_READ", chance.choice([13, 1000, 1 << 14]))
    few = 60 if ship.BATCH_LINES < 2000 or ship.BATCH_BYTES < 1 << 20 else 400
    service.fault = lambda what: chance.choice(FAULTS) if chance.random() < 0.3 else None
    folder = make("true")
    attempt = Attempt.load(folder)
    files = {"driver": folder / "driver.log"}
    files |= {f"node-{n}/rank-{2 * n}": folder / "run" / "logs" / f"node-{n}" / f"rank-{2 * n}.log" for n in (0, 1, 11)}
    written = dict.fromkeys(files, b"")
    shipper = Shipper(attempt, REDACTOR, 20.0)
    shipper.start()
    for turn in range(few):
        source = chance.choice(list(files))
        # Repeating pieces are rare where each line is a request.
        piece = chance.choice(PIECES if few == 400 or turn % 10 == 0 else PIECES[:-2])
        for part in (piece[: len(piece) // 2], piece[len(piece) // 2 :]):
            files[source].parent.mkdir(parents=True, exist_ok=True)
            with files[source].open("ab") as file:
                file.write(part)
            written[source] += part
        if turn % (few // 3) == few // 6:
            service.stop()
            service.start()
    assert shipper.finish()
    assert {source: service.stored[source] for source in files} == {s: expected(data) for s, data in written.items()}
    assert service.watermarks == {source: len(data) for source, data in written.items() if data}


def test_a_hanging_service_and_one_that_is_not_there(make: MakeSpec, service: RecordingService, hasty, monkeypatch):
    monkeypatch.setattr(link, "TIMEOUT", 0.2)
    faults = iter(["hang", None, "hang", "lose"])
    service.fault = lambda what: next(faults, None)
    folder = make("true")
    (folder / "driver.log").write_text("".join(f"line {n}\n" for n in range(5000)))
    shipper = Shipper(Attempt.load(folder), REDACTOR, 20.0)
    shipper.start()
    assert shipper.finish()
    assert service.lines("driver") == [f"line {n}" for n in range(5000)]
    service.stop()
    shipper = Shipper(Attempt.load(folder), REDACTOR, 0.3)
    shipper.start()
    assert not shipper.finish()


def test_refused_for_good_ends_the_waiting(make: MakeSpec, service: RecordingService, hasty: None):
    service.token = "another"
    folder = make("true", token="token-of-the-agent")
    (folder / "driver.log").write_text("line\n")
    shipper = Shipper(Attempt.load(folder), REDACTOR, 600.0)
    shipper.start()
    assert not shipper.finish()


def test_what_is_in_the_place_of_a_file_does_no_harm(make: MakeSpec, service: RecordingService, hasty: None):
    import os

    folder = make("true")
    logs = folder / "run" / "logs"
    (logs / "node-0").mkdir(parents=True)
    os.mkfifo(logs / "node-0" / "rank-0.log")
    (logs / "node-0" / "rank-1.log").symlink_to(folder / "spec.json")
    (logs / "node-0" / "rank-2.log").mkdir()
    (logs / "node-1").symlink_to("node-0")
    (logs / "node-01").mkdir()
    (logs / "node-01" / "rank-1.log").write_text("not ours\n")
    (logs / "node-0" / "rank-3.log").write_text("ours\n")
    shipper = Shipper(Attempt.load(folder), REDACTOR, 20.0)
    shipper.start()
    assert shipper.finish()
    assert {source: lines for source in service.stored if (lines := service.lines(source))} == {
        "node-0/rank-3": ["ours"]
    }


WRITER = """
import os, sys
folder, lines = os.environ["CORRAL_RUN_DIR"] + "/logs/", int(sys.argv[1])
files = []
for rank in range(8):
    os.makedirs(folder + f"node-{rank // 4}", exist_ok=True)
    files.append(open(folder + f"node-{rank // 4}/rank-{rank}.log", "a"))
for first in range(0, lines, 500):
    for rank, file in enumerate(files):
        file.write("".join(f"rank {rank} line {n} loss 0.123456\\n" for n in range(first, first + 500)))
        file.flush()
print("x" * (5 << 20))
"""


def test_much_output_in_bounded_memory(make: MakeSpec, start: Start, service: RecordingService):
    lines = 25_000
    folder = make(sys.executable, "-c", WRITER, str(lines))
    agent = start(folder)
    peak = [0]
    threading.Thread(target=_watch, args=(agent, peak), daemon=True).start()
    assert agent.wait(60) == 0
    for rank in range(8):
        stored = service.lines(f"node-{rank // 4}/rank-{rank}")
        assert stored == [f"rank {rank} line {n} loss 0.123456" for n in range(lines)]
    pieces = service.lines("driver")
    assert "".join(pieces) == "x" * (5 << 20)
    assert max(map(len, pieces)) == 1 << 16
    assert service.watermarks == end_of(folder).sources
    assert service.refused == []
    assert 0 < peak[0] < 120 << 20


def _watch(agent: subprocess.Popen[bytes], peak: list[int]) -> None:
    process = psutil.Process(agent.pid)
    while agent.poll() is None:
        try:
            peak[0] = max(peak[0], process.memory_info().rss)
        except psutil.NoSuchProcess:
            return
        time.sleep(0.02)
