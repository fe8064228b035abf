"""Files of other nodes come to the head as they grow, and nothing of the head's own is touched."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from corral.job.agent import mirror_node
from corral.job.agent.attempt import Attempt
from corral.job.agent.mirror_copy import Copy
from corral.job.agent.mirror_node import MirrorNode
from corral.job.agent.mirrored import Mirrored
from corral.job.agent.mirroring import Mirroring
from tests.job.agent.joining import NAME, Joining, boarding, with_source
from tests.job.agent.service import RecordingService
from tests.job.agent.test_agent import until
from tests.job.agent.test_join import names
from tests.job.agent.test_source import tar


def left(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def look(node: MirrorNode, copy: Copy, last: bool = False) -> list[str]:
    """One look at the node as the mirror does it; what was too large."""
    skipped: list[str] = []
    while True:
        grown = node.grown(copy.known, last)
        skipped += grown.skipped
        for piece in grown.pieces:
            copy.take(piece)
        if not grown.more:
            return skipped


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_follows_files_that_grow_change_and_come_anew(seed: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mirror_node, "PIECE", 700)
    monkeypatch.setattr(mirror_node, "LOT", 1500)
    chance = random.Random(seed)
    there, here = tmp_path / "there", tmp_path / "here"
    node, copy = MirrorNode(str(there)), Copy("one", here / "run", {})
    (there / "run/logs/node-1").mkdir(parents=True)
    for number in range(120):
        name = chance.choice(["logs/node-1/rank-4.log", "logs/node-1/rank-5.log", "metrics.jsonl", "plan.json"])
        path = there / "run" / name
        change = chance.random()
        if change < 0.6:
            with path.open("ab") as file:
                file.write(os.urandom(chance.choice([0, 1, 100, 2000])))
        elif change < 0.8 and name == "plan.json":
            path.write_bytes(b"%d" % number * chance.choice([1, 500]))
        elif change < 0.9:
            fresh = path.with_name("fresh")
            fresh.write_bytes(os.urandom(chance.choice([0, 50, 3000])))
            fresh.replace(path)
        elif path.exists():
            path.write_bytes(b"")
        if chance.random() < 0.3:
            look(node, copy)
            time.sleep(0.001)
    look(node, copy, last=True)
    assert left(here / "run") == left(there / "run")
    assert node.grown(copy.known, True).pieces == []


def test_checkpoints_and_large_files_stay_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_node, "WHOLE", 1000)
    monkeypatch.setattr(mirror_node, "LARGEST", 5000)
    run, node, copy = tmp_path / "there/run", MirrorNode(str(tmp_path / "there")), Copy("one", tmp_path / "run", {})
    run.mkdir(parents=True)
    for name, size in {"a.safetensors": 1001, "b.safetensors": 900, "trace.json": 2000, "large": 5001}.items():
        (run / name).write_bytes(bytes(size))
    (run / "link").symlink_to("/etc/passwd")
    os.mkfifo(run / "pipe")
    assert sorted(look(node, copy)) == ["a.safetensors", "large"]
    assert sorted(left(tmp_path / "run")) == ["b.safetensors"]
    look(node, copy, last=True)
    assert sorted(left(tmp_path / "run")) == ["b.safetensors", "trace.json"]


def test_output_of_ranks_comes_here_whatever_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_node, "LARGEST", 5000)
    run, node, copy = tmp_path / "there/run", MirrorNode(str(tmp_path / "there")), Copy("one", tmp_path / "run", {})
    (run / "logs/node-1").mkdir(parents=True)
    for name in ("logs/node-1/rank-4.log", "logs/node-1/other.log"):
        (run / name).write_bytes(os.urandom(4000))
    assert look(node, copy) == []
    for name in ("logs/node-1/rank-4.log", "logs/node-1/other.log"):
        with (run / name).open("ab") as file:
            file.write(os.urandom(4000))
    assert look(node, copy) == ["logs/node-1/other.log"]
    log = "logs/node-1/rank-4.log"
    assert left(tmp_path / "run")[log] == left(run)[log]


def test_what_the_head_has_itself_stays(tmp_path: Path) -> None:
    owners: dict[str, str] = {}
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("of the head")
    (run / "linked.json").symlink_to("/nowhere")
    for name in ("one", "two"):
        there = tmp_path / name / "run"
        there.mkdir(parents=True)
        for file in ("plan.json", "linked.json", "shared.jsonl"):
            (there / file).write_text(f"of {name}")
        (there / f"{name}.log").write_text(name)
        look(MirrorNode(str(tmp_path / name)), Copy(name, run, owners))
    (run / "linked.json").unlink()
    assert left(run) == {"plan.json": b"of the head", "shared.jsonl": b"of one", "one.log": b"one", "two.log": b"two"}


@pytest.mark.parametrize("complete", [True, False])
def test_it_is_said_when_not_all_came_from_other_nodes(complete: bool, tmp_path: Path, monkeypatch):
    """The process that follows them, as its orders and answers are."""
    orders, program = tmp_path / "orders", tmp_path / "mirror"
    program.write_text(MIRROR.format(python=sys.executable, orders=orders, complete=complete))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    spec = boarding(RecordingService(), tmp_path, ["true"], nodes=2).spec
    said: list[str] = []
    mirroring = Mirroring(Attempt(tmp_path, spec), {"RAY_ADDRESS": "127.0.0.1:1"}, said.append)
    mirroring.begin(lambda: True)
    mirroring.last(hasty=False)
    mirroring.remove(True, hasty=False)
    assert orders.read_text().split() == ["begin", "last", "15.0", "remove"]
    assert [line.startswith("not all output of other nodes is here") for line in said] == [True] * (not complete)


MIRROR = """#!{python}
import json, sys
with open("{orders}", "a", buffering=1) as orders:
    for line in sys.stdin:
        orders.write(line)
        print(json.dumps(dict(nodes=1, problem=None, complete={complete})), flush=True)
"""


class StandInRay(ModuleType):
    """Two nodes besides the head, whose actors work in this process; `stuck` never answers what it is asked last."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self, folders: dict[str, Path], stuck: str) -> None:
        super().__init__("ray")
        self._folders, self._stuck = folders, stuck

    def init(self, **_: object) -> None: ...

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_id=lambda: "head")

    def nodes(self) -> list[dict[str, object]]:
        return [{"NodeID": name, "Alive": True} for name in ("head", *self._folders)]

    def remote(self, kind: type) -> SimpleNamespace:
        def options(scheduling_strategy: Any, num_cpus: float) -> SimpleNamespace:
            name = scheduling_strategy.node_id
            return SimpleNamespace(remote=lambda _: self._actor(name, kind(str(self._folders[name]))))

        return SimpleNamespace(options=options)

    def _actor(self, name: str, node: Any) -> SimpleNamespace:
        def method(what: str) -> SimpleNamespace:
            def call(*args: Any) -> list[Any]:
                never = name == self._stuck and what == "grown" and args[1]
                return [] if never else [getattr(node, what)(*args)]

            return SimpleNamespace(remote=lambda *args: Answer(call(*args)))

        return SimpleNamespace(**{what: method(what) for what in ("begin", "grown", "remove")})

    def wait(self, refs: list[Answer], num_returns: int, timeout: float) -> tuple[list[Answer], list[Answer]]:
        return [ref for ref in refs if ref.content], [ref for ref in refs if not ref.content]

    def get(self, ref: Answer) -> Any:
        return ref.content[0]


@dataclass(frozen=True, eq=False)
class Answer:
    content: list[Any]


def test_what_did_not_come_stays_on_its_node_and_on_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: tmp_path / name / NAME for name in ("ready", "stuck")}
    for folder in folders.values():
        (folder / "run").mkdir(parents=True)
        (folder / "run/metrics.jsonl").write_text("{}\n")
        (folder / "source").mkdir()
    monkeypatch.setitem(sys.modules, "ray", StandInRay(folders, "stuck"))
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = lambda name, soft: SimpleNamespace(node_id=name)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    head = tmp_path / "head"
    (head / "run").mkdir(parents=True)
    nodes = Mirrored(Attempt(head, boarding(RecordingService(), tmp_path, ["true"], nodes=3).spec), lambda line: None)
    assert nodes.begin() == (2, None)
    assert nodes.last(0.3) is False
    nodes.remove(all_of_it=True)
    assert not folders["ready"].exists()
    assert left(folders["stuck"]) == {"run/metrics.jsonl": b"{}\n"}


def test_a_node_gets_the_source_or_says_why_not(tmp_path: Path) -> None:
    node, archive = MirrorNode(str(tmp_path / "root" / NAME)), tar(("run.sh", b"echo\n", {}))
    assert node.begin(".head-1") is True
    assert (tmp_path / "root" / NAME).stat().st_mode & 0o777 == 0o700
    told = with_source(RecordingService(), archive)
    assert node.unpack(archive, told["bundle"]) is None
    assert (tmp_path / "root" / NAME / "source/run.sh").read_bytes() == b"echo\n"
    assert "the copy of the source bundle has digest" in (node.unpack(archive, "0" * 64) or "")
    assert os.listdir(tmp_path / "root" / NAME) == []
    (tmp_path / "root" / NAME / ".head-1").touch()
    assert node.begin(".head-1") is False
    node.remove(all_of_it=False)
    assert os.listdir(tmp_path / "root" / NAME) == [".head-1"]
    node.remove(all_of_it=True)
    assert os.listdir(tmp_path / "root") == []


# A real cluster -------------------------------------------------------------------------------------------------------

DRIVER = """
import os, sys, time, ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)

@ray.remote(num_cpus=0, resources={"other": 1})
class Rank:
    def work(self, run, source):
        logs = os.path.join(run, "logs", "node-1")
        os.makedirs(logs, exist_ok=True)
        os.makedirs(os.path.join(run, "progress"), exist_ok=True)
        with open(os.path.join(run, "progress", "rank-4.json"), "w") as file:
            file.write('{"rank": 4, "node": 1, "calls": 7, "state": "idle", "time": 1.5}')
        self.log = open(os.path.join(logs, "rank-4.log"), "a")
        print("reads", open(os.path.join(source, "data")).read().strip(), file=self.log, flush=True)
        print(sorted(name for name in os.environ if name.startswith("CORRAL_AGENT_")), file=self.log, flush=True)
        print("secrets:", os.environ.get("PASSWORD"), "hunter2-hunter2", file=self.log, flush=True)
        with open(os.path.join(run, "model.safetensors"), "wb") as file:
            file.write(bytes(2 << 20))
    def end(self):
        self.log.write("last words")
        self.log.flush()
        os.kill(os.getpid(), 9)

rank = Rank.remote()
ray.get(rank.work.remote(os.environ["CORRAL_RUN_DIR"], os.getcwd()))
print("up", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
try:
    ray.get(rank.end.remote())
except ray.exceptions.RayError:
    pass
os._exit(3)
"""


@contextmanager
def node(temp: Path, folder: Path, place: Path, *options: str) -> Iterator[None]:
    """A Ray node that sees `folder` where all others see `place`: a mount namespace of its own."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", "127.0.0.2"]
    command += [
        "--object-store-memory",
        str(80 << 20),
        "--include-log-monitor=false",
        "--disable-usage-stats",
        *options,
    ]
    script = 'mount --bind "$0" "$1" && shift 1 && exec "$@"'
    with (temp / f"{folder.name}.out").open("wb") as out:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, str(folder), str(place), *command],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=os.environ | {"RAY_enable_worker_prestart": "0", "RAY_health_check_period_ms": "1000"},
        )
    try:
        yield
    finally:  # it dies at once with all it started
        doomed = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in doomed:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(doomed, timeout=20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return int(probe.getsockname()[1])


def wait_for_nodes(address: str, count: int) -> None:
    """Until so many nodes are alive."""
    script = """if True:
        import sys, time, ray
        ray.init(address=sys.argv[1], log_to_driver=False)
        while sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[2]):
            time.sleep(0.1)"""
    subprocess.run([sys.executable, "-c", script, address, str(count)], timeout=120, check=True, capture_output=True)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.2", port)) == 0


@pytest.fixture
def place() -> Iterator[Path]:
    """Short: paths of sockets have a limit."""
    with tempfile.TemporaryDirectory(prefix="corral-", dir="/tmp") as folder:
        yield Path(folder)


def may_mount() -> bool:
    probe = ["unshare", "--mount", "mount", "--bind", "/tmp", "/tmp"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs the right to mount: nodes get folders of their own that way")
def test_nodes_with_folders_of_their_own(place: Path, service: RecordingService) -> None:
    """The source is on every node, also on one that comes later; what a rank of another node writes is stored, up to
    its last words; a node that dies ends nothing."""
    root, there, late, ray_temp = (place / name for name in ("root", "there", "late", "r"))
    for folder in (root, there, late, ray_temp):
        folder.mkdir(mode=0o700)
    port, go = free_port(), place / "go"
    address = f"127.0.0.2:{port}"
    told = with_source(service, tar(("driver.py", DRIVER.encode(), {}), ("data", b"the source\n", {})))
    service.secrets = {"PASSWORD": "hunter2-hunter2"}
    head = ["--head", "--port", str(port), "--include-dashboard=false", "--num-cpus", "1", "--temp-dir", str(ray_temp)]
    other = ["--address", address, "--num-cpus", "1"]
    with ExitStack() as cluster:
        cluster.enter_context(node(place, root, root, *head))
        until(lambda: listens(port), 90)
        cluster.enter_context(node(place, there, root, *other, "--resources", '{"other": 1}'))
        wait_for_nodes(address, 2)
        about = boarding(service, root, [sys.executable, "driver.py", str(go)], nodes=2, **told)
        agent = Joining(about, place / "output", {"RAY_ADDRESS": address, "CORRAL_AGENT_X": "hidden"})
        cluster.callback(agent.end)
        service.wait_for(lambda: "up" in service.lines("driver"), 120)
        assert (there / NAME / "source/data").read_text() == "the source\n"
        assert (there / NAME).stat().st_mode & 0o777 == 0o700
        service.wait_for(lambda: len(service.lines("node-1/rank-4")) == 3, 20)
        service.wait_for(lambda: service.heartbeats[-1]["progress"] == 7, 20)
        with node(place, late, root, *other):
            until((late / NAME / "source/data").exists, 90)
        go.touch()
        assert agent.wait(60) == 3
    assert service.lines("node-1/rank-4") == ["reads the source", "[]", "secrets: None ***", "last words"]
    assert {"driver.log", "logs/node-1/rank-4.log", "progress/rank-4.json"} <= set(names(service.records))
    assert "model.safetensors" not in names(service.records)
    assert any("stay on their nodes: model.safetensors" in line for line in agent.readable())
    assert os.listdir(there) == os.listdir(root) == []
