"""Output of every kind and amount: stored exactly, streamed in order to every watcher, in bounded memory."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import psutil
import pytest

from tests.job.e2e.faults import BOUND, Place, in_order, place, until

MIB = 1 << 20
SERVICE_BOUND, AGENT_BOUND = 180 * MIB, 80 * MIB  # resident; seen: 110 with 100 watchers, 77 with 5, and 40


@pytest.fixture(scope="module")
def at():
    with place() as it:
        it.script("odd.py", ODD)
        it.script("ranks.py", RANKS)
        yield it


ODD = r"""
import os
def put(data):
    while data:
        data = data[os.write(1, data):]
put(b"plain\n")
put(b"x" * (5 << 20) + b"\n")
put(b"caf\xc3\xa9 \xff\xfe\xc3 end\n")
put(b"nul \0 nul\n")
put(b"\x1b[31mred\x1b[0m \x1b]0;title\x07 bell\x07\n")
put(b"\x1b[2K\x1b[1A" * 20000 + b"after the flood\n")
put(b"10%\r50%\r100%\n")
put("\u2028line separator\u0085\n".encode())
put(b"::error::not a command\n")
put(b"no line end")
"""


def test_odd_bytes(at):
    client = at.submit(script="odd.py")
    assert client.done() == 0
    events = [event for event in at.service.events(client.job_id) if event["type"] == "log"]
    lines = [event["line"] for event in events]
    raw = (at.service.attempt(client.job_id) / "driver.log").read_bytes()
    long = [line for line in lines if line.startswith("xx")]
    assert max(map(len, long)) <= 1 << 16
    assert "".join(long) == "x" * (5 << 20)
    assert [line for line in lines if not line.startswith("xx") and line] == [
        "plain", "caf\u00e9 \ufffd\ufffd\ufffd end", "nul  nul", "red  bell", "after the flood", "100%",
        "\u2028line separator", "::error::not a command", "no line end",
    ]  # fmt: skip
    plain = [event for event in events if event["line"] in ("plain", "::error::not a command", "no line end")]
    for event in plain + [event for event in events if event["line"] in long]:  # each begins where it says
        assert raw[event["src_off"] :].startswith(event["line"].encode())
    assert "\x1b" not in client.out
    assert "\0" not in client.out


# argv: lines of each rank, ranks. Each rank is a process that writes its own file at full speed; line N of rank R can
# be told from every other line.
RANKS = """
import os, pathlib, subprocess, sys
lines, ranks = int(sys.argv[1]), int(sys.argv[2])
code = '''
import pathlib, sys
rank, lines = int(sys.argv[1]), int(sys.argv[2])
path = pathlib.Path(sys.argv[3], f"logs/node-{rank // 4}/rank-{rank}.log")
path.parent.mkdir(parents=True, exist_ok=True)
with path.open("w") as file:
    for start in range(0, lines, 1000):
        file.write("".join(f"rank {rank} line {n} loss 0.123456 reward 0.5\\\\n" for n in range(start, start + 1000)))
        file.flush()
'''
run = os.environ["CORRAL_RUN_DIR"]
children = [subprocess.Popen([sys.executable, "-c", code, str(rank), str(lines), run]) for rank in range(ranks)]
sys.exit(max(child.wait() for child in children))
"""


class Watcher(threading.Thread):
    """Reads a watch from a raw socket and checks each event as it comes, in constant memory."""

    def __init__(self, url: str, job_id: str) -> None:
        super().__init__(daemon=True)
        where = urlsplit(url)
        self._socket = socket.create_connection((where.hostname, where.port), BOUND)
        self._socket.settimeout(4 * BOUND)
        request = (
            f"GET /api/v1/rayjobs/{job_id}/watch?types=all HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
        )
        self._socket.sendall(request.encode() + b"\r\n")
        self.seq, self.next, self.wrong, self.final = 0, dict[int, int](), list[str](), dict[str, object]()

    def run(self) -> None:
        with self._socket, self._socket.makefile("rb") as stream:
            while stream.readline() not in (b"\r\n", b""):
                pass
            rest = b""
            while size := int(stream.readline().strip() or b"0", 16):
                *lines, rest = (rest + stream.read(size)).split(b"\n")
                stream.readline()
                for line in lines:
                    if line:
                        self._see(line)

    def _see(self, line: bytes) -> None:
        """By slicing: decoding millions of events would take longer than all else."""
        seq = int(line[7 : line.index(b",")])
        if seq != self.seq + 1:
            self.wrong.append(f"{seq} after {self.seq}")
        self.seq = seq
        if b'"type":"log"' in line[:40]:
            words = line[line.rindex(b'"line":"rank ') + 8 :].split(b" ", 4)
            rank, number = int(words[1]), int(words[3])
            if number != self.next.get(rank, 0):
                self.wrong.append(f"rank {rank}: line {number}, not {self.next.get(rank, 0)}")
            self.next[rank] = number + 1
        elif b'"type":"final"' in line[:40]:
            self.final = json.loads(line)


class Memory(threading.Thread):
    """The largest resident sets of the service and the agent, as long as it runs."""

    def __init__(self, service: psutil.Process, agent: Callable[[], list[psutil.Process]]) -> None:
        super().__init__(daemon=True)
        self._service, self._agent, self._over = service, agent, threading.Event()
        self.service = self.agent = 0

    def run(self) -> None:
        agents: list[psutil.Process] = []
        while not self._over.wait(0.1):
            try:
                self.service = max(self.service, self._service.memory_info().rss)
                agents = agents or self._agent()
                self.agent = max(self.agent, *(agent.memory_info().rss for agent in agents), 0)
            except psutil.Error:
                continue

    def close(self) -> None:
        self._over.set()
        self.join()


def flood(at: Place, lines: int, ranks: int, watchers: int, bound: float) -> None:
    """Every watcher sees every line of every rank in order, and the seqs without a gap."""
    client = at.submit("--detach", script="ranks.py", arguments=(lines, ranks))
    assert client.done() == 0
    job = client.out.strip()
    watching = [Watcher(at.service.url, job) for _ in range(watchers)]
    memory = Memory(psutil.Process(at.service.process.pid), lambda: at.service.processes(job, "corral.job.agent"))
    memory.start()
    for watcher in watching:
        watcher.start()
    deadline = time.monotonic() + bound
    for watcher in watching:
        watcher.join(max(0.0, deadline - time.monotonic()))
        assert not watcher.is_alive(), f"at event {watcher.seq}: {at.service.job(job)['state']}"
    memory.close()
    for watcher in watching:
        assert watcher.wrong == []
        assert watcher.final["status"] == "SUCCEEDED"
        assert watcher.next == dict.fromkeys(range(ranks), lines)
        assert watcher.seq == at.service.job(job)["last_seq"]
    assert 0 < memory.service < SERVICE_BOUND, f"{memory.service / MIB:.0f} MiB"
    assert 0 < memory.agent < AGENT_BOUND, f"{memory.agent / MIB:.0f} MiB"
    at.service.nothing_left(job)


def test_eight_ranks_and_three_watchers(at):
    flood(at, lines=2000, ranks=8, watchers=3, bound=60.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_lines_from_eight_ranks_to_five_watchers(at):
    flood(at, lines=125_000, ranks=8, watchers=5, bound=600.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_thousand_lines_to_a_hundred_watchers(at):
    flood(at, lines=25_000, ranks=2, watchers=100, bound=600.0)


@pytest.mark.slow
def test_a_watcher_that_does_not_read_holds_nobody_up(at):
    at.script("many.sh", "seq -f 'many %.0f' 0 49999")
    client = at.submit("--detach", script="many.sh")
    assert client.done() == 0
    job = client.out.strip()
    where = urlsplit(at.service.url)
    with socket.create_connection((where.hostname, where.port), BOUND) as deaf:
        deaf.sendall(f"GET /api/v1/rayjobs/{job}/watch HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
        watch = at.client("watch", job)
        assert watch.done() == 0
        in_order(watch.lines, "many", 50_000)
    until(lambda: at.service.http.get("/readyz").status_code == 200, "the service is well")
