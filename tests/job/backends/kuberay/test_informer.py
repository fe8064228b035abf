"""The informer: whatever goes wrong on the way, its view becomes what the server has, and it never goes back."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from corral.job.backends.kuberay.client import PODS, KubeClient
from corral.job.backends.kuberay.credentials import Credential, Fixed, TokenFile
from corral.job.backends.kuberay.informer import Informer, Pace
from corral.job.backends.kuberay.transport import Access
from tests.job.backends.kube.api import FakeKube
from tests.job.backends.kube.faults import STREAM, Fault
from tests.job.backends.kube.http import Exchange, Request, Server
from tests.job.backends.kuberay.near import BRISK, QUICK, client_of, run, until

MINE = "of=me"


@pytest.fixture
def kube() -> Iterator[FakeKube]:
    with FakeKube(bookmark_seconds=0.05) as kube:
        yield kube


@asynccontextmanager
async def following(client: KubeClient, pace: Pace = BRISK, selector: str = MINE) -> AsyncIterator[Informer]:
    informer = Informer(client, PODS, selector=selector, pace=pace)
    informer.start()
    try:
        yield informer
    finally:
        await informer.close()


def pod(kube: FakeKube, name: str, owner: str = "me") -> None:
    kube.create("pods", {"metadata": {"name": name, "labels": {"of": owner}}})


def on_server(kube: FakeKube) -> list[tuple[str, str]]:
    """(name, version) of what an informer has to have."""
    return [
        (thing["metadata"]["name"], thing["metadata"]["resourceVersion"])
        for thing in kube.objects("pods", "corral")
        if thing["metadata"].get("labels", {}).get("of") == "me"
    ]


def in_view(informer: Informer) -> list[tuple[str, str]]:
    return [(thing["metadata"]["name"], thing["metadata"]["resourceVersion"]) for thing in informer.items()]


async def agreed(kube: FakeKube, informer: Informer) -> None:
    await until(lambda: in_view(informer) == on_server(kube))


def test_it_has_what_the_server_has_and_says_when_that_changes(kube: FakeKube) -> None:
    async def life() -> None:
        pod(kube, "old")
        pod(kube, "not-mine", owner="you")
        async with client_of(kube) as client, following(client, Pace()) as informer:
            assert informer.get("old") is None
            assert informer.age() == float("inf")
            await asyncio.wait_for(informer.synced.wait(), 10)
            assert in_view(informer) == on_server(kube)
            for change in (
                lambda: pod(kube, "new"),
                lambda: kube.set_status("pods", "new", {"phase": "Running"}),
                lambda: kube.patch("pods", "new", {"metadata": {"labels": {"of": "you"}}}),
                lambda: kube.patch("pods", "not-mine", {"metadata": {"labels": {"of": "me"}}}),
                lambda: kube.delete("pods", "old"),
            ):
                informer.changed.clear()
                change()
                await asyncio.wait_for(informer.changed.wait(), 10)
                await agreed(kube, informer)
            assert [thing["metadata"]["name"] for thing in informer.items()] == ["not-mine"]
            assert informer.get("not-mine") == kube.find("pods", "not-mine")
            ages = [informer.age()]

            def younger() -> bool:
                ages.append(informer.age())
                return ages[-1] < ages[-2]

            await until(younger)  # a bookmark came
            assert kube.count("list") == kube.count("watch") == 1

    run(life)


@pytest.mark.parametrize("effect", sorted(STREAM))
def test_a_watch_that_goes_wrong_loses_nothing(kube: FakeKube, effect: str) -> None:
    async def life() -> None:
        pod(kube, "before")
        async with client_of(kube) as client, following(client) as informer:
            await until(lambda: kube.watches == 1)
            fault = kube.faults.watch(effect, resource="pods", name="*new*")
            pod(kube, "new")
            kube.delete("pods", "before")
            await until(lambda: fault.fired)
            await agreed(kube, informer)

    run(life)


def test_a_watch_that_is_too_old_is_begun_anew_by_a_list(kube: FakeKube) -> None:
    async def life() -> None:
        pod(kube, "before")
        async with client_of(kube) as client, following(client, replace(BRISK, resync=600)) as informer:
            await asyncio.wait_for(informer.synced.wait(), 10)
            kube.faults.status(410, verb="watch", times=2)
            kube.faults.watch("end")
            kube.delete("pods", "before")
            pod(kube, "new")
            kube.store.compact()
            await agreed(kube, informer)
            assert kube.count("list") > 1

    run(life)


def test_an_older_list_is_not_taken(kube: FakeKube) -> None:
    async def life() -> None:
        pod(kube, "gone")
        async with client_of(kube) as client, following(client, replace(BRISK, resync=600)) as informer:
            await asyncio.wait_for(informer.synced.wait(), 10)
            kube.delete("pods", "gone")
            pod(kube, "new")
            await agreed(kube, informer)
            stale = kube.faults.stale(back=2, times=3)
            kube.faults.status(410, verb="watch", resource="pods", times=1)
            kube.faults.watch("gone", resource="pods")
            seen = []
            while stale.fired < 3:
                seen.append(in_view(informer))
                await asyncio.sleep(0.005)
            assert all(view == on_server(kube) for view in seen)
            lists = kube.count("list")
            await until(lambda: kube.count("list") > lists and not informer.trouble)
            assert in_view(informer) == on_server(kube)

    run(life)


def test_while_lists_are_old_a_resync_does_not_stop_the_watch(kube: FakeKube) -> None:
    async def life() -> None:
        pod(kube, "first")
        async with client_of(kube) as client, following(client, replace(BRISK, resync=0.05)) as informer:
            await asyncio.wait_for(informer.synced.wait(), 10)
            kube.faults.stale(back=1, times=None)
            pod(kube, "second")
            await agreed(kube, informer)
            await until(lambda: kube.count("list") > 5)
            pod(kube, "third")
            await agreed(kube, informer)

    run(life)


def test_a_server_that_hangs_is_noticed_and_left(kube: FakeKube) -> None:
    async def life() -> None:
        pod(kube, "one")
        kube.faults.hang(verb="list")
        kube.faults.hang(verb="watch")
        async with client_of(kube) as client, following(client, replace(BRISK, resync=600)) as informer:
            await agreed(kube, informer)
            await until(lambda: kube.watches == 1)
            kube.faults.watch("freeze")
            await until(lambda: informer.trouble)
            assert "does not answer" in informer.trouble
            pod(kube, "two")
            await agreed(kube, informer)
            await until(lambda: not informer.trouble)

    run(life)


def test_the_age_grows_while_nobody_answers(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube) as client, following(client) as informer:
            await asyncio.wait_for(informer.synced.wait(), 10)
            kube.faults.status(503, times=None)
            kube.faults.watch("end", times=None)
            await until(lambda: informer.age() > 0.5)
            assert "503" in informer.trouble
            kube.faults.clear()
            await until(lambda: informer.age() < 0.5)

    run(life)


@pytest.mark.parametrize("way", ["end", "gone", "refused", "too old"])
def test_a_server_that_never_lets_a_watch_live_is_not_asked_all_the_time(kube: FakeKube, way: str) -> None:
    pace = Pace(floor=0.05, pause=0.05, cap=0.1)

    async def life() -> None:
        pod(kube, "one")
        if way in ("end", "gone"):
            kube.faults.watch(way, times=None)
        else:
            kube.faults.status(410 if way == "too old" else 500, verb="watch", times=None)
        async with client_of(kube) as client:
            began = time.monotonic()
            async with following(client, pace):
                await until(lambda: kube.count("watch") >= 8)
            rounds = (time.monotonic() - began) / (pace.pause / 2)
            assert kube.count("watch") <= rounds + 2
            assert kube.count("list") <= rounds + 2

    run(life)


def test_a_busy_server_decides_when_it_is_asked_again(kube: FakeKube) -> None:
    async def life() -> None:
        pod(kube, "one")
        kube.faults.status(429, retry_after=1, verb="watch")
        async with client_of(kube) as client, following(client, replace(BRISK, cap=60)) as informer:
            await until(lambda: kube.watches == 1)
            await agreed(kube, informer)
        first, second = [one.at for one in kube.requests if one.verb == "watch"]
        assert second - first >= 1.0

    run(life)


def test_a_token_that_ends_is_read_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    async def life() -> None:
        path = tmp_path_factory.mktemp("token") / "token"
        path.write_text("first")
        with FakeKube(tokens=["first"], bookmark_seconds=0.05) as kube:
            async with client_of(kube, TokenFile(path)) as client, following(client) as informer:
                await asyncio.wait_for(informer.synced.wait(), 10)
                fresh = kube.expire_tokens()
                kube.faults.watch("end")
                pod(kube, "one")
                await until(lambda: "401" in informer.trouble)
                path.write_text(fresh)
                await agreed(kube, informer)

    run(life)


class Script:
    """A server that says what it is told: lists, one after the other and the last one again, and the events of watches,
    each watch ended after them. asked: the versions that watches began at."""

    def __init__(self, lists: list[tuple[str, list[Any]]], watches: list[list[tuple[str, Any]]]) -> None:
        self.lists, self.watches = lists, watches
        self.asked: list[str] = []
        self.server = Server(self._answer)

    async def _answer(self, request: Request, exchange: Exchange) -> None:
        if "watch" not in request.query:
            version, items = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
            await exchange.answer(200, {"metadata": {"resourceVersion": version}, "items": items})
            return
        self.asked.append(request.query["resourceVersion"])
        await exchange.begin("application/json")
        if not self.watches:
            await exchange.until_closed()
        for kind, thing in self.watches.pop(0) if self.watches else []:
            await exchange.chunk(json.dumps({"type": kind, "object": thing}).encode() + b"\n")
        await exchange.end()


def version(number: int, name: str = "pod") -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(number)}}


@asynccontextmanager
async def told(script: Script) -> AsyncIterator[Informer]:
    client = KubeClient(Access(f"http://127.0.0.1:{script.server.port}", "corral", Fixed(Credential())), QUICK)
    try:
        async with following(client, replace(BRISK, resync=600, silence=600)) as informer:
            yield informer
    finally:
        await client.close()
        await asyncio.to_thread(script.server.close)


@pytest.mark.parametrize(
    ("events", "view"),
    [
        ([("MODIFIED", version(12)), ("MODIFIED", version(11))], [("pod", "12")]),
        ([("MODIFIED", version(12)), ("MODIFIED", version(9))], [("pod", "12")]),
        ([("MODIFIED", version(9))], [("pod", "10")]),
        ([("DELETED", version(9))], [("pod", "10")]),
        ([("DELETED", version(12)), ("MODIFIED", version(11))], []),
        ([("DELETED", version(12)), ("DELETED", version(12))], []),
        ([("DELETED", version(12)), ("ADDED", version(13)), ("DELETED", version(12))], [("pod", "13")]),
        ([("ADDED", version(13)), ("DELETED", version(12))], [("pod", "13")]),
        ([("ADDED", version(10, "old"))], [("pod", "10")]),
        ([("ADDED", version(11, "new")), ("ADDED", version(11, "new"))], [("new", "11"), ("pod", "10")]),
    ],
)
def test_events_twice_or_late_never_bring_the_view_back(
    events: list[tuple[str, Any]], view: list[tuple[str, str]]
) -> None:
    script = Script([("10", [version(10)])], [events])

    async def life() -> None:
        async with told(script) as informer:
            await until(lambda: len(script.asked) == 2)
            assert in_view(informer) == view

    run(life)
    newest = max(int(thing["metadata"]["resourceVersion"]) for _, thing in events)
    assert script.asked == ["10", str(max(newest, 10))]


def test_a_watch_goes_on_from_the_newest_bookmark() -> None:
    script = Script([("10", [])], [[("BOOKMARK", version(40)), ("BOOKMARK", version(30))], [("ADDED", version(35))]])

    async def life() -> None:
        async with told(script) as informer:
            await until(lambda: len(script.asked) == 3)
            assert in_view(informer) == [("pod", "35")]

    run(life)
    assert script.asked == ["10", "40", "40"]


def test_a_version_that_is_no_number_is_a_trouble_and_not_an_end() -> None:
    script = Script([("x", []), ("10", [version(10)])], [])

    async def life() -> None:
        async with told(script) as informer:
            await until(lambda: informer.trouble)
            assert informer.trouble == "a resource version is 'x', not a number"
            await asyncio.wait_for(informer.synced.wait(), 10)
            assert in_view(informer) == [("pod", "10")]

    run(life)


def test_it_is_closed_at_once_whatever_it_does(kube: FakeKube) -> None:
    async def life() -> None:
        async with client_of(kube) as client:
            for faults in ([], [Fault("hang", verb="list")], [Fault("status", times=None)], [Fault("freeze", "watch")]):
                for fault in faults:
                    kube.faults.add(fault)
                informer = Informer(client, PODS, pace=replace(BRISK, silence=600))
                informer.start()
                informer.start()
                await until(lambda: kube.requests)
                await asyncio.wait_for(informer.close(), 5)
                await informer.close()
                kube.faults.clear()
                kube.requests.clear()

    run(life)


REQUESTS = ("status", "hang", "lost", "cut_answer", "stale", "slow")


def trouble(draw: random.Random) -> Fault:
    effect = draw.choice([*sorted(STREAM), *REQUESTS])
    verb = "watch" if effect in STREAM else "list" if effect in ("stale", "lost", "cut_answer") else "*"
    fault = Fault(effect, verb, "pods", times=draw.randint(1, 3), skip=draw.randint(0, 2), seconds=0.05)
    fault.back = draw.randint(1, 10)
    fault.status = draw.choice([401, 410, 429, 500, 503])
    fault.retry_after = 0 if fault.status == 429 else None
    return fault


def change_something(draw: random.Random, kube: FakeKube) -> None:
    name = f"pod-{draw.randrange(6)}"
    there = kube.find("pods", name)
    act = draw.choice(["add", "status", "label", "delete", "finalise", "forget"])
    if act == "forget":
        if draw.random() < 0.2:
            kube.store.compact()
    elif there is None:
        pod(kube, name, draw.choice(["me", "you"]))
    elif act == "status":
        kube.set_status("pods", name, {"round": draw.random()})
    elif act == "label":
        kube.patch("pods", name, {"metadata": {"labels": {"of": draw.choice(["me", "you"])}}})
    elif act == "finalise":
        kube.patch("pods", name, {"metadata": {"finalizers": None}})
    elif not there["metadata"].get("deletionTimestamp"):
        if draw.random() < 0.3:
            kube.patch("pods", name, {"metadata": {"finalizers": ["test/held"]}})
        kube.delete("pods", name)


async def never_back(informer: Informer, until_done: asyncio.Event) -> None:
    """Watches the view: no object is ever replaced by an older one, nor does one come back that was newer before."""
    newest: dict[str, int] = {}
    while not until_done.is_set():
        await asyncio.wait_for(informer.changed.wait(), 60)
        informer.changed.clear()
        for name, version in in_view(informer):
            assert int(version) >= newest.get(name, 0)
            newest[name] = int(version)


@pytest.mark.parametrize("seed", range(6))
def test_under_every_mix_of_faults_the_view_becomes_what_the_server_has(
    kube: FakeKube, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    draw = random.Random(seed)

    async def life() -> None:
        done = asyncio.Event()
        async with client_of(kube) as client, following(client) as informer:
            watcher = asyncio.create_task(never_back(informer, done))
            for _ in range(60):
                change_something(draw, kube)
                if draw.random() < 0.3:
                    kube.faults.add(trouble(draw))
                await asyncio.sleep(draw.choice([0, 0, 0.005, 0.01, 0.03]))
            kube.faults.clear()
            await agreed(kube, informer)
            done.set()
            informer.changed.set()
            await watcher

    run(life)
