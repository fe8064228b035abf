"""Doors: whether a rank can be connected to, when nobody answers there."""

from __future__ import annotations

import socket

from corral.workers.reachability import Door, unreachable


def test_an_open_door_is_reached_and_a_closed_one_is_not():
    with socket.create_server(("127.0.0.1", 0)) as master:
        where = f"127.0.0.1:{master.getsockname()[1]}"
    doors = {rank: Door(where) for rank in range(3)}
    doors[1].close()
    assert unreachable({rank: door.address for rank, door in doors.items()}, 5.0) == [1]
    doors[0].close()
    assert unreachable({rank: door.address for rank, door in doors.items()}, 5.0) == [0, 1]
    doors[2].close()


def test_a_network_that_does_not_exist_is_not_reached():
    door = Door("127.0.0.1:9")
    assert unreachable({0: door.address, 7: ("255.255.255.255", 1)}, 5.0) == [7]
    door.close()


def test_nobody_to_reach():
    assert unreachable({}, 5.0) == []
