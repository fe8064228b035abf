"""Real ranks that run the collective check, forked from one process that has imported torch; with planted faults.

`python -m tests.workers.check_ranks` reads a Spec a line from stdin and answers with a line: what each rank did.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

CLONE_NEWNET = 0x40000000
WRITTEN = "rank-{}.json"


@dataclass(frozen=True)
class Spec:
    """faults: rank → absent, stopped:STEP[:PEER], hangs:PEER, wrong:CHECK, torch:VERSION. namespaces: of each node one,
    with an interface eth0, `address` being that of node 0; without them all ranks are on the loopback."""

    world: int
    devices: int
    run_dir: str
    arrive: float = 60.0
    step: float = 30.0
    margin: float = 1.0
    faults: dict[str, str] = field(default_factory=dict)
    namespaces: list[str] = field(default_factory=list)
    address: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True)
class Outcome:
    """error: what was raised, "" for nothing, None for a rank that had to be killed. findings: when nothing was."""

    error: str | None
    findings: list[dict[str, Any]]


class Ranks:
    """The process that forks ranks; for several runs, one after another."""

    def __enter__(self) -> Ranks:
        command = [sys.executable, "-m", "tests.workers.check_ranks"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def run(self, spec: Spec) -> list[Outcome]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(spec)), file=self._process.stdin, flush=True)
        return [Outcome(**fields) for fields in json.loads(self._process.stdout.readline())]


def main() -> None:
    import corral.workers.collective_check  # noqa: F401  # torch, once

    for line in sys.stdin:
        spec = Spec(**json.loads(line))
        if not spec.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                spec = Spec(**json.loads(line) | {"port": probe.getsockname()[1]})
        for rank in range(spec.world):
            (Path(spec.run_dir) / WRITTEN.format(rank)).unlink(missing_ok=True)
        pids = [_fork(spec, rank) for rank in range(spec.world)]
        for rank in range(spec.world):
            if _comes(spec, rank):
                os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOWAIT)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        print(json.dumps([asdict(_outcome(Path(spec.run_dir), rank)) for rank in range(spec.world)]), flush=True)


def _outcome(folder: Path, rank: int) -> Outcome:
    file = folder / WRITTEN.format(rank)
    return Outcome(**json.loads(file.read_text())) if file.exists() else Outcome(None, [])


def _fork(spec: Spec, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        outcome = _rank(spec, number)
        part = Path(spec.run_dir) / f".{number}"
        part.write_text(json.dumps(asdict(outcome)))
        part.replace(Path(spec.run_dir) / WRITTEN.format(number))
        if number == 0:  # it holds the store, which the others may still have to read
            _until_heard(spec)
    finally:
        os._exit(0)


def _until_heard(spec: Spec) -> None:
    while not all((Path(spec.run_dir) / WRITTEN.format(r)).exists() for r in range(spec.world) if _comes(spec, r)):
        time.sleep(0.02)


def _comes(spec: Spec, rank: int) -> bool:
    return not spec.faults.get(str(rank), "").startswith(("absent", "stopped"))


def _rank(spec: Spec, number: int) -> Outcome:
    from corral.engine.rank import Rank
    from corral.errors import CorralError
    from corral.workers.collective_check import check_collectives
    from corral.workers.collective_host import Bounds

    node = number // spec.devices
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if spec.namespaces else "lo"
    if spec.namespaces:
        _enter(spec.namespaces[node])
    with (Path(spec.run_dir) / f"rank-{number}.log").open("w") as log:
        os.dup2(log.fileno(), 2)
    plant(spec.faults.get(str(number), ""), number)
    rank = Rank(number, spec.world, node, number % spec.devices, "cpu", f"{spec.address}:{spec.port}")
    try:
        found = check_collectives(rank, spec.devices, spec.run_dir, bounds=Bounds(spec.arrive, spec.step, spec.margin))
    except CorralError as error:
        return Outcome(str(error), [])
    return Outcome("", [finding.as_dict() for finding in found])


def _enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


# Faults ---------------------------------------------------------------------------------------------------------------


def plant(fault: str, me: int) -> None:
    """Change this process, so that the rank goes wrong as named."""
    kind, _, rest = fault.partition(":")
    if kind == "absent":
        while True:
            signal.pause()
    if kind == "stopped":
        _stop_at(*rest.split(":"))
    if kind == "wrong":
        _contribute_wrongly(rest, me)
    if kind == "hangs":
        _hang_with(int(rest))
    if kind == "torch":
        import torch

        torch.__version__ = rest


def _stop_at(step: str, peer: str = "") -> None:
    from corral.workers.watched import Watched

    enter = Watched.enter

    def stop(self: Watched, name: str, to: int | None = None, bound: float | None = None) -> None:
        enter(self, name, to, bound)
        if name == step and (not peer or to == int(peer)):
            os.kill(os.getpid(), signal.SIGSTOP)

    Watched.enter = stop  # type: ignore[method-assign]


def _hang_with(peer: int) -> None:
    from corral.workers.collective_probe import Exchanges

    speed = Exchanges.speed

    def hang(self: Exchanges, to: int) -> Any:
        while to == peer:
            signal.pause()
        return speed(self, to)

    Exchanges.speed = hang  # type: ignore[method-assign]


def _contribute_wrongly(check: str, me: int) -> None:
    from corral.workers import collective_probe

    values, honest = collective_probe.values, getattr(collective_probe, check)

    def dishonest(*args: Any) -> Any:
        collective_probe.values = lambda owner, *rest: values(owner, *rest) + (owner == me)
        try:
            return honest(*args)
        finally:
            collective_probe.values = values

    setattr(collective_probe, check, dishonest)


if __name__ == "__main__":
    main()
