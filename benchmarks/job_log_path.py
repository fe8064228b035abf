"""Log lines a second from eight ranks through agent, service and store to ten watchers, and the same under plain Ray.

python benchmarks/job_log_path.py [--lines 400000] [--ranks 8] [--watchers 10]

The job writes `lines` lines in all, as fast as it can. Rate: lines / (time of the last stored line - the first),
as the service stamped them. Every watcher has to receive every line exactly once and in order, else the run is void.
The same script is then run by `ray job submit` on a local Ray head, with its output read by the same command; that part
needs Ray's dashboard (`pip install 'ray[default]'`) and is left out without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

FLOOD = """
import os, sys
lines, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), os.environ.get("CORRAL_RUN_DIR")
children = []
for rank in range(ranks):
    if os.fork() == 0:
        if folder:
            place = os.path.join(folder, "logs", f"node-{rank * 2 // ranks}")
            os.makedirs(place, exist_ok=True)
            out = open(os.path.join(place, f"rank-{rank}.log"), "w")
        else:
            out = sys.stdout
        for i in range(lines // ranks):
            out.write(f"rank {rank} line {i} loss 0.123456 grad_norm 1.234567 tokens 4096 lr 1e-06\\n")
        out.flush()
        os._exit(0)
for _ in range(ranks):
    os.wait()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=400_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--watchers", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        source = Path(folder) / "source"
        source.mkdir()
        (source / "flood.py").write_text(FLOOD)
        print(f"{args.lines} lines from {args.ranks} ranks, {args.watchers} watchers, {os.cpu_count()} cores")
        ours = through_corral(Path(folder), source, args.lines, args.ranks, args.watchers)
        print(f"corral:         {ours:10,.0f} lines/s stored while {args.watchers} watchers read")
        if importlib.util.find_spec("ray") and importlib.util.find_spec("ray.dashboard") and _dashboard_installed():
            theirs = through_ray(Path(folder), source, args.lines, args.ranks)
            print(f"ray job submit: {theirs:10,.0f} lines/s read by its one client")
        else:
            print("ray job submit: not run, Ray's dashboard is not installed")


def _dashboard_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("aiohttp", "opencensus", "aiohttp_cors"))


def through_corral(folder: Path, source: Path, lines: int, ranks: int, watchers: int) -> float:
    """Lines a second, from the stamps of stored events. Asserts that every watcher saw every line once, in order."""
    with service(folder / "service") as url:
        env = os.environ | {"CORRAL_URL": url}
        command = [sys.executable, "-m", "corral", "submit", "--detach", "--source", str(source), "--"]
        command += ["python3", "flood.py", str(lines), str(ranks)]
        job = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()
        outputs = [folder / f"watch-{n}.ndjson" for n in range(watchers)]
        readers = [_curl(f"{url}/api/v1/rayjobs/{job}/watch?types=all", output) for output in outputs]
        for reader in readers:
            assert reader.wait(600) == 0, "a watcher was cut"
        first = outputs[0].read_bytes()
        assert all(output.read_bytes().replace(b"\n\n", b"\n") == first.replace(b"\n\n", b"\n") for output in outputs)
        events = [json.loads(line) for line in first.splitlines() if line]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        logs = [event for event in events if event["type"] == "log" and event["rank"] is not None]
        assert len(logs) == lines // ranks * ranks, f"{len(logs)} of {lines} lines"
        return len(logs) / (logs[-1]["ts"] - logs[0]["ts"])


def _curl(url: str, output: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["curl", "-sSNf", url, "-o", str(output)])


@contextmanager
def service(data_dir: Path) -> Iterator[str]:
    """A service of its own, ended afterwards."""
    port = _free_port()
    command = [sys.executable, "-m", "corral", "serve", "--port", str(port), "--data-dir", str(data_dir)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _until_ready(url)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until_ready(url: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{url} was not ready in {timeout:g} s")


def through_ray(folder: Path, source: Path, lines: int, ranks: int) -> float:
    """Lines a second between the first and the last line that `ray job submit` prints."""
    dashboard = _free_port()
    start = ["ray", "start", "--head", "--block", f"--port={_free_port()}", f"--dashboard-port={dashboard}"]
    start += ["--num-cpus=2", "--object-store-memory=100000000", "--include-dashboard=true"]
    address = f"http://127.0.0.1:{dashboard}"
    head = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{address}/api/version").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        submit = ["ray", "job", "submit", f"--address={address}", f"--working-dir={source}", "--"]
        submit += ["python3", "flood.py", str(lines), str(ranks)]
        stamps = []
        client = subprocess.Popen(submit, stdout=subprocess.PIPE, text=True, env=os.environ | {"RAY_DEDUP_LOGS": "0"})
        assert client.stdout is not None
        for line in client.stdout:
            if " loss 0.123456 " in line:
                stamps.append(time.monotonic())
        client.wait(60)
        if len(stamps) != lines // ranks * ranks:
            print(f"ray job submit: {len(stamps)} of {lines} lines arrived", file=sys.stderr)
        return len(stamps) / (stamps[-1] - stamps[0])
    finally:
        end_descendants(head)


def end_descendants(process: subprocess.Popen[bytes]) -> None:
    """`ray start --block` takes long to end what it started; nothing of it is worth waiting for."""
    family = [*psutil.Process(process.pid).children(recursive=True), process]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(30)


if __name__ == "__main__":
    main()
