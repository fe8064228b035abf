"""Which pairs meet when, which of them are called slow, and who is named: on numbers made up here."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.findings import Finding, failures
from corral.workers.pair_judgement import TRIES, Limits, Speed, measured_again, pair_findings, slow_pairs
from corral.workers.pair_schedule import ALL_PAIRS, Pair, peers, schedule, tournament

LIMITS = Limits(floor=20.0, least=4.0)
SEEDS = st.integers(0, 1 << 32)
Rate = Callable[[Pair, int], float]
"""MiB/s of a pair in a pass; 0 is the first one, the tries come after it."""


def ranks_of(nodes: int, devices: int) -> list[int]:
    return [rank // devices for rank in range(nodes * devices)]


# Who meets whom -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 70))
def test_everybody_meets_everybody_once_in_as_few_rounds_as_there_can_be(players):
    rounds = tournament(range(players))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(players), 2))
    assert len(rounds) == (players - 1 if players % 2 == 0 else players)
    assert all(len(ranks := [r for pair in pairs for r in pair]) == len(set(ranks)) for pairs in rounds)


@given(st.integers(1, 40), st.integers(1, 9))
def test_a_large_world_measures_first_ranks_with_each_other_and_neighbours(nodes, devices):
    where = ranks_of(nodes, devices)
    rounds = schedule(where)
    found = [pair for pairs in rounds for pair in pairs]
    leaders = list(itertools.combinations(range(0, nodes * devices, devices), 2))
    neighbours = [(r, r + 1) for r in range(nodes * devices - 1) if where[r] == where[r + 1]]
    everything = list(itertools.combinations(range(nodes * devices), 2))
    assert sorted(found) == (everything if len(where) <= ALL_PAIRS else sorted(leaders + neighbours))
    assert all(len(ranks := [r for pair in pairs for r in pair]) == len(set(ranks)) for pairs in rounds)


@given(st.integers(1, 12), st.integers(1, 9))
def test_ranks_that_only_know_their_own_peers_never_wait_in_a_circle(nodes, devices):
    where = ranks_of(nodes, devices)
    rounds = schedule(where)
    left = {rank: peers(rounds, rank) for rank in range(len(where))}
    while any(left.values()):
        meeting = [rank for rank, to in left.items() if to and left[to[0]][:1] == [rank]]
        assert meeting
        for rank in meeting:
            left[rank].pop(0)


# What is slow ---------------------------------------------------------------------------------------------------------


def judged(where: list[int], rate: Rate) -> list[Finding]:
    """All findings that are not ok, after both passes."""
    first = {pair: Speed(1e-4, rate(pair, 0)) for pairs in schedule(where) for pair in pairs}
    tries: list[dict[Pair, Speed]] = []
    while again := measured_again(first, tries, where, LIMITS):
        tries.append({pair: Speed(1e-4, rate(pair, len(tries) + 1)) for pair in again})
    assert len(tries) <= TRIES
    slow = slow_pairs(first, tries, where, LIMITS)
    found = pair_findings(first, slow, where, LIMITS)
    return failures(found)


def usual(where: list[int], pair: Pair, noise: random.Random) -> float:
    """A third as fast between nodes; a busy machine takes off up to half."""
    return (900.0 if where[pair[0]] == where[pair[1]] else 300.0) * noise.uniform(0.5, 1.0)


@given(st.integers(2, 6), st.integers(1, 5), SEEDS)
def test_noise_is_never_red(nodes, devices, seed):
    """Every pair may be slow beyond all measure, in every pass but one."""
    where, noise = ranks_of(nodes, devices), random.Random(seed)
    healthy = {
        pair: {0, 1, 2, 3} - set(noise.sample(range(4), noise.randrange(4))) for pair in _pairs(where)
    }  # passes in which the machine lets the pair be; at least one
    assert not judged(
        where, lambda pair, k: usual(where, pair, noise) if k in healthy[pair] else noise.uniform(0.01, 50.0)
    )


@given(st.integers(3, 8) | st.just(40), st.integers(1, 4), SEEDS)
def test_a_slow_node_is_named_once(nodes, devices, seed):
    where, noise = ranks_of(nodes, devices), random.Random(seed)
    bad = noise.randrange(nodes)

    def rate(pair: Pair, k: int) -> float:
        a, b = where[pair[0]], where[pair[1]]
        return noise.uniform(1.0, 12.0) if a != b and bad in (a, b) else usual(where, pair, noise)

    (finding,) = judged(where, rate)
    assert (finding.check, finding.node, finding.rank) == ("node_bandwidth", bad, None)
    assert finding.unit == "MiB/s"
    assert f"node-{bad}" in finding.fix


@given(st.integers(3, 7), st.integers(1, 4), SEEDS)
def test_a_slow_pair_is_named_and_nobody_else(nodes, devices, seed):
    where, noise = ranks_of(nodes, devices), random.Random(seed)
    bad = noise.choice([pair for pair in _pairs(where) if where[pair[0]] != where[pair[1]]])
    (finding,) = judged(where, lambda pair, k: 3.0 if pair == bad else usual(where, pair, noise))
    assert (finding.check, finding.rank, finding.peer, finding.value) == ("pair", *bad, 3.0)
    assert f"node-{where[bad[0]]} and node-{where[bad[1]]}" in finding.line()


@given(st.integers(3, 6), st.integers(2, 4), SEEDS)
def test_a_slow_link_of_two_nodes_is_one_finding(nodes, devices, seed):
    where, noise = ranks_of(nodes, devices), random.Random(seed)
    a, b = sorted(noise.sample(range(nodes), 2))
    (finding,) = judged(
        where,
        lambda pair, k: 8.0 if {where[pair[0]], where[pair[1]]} == {a, b} else usual(where, pair, noise),
    )
    assert (finding.rank, finding.peer) == (a * devices, b * devices)
    assert f"as on all {devices * devices} pairs" in finding.found


@given(st.integers(1, 4), st.integers(3, 6), SEEDS)
def test_a_rank_that_is_slow_within_its_node_is_named(nodes, devices, seed):
    where, noise = ranks_of(nodes, devices), random.Random(seed)
    bad = noise.randrange(nodes * devices)

    def rate(pair: Pair, k: int) -> float:
        within = where[pair[0]] == where[pair[1]]
        return 5.0 if bad in pair and within else usual(where, pair, noise)

    (finding,) = judged(where, rate)
    assert (finding.check, finding.rank, finding.node) == ("rank_bandwidth", bad, where[bad])


@given(st.integers(1, 3))
def test_two_nodes_have_nothing_to_compare_with_but_what_is_of_use(devices):
    where = ranks_of(2, devices)
    assert not judged(where, lambda pair, k: 8.0 if where[pair[0]] != where[pair[1]] else 900.0)
    (finding,) = judged(where, lambda pair, k: 1.2 if where[pair[0]] != where[pair[1]] else 900.0)
    assert (finding.rank, finding.peer) == (0, devices)


def test_above_the_floor_nothing_is_slow_and_below_it_only_what_is_far_from_the_rest():
    where = ranks_of(4, 1)
    bad = (1, 2)
    assert not judged(where, lambda pair, k: 20.0 if pair == bad else 900.0)
    assert judged(where, lambda pair, k: 19.9 if pair == bad else 900.0)
    assert not judged(where, lambda pair, k: 10.0 if pair == bad else 39.0)
    assert judged(where, lambda pair, k: 9.7 if pair == bad else 39.0)


def test_a_pair_that_is_fast_once_when_alone_is_not_slow():
    where = ranks_of(4, 1)
    for good in range(1, TRIES + 1):
        assert not judged(where, lambda pair, k, good=good: 900.0 if pair != (0, 3) or k == good else 1.0)


@pytest.mark.parametrize("nodes", [3, 8])
def test_where_everything_is_slow_few_pairs_are_measured_again(nodes):
    where = ranks_of(nodes, 4)
    first = {pair: Speed(1e-4, 1.0) for pair in _pairs(where)}
    assert 1 <= len(measured_again(first, [], where, LIMITS)) <= 8


def test_every_pair_has_a_finding_with_its_number():
    where = ranks_of(2, 2)
    speeds = {pair: Speed(2e-4, 100.0 + sum(pair)) for pair in _pairs(where)}
    found = pair_findings(speeds, {}, where, LIMITS)
    assert {(f.rank, f.peer): f.value for f in found} == {pair: speed.bandwidth for pair, speed in speeds.items()}
    assert all(f.ok and f.unit == "MiB/s" and "0.2 ms" in f.found for f in found)


def _pairs(where: list[int]) -> list[Pair]:
    return [pair for pairs in schedule(where) for pair in pairs]
