"""The contract every launcher keeps, in process and on Ray nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.errors import ConfigError, DataError
from corral.workers.in_process import InProcess
from corral.workers.launcher import Launcher, WorkerError, print_line, sink_for
from corral.workers.local_cluster import LocalCluster
from corral.workers.ray_launcher import RayLauncher
from tests.workers.clusters import topology
from tests.workers.toy import Toy

WORKER = "tests.workers.toy:Toy"


@pytest.fixture(scope="module", params=["in_process", "ray 2x2"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launcher, Path]]:
    folder = tmp_path_factory.mktemp("run")
    if request.param == "in_process":
        launcher: Launcher = InProcess(lambda rank: Toy(rank, str(folder)), run_dir=folder)
    else:
        cluster: LocalCluster = request.getfixturevalue("cluster")
        launcher = RayLauncher(topology(2, 2, cluster.address), WORKER, (str(folder),), folder, preload=())
    try:
        yield launcher, folder
    finally:
        launcher.close()


def test_results_come_in_rank_order_and_each_rank_gets_its_arguments(run: tuple[Launcher, Path]) -> None:
    launcher, _ = run
    world = len(launcher.ranks)
    assert launcher.call("echo", [(f"for {rank}",) for rank in range(world)]) == [
        (rank, f"for {rank}") for rank in range(world)
    ]


def test_a_rank_keeps_its_state_between_calls(run: tuple[Launcher, Path]) -> None:
    launcher, _ = run
    world = len(launcher.ranks)
    before = [list(each) for each in launcher.call("history", [()] * world)]
    launcher.call("echo", [((rank, "a"),) for rank in range(world)])
    launcher.call("echo", [((rank, "b"),) for rank in range(world)])
    after = launcher.call("history", [()] * world)
    for rank in range(world):
        assert after[rank] == [*before[rank], (rank, "a"), (rank, "b")]


def test_ranks_are_numbered_by_node_then_device(run: tuple[Launcher, Path]) -> None:
    launcher, _ = run
    world = len(launcher.ranks)
    found = [rank for rank, _, _ in launcher.call("where", [()] * world)]
    assert found == list(launcher.ranks)
    assert [rank.rank for rank in found] == list(range(world))
    assert [(rank.node, rank.local_rank) for rank in found] == sorted((rank.node, rank.local_rank) for rank in found)


def test_a_large_argument_and_result_pass(run: tuple[Launcher, Path]) -> None:
    launcher, _ = run
    world = len(launcher.ranks)
    blob = bytes(range(256)) * (1 << 15)  # 8 MiB: more than any pipe or inline limit on the way
    assert all(value == blob for _, value in launcher.call("echo", [(blob,)] * world))


def test_the_number_of_argument_tuples_must_be_the_world(run: tuple[Launcher, Path]) -> None:
    launcher, _ = run
    with pytest.raises(ValueError, match=r"echo: \d argument tuples for \d rank"):
        launcher.call("echo", [()] * (len(launcher.ranks) + 1))


def test_progress_names_the_last_call_of_every_rank(run: tuple[Launcher, Path]) -> None:
    launcher, folder = run
    world = len(launcher.ranks)
    pids = [pid for _, pid, _ in launcher.call("where", [()] * world)]
    for rank in launcher.ranks:
        record = json.loads((folder / "progress" / f"rank-{rank.rank}.json").read_text())
        said = {key: record[key] for key in ("rank", "node", "pid", "method", "state")}
        where = {"rank": rank.rank, "node": rank.node, "pid": pids[rank.rank]}
        assert said == {**where, "method": "where", "state": "idle"}


def test_a_foreseen_error_keeps_its_type_and_text(run: tuple[Launcher, Path]) -> None:
    launcher, _ = run  # last of the module: after an error only close() is left
    world = len(launcher.ranks)
    with pytest.raises(DataError, match="row 3 has no ground truth") as caught:
        launcher.call("fail", [("DataError", "row 3 has no ground truth")] * world)
    assert caught.type is DataError
    assert caught.value.exit_code == 1


def test_in_process_close_reaches_the_worker_once(tmp_path: Path) -> None:
    launcher = InProcess(lambda rank: Toy(rank, str(tmp_path)))
    launcher.close()
    (tmp_path / "closed-0").unlink()
    launcher.close()
    assert not (tmp_path / "closed-0").exists()


def test_in_process_an_unforeseen_error_passes_untouched(tmp_path: Path) -> None:
    launcher = InProcess(lambda rank: Toy(rank, str(tmp_path)))
    with pytest.raises(ValueError, match="broken on 0") as caught:
        launcher.call("fail_if", [(True,)])
    assert not isinstance(caught.value, WorkerError)


def test_rank_output_goes_to_the_driver_or_only_to_files():
    assert sink_for({}) is print_line
    assert sink_for({"CORRAL_RANK_OUTPUT": "driver"}) is print_line
    assert sink_for({"CORRAL_RANK_OUTPUT": "files"}) is None
    with pytest.raises(ConfigError, match=r"^CORRAL_RANK_OUTPUT='file' is unknown; use driver .* or files .*$"):
        sink_for({"CORRAL_RANK_OUTPUT": "file"})
