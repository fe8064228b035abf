"""The collective check: what reports say about ranks, and real ranks of which one goes wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.errors import InfraError
from corral.findings import Finding
from corral.workers.collective_check import collective_findings, read_findings
from corral.workers.collective_host import Bounds
from corral.workers.collective_reports import Report, absent, odd_ones, stuck_ones, wrong_ones
from corral.workers.local_cluster import LocalCluster
from corral.workers.pair_judgement import Speed
from corral.workers.ray_launcher import RayLauncher
from tests.workers.check_ranks import Outcome, Ranks, Spec
from tests.workers.clusters import topology

NODES = [0, 0, 1, 1]

# What reports say -----------------------------------------------------------------------------------------------------


def places(findings: list[Finding]) -> list[tuple[int | None, int | None, int | None]]:
    assert not any(finding.ok for finding in findings)
    return [(finding.node, finding.rank, finding.peer) for finding in findings]


def done() -> Report:
    return Report(took={"all_reduce": 0.1}, speeds={1: Speed(1e-4, 5.0)})


def test_a_report_survives_its_way():
    report = Report({"all_reduce": 0.5}, {"pair": [3]}, {2: Speed(1.0, 2.0)}, "pair", 3, "x", [1])
    assert Report.from_json(report.to_json()) == report


def test_ranks_that_do_not_come_are_named_and_a_node_once():
    assert places(absent([1], NODES, 5.0)) == [(0, 1, None)]
    assert places(absent([2, 3], NODES, 5.0)) == [(1, None, None)]
    assert places(absent([1, 2, 3], NODES, 5.0)) == [(1, None, None), (0, 1, None)]


@given(st.lists(st.sampled_from(["1", "2", "3"]), min_size=4, max_size=4))
def test_the_ranks_that_differ_from_most_are_named(versions):
    found = odd_ones([{"torch": version} for version in versions], NODES)
    most = max(set(versions), key=lambda version: (versions.count(version), version == versions[0]))
    odd = [rank for rank, version in enumerate(versions) if version != most]
    if odd:
        assert [finding.rank for finding in found] == odd
        assert all((f.expected, f.found) == (most, versions[f.rank or 0]) and not f.ok for f in found)
    else:
        assert [finding.ok for finding in found] == [True]


def test_a_fact_that_only_one_rank_has_is_named():
    assert places(odd_ones([{}, {}, {"nccl": "2"}, {}], NODES)) == [(1, 2, None)]


def test_two_that_wait_for_each_other_keep_the_rest_waiting():
    stuck = {
        0: Report(stuck="pair", peer=3),
        1: Report(stuck="pair", peer=0),
        2: done(),
        3: Report(stuck="pair", peer=0),
    }
    assert places(stuck_ones(stuck, NODES, 5.0)) == [(None, 0, 3)]


def test_who_does_not_report_is_at_fault_whatever_others_say():
    assert places(stuck_ones({0: Report(stuck="pair", peer=3), 1: done(), 2: done()}, NODES, 5.0)) == [(1, 3, None)]


def test_who_is_in_an_earlier_step_keeps_the_others_waiting():
    reports = {rank: Report(stuck="all_to_all") for rank in range(4)} | {2: Report(stuck="all_reduce", error="closed")}
    (finding,) = stuck_ones(reports, NODES, 5.0)
    assert (finding.check, finding.rank, finding.found) == ("all_reduce", 2, "closed")


def test_a_connection_that_does_not_come_about_names_the_pair():
    reports = {rank: Report(stuck="all_reduce") for rank in (0, 3)}
    reports |= {1: Report(stuck="connect", unreachable=[2]), 2: Report(stuck="connect", unreachable=[1])}
    assert places(stuck_ones(reports, NODES, 5.0)) == [(None, 1, 2)]


def test_where_all_hang_alike_nobody_is_named():
    reports = {rank: Report(stuck="all_reduce") for rank in range(4)}
    assert places(stuck_ones(reports, NODES, 5.0)) == [(None, None, None)]


def test_all_done_means_nobody_is_stuck():
    assert stuck_ones({rank: done() for rank in range(4)}, NODES, 5.0) == []


def test_wrong_values_name_their_owner_the_pair_or_the_one_they_arrive_at():
    def seen(check: str, by: dict[int, list[int]]) -> list[Finding]:
        return wrong_ones({rank: Report(wrong={check: by.get(rank, [])}) for rank in range(4)}, check, NODES)

    assert places(seen("all_reduce", {0: [2], 1: [2], 3: [2]})) == [(1, 2, None)]
    assert places(seen("pair", {3: [1]})) == [(None, 1, 3)]
    assert places(seen("all_to_all", {3: [0, 1, 2]})) == [(1, 3, None)]
    assert places(seen("all_reduce", {rank: [-1] for rank in range(4)})) == [(None, None, None)]
    assert [finding.ok for finding in seen("broadcast", {})] == [True]


# Real ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running


def errors(outcomes: list[Outcome]) -> set[str | None]:
    return {outcome.error for outcome in outcomes}


def test_ranks_that_are_well_say_so_and_leave_their_numbers(ranks: Ranks, tmp_path: Path):
    outcomes = ranks.run(Spec(4, 2, str(tmp_path)))
    assert errors(outcomes) == {""}
    found = read_findings(tmp_path)
    assert outcomes[0].findings == [finding.as_dict() for finding in found]
    assert all(outcome.findings == [f.as_dict() for f in found if f.check != "pair"] for outcome in outcomes[1:])
    assert all(finding.ok for finding in found)
    assert {finding.check for finding in found} == {
        "arrive", "same_facts", "all_reduce", "all_to_all", "broadcast", "pair"
    }  # fmt: skip
    pairs = {(finding.rank, finding.peer): finding for finding in found if finding.check == "pair"}
    assert sorted(pairs) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert all(finding.value and finding.value > 0 for finding in pairs.values())
    assert json.loads((tmp_path / "collective.json").read_text())["seconds"] > 0


@pytest.mark.parametrize("check", ["all_reduce", "all_to_all", "broadcast"])
def test_a_rank_that_contributes_wrongly_is_named_by_all(ranks: Ranks, tmp_path: Path, check: str):
    outcomes = ranks.run(Spec(4, 2, str(tmp_path), faults={"2": f"wrong:{check}"}))
    (said,) = errors(outcomes)
    assert said is not None
    assert said.startswith(
        f"collective check: {check} on rank 2 on node-1: expected the known values, found wrong ones "
    )
    assert "on ranks 0, 1, 3; " in said
    assert [finding.rank for finding in read_findings(tmp_path) if not finding.ok] == [2]


def test_a_rank_that_never_comes_is_named(ranks: Ranks, tmp_path: Path):
    outcomes = ranks.run(Spec(4, 2, str(tmp_path), arrive=10.0, faults={"3": "absent"}))
    assert outcomes[3].error is None
    (said,) = errors(outcomes[:3])
    assert said is not None
    assert said.startswith(
        "collective check: arrive on rank 3 on node-1: expected it within 10 s of rank 0, found nothing"
    )
    assert "logs/node-1/rank-3.log" in said


def test_a_rank_with_another_version_is_named(ranks: Ranks, tmp_path: Path):
    (said,) = errors(ranks.run(Spec(4, 2, str(tmp_path), faults={"1": "torch:1.0"})))
    assert said is not None
    assert said.startswith("collective check: same_torch on rank 1 on node-0: expected 2.")
    assert "found 1.0;" in said


@pytest.mark.slow
@pytest.mark.parametrize("step", ["connect", "all_reduce", "all_to_all", "broadcast", "pair"])
def test_a_rank_that_stops_in_any_step_is_named(ranks: Ranks, tmp_path: Path, step: str):
    outcomes = ranks.run(Spec(4, 2, str(tmp_path), step=5.0, margin=5.0, faults={"2": f"stopped:{step}"}))
    (said,) = errors(outcomes[:2] + outcomes[3:])
    assert said is not None
    assert said.startswith("collective check: answer on rank 2 on node-1: ")


@pytest.mark.slow
def test_a_rank_0_that_stops_is_named_by_those_who_wait_for_it(ranks: Ranks, tmp_path: Path):
    outcomes = ranks.run(Spec(4, 2, str(tmp_path), step=5.0, faults={"0": "stopped:broadcast"}))
    assert all(str(o.error).startswith("collective check: answer on rank 0 on node-0: ") for o in outcomes[1:])


@pytest.mark.slow
def test_two_ranks_that_hang_with_each_other_are_named(ranks: Ranks, tmp_path: Path):
    faults = {"1": "hangs:2", "2": "hangs:1"}
    (said,) = errors(ranks.run(Spec(4, 2, str(tmp_path), step=5.0, margin=5.0, faults=faults)))
    assert said is not None
    assert said.startswith("collective check: pair on rank 1 to rank 2: expected an exchange within 5 s, found none")


# Ranks of a cluster ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_ranks_of_a_cluster_are_checked_without_a_model(cluster: LocalCluster, tmp_path: Path):
    found = collective_findings(topology(2, 2, cluster.address), tmp_path)
    assert found == read_findings(tmp_path)
    assert all(finding.ok for finding in found)
    assert sum(finding.check == "pair" for finding in found) == 6


@pytest.mark.slow
def test_what_fails_on_a_cluster_is_found_and_ends_a_run_with_one_line(cluster: LocalCluster, tmp_path: Path):
    """Nobody can be there in no time at all."""
    where, bounds = topology(2, 2, cluster.address), Bounds(arrive=1e-6)
    assert {finding.ok for finding in collective_findings(where, tmp_path, bounds=bounds)} == {False}
    with pytest.raises(InfraError, match=r"^collective check: (reach|arrive) on ") as caught:
        RayLauncher(
            where, "corral.workers.collective_check:CheckWorker", (2, str(tmp_path), bounds), tmp_path,
            preload=("corral.workers.collective_check",),
        )  # fmt: skip
    assert "(node-" not in str(caught.value)  # the place that is named is not the one that says it
