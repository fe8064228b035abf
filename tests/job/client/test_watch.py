"""The watch loop against real connections that are cut, stall, lie or never come."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence

import pytest

from corral.errors import ConfigError, CorralError, InfraError
from corral.job.client.api import AbsentError, Api, Patience, UnauthorisedError
from corral.job.client.cursor import Cursor, Event
from corral.job.client.endpoint import endpoint
from corral.job.client.watch import Follower, Wanted
from corral.job.protocol.states import Status
from tests.job.client.wire import after, cut, ok, plain, proxy, recorded, serving
from tests.job.service.running import Running, running

JOB = "rj-0123456789ab"
AT_ONCE = Patience(pause=0.0, cap=0.0, reconnect=20.0)


class Watched:
    """What a follower showed and said."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.notes: list[str] = []
        self.verdict: object = None

    async def follow(
        self, url: str, patience: Patience = AT_ONCE, wanted: Wanted | None = None, job: str = JOB
    ) -> Watched:
        async def show(events: list[Event]) -> None:
            self.events += events

        wanted = wanted or Wanted()
        async with Api(endpoint(url, env={}), patience) as api:
            follower = Follower(api, job, Cursor(0, wanted.gapless), wanted, show, self.notes.append)
            self.verdict = await asyncio.wait_for(follower.verdict(), 30)
        return self

    @property
    def seqs(self) -> list[int]:
        return [event["seq"] for event in self.events]


def watched(answer, patience: Patience = AT_ONCE) -> Watched:
    async def run() -> Watched:
        async with serving(answer) as url:
            return await Watched().follow(url, patience)

    return asyncio.run(run())


def scripted(*answers: bytes):
    """One answer after the other; the last one again and again."""
    left = list(answers)
    return lambda path, query: left.pop(0) if len(left) > 1 else left[0]


def replay(events: Sequence[bytes]):
    return lambda path, query: ok(after(events, int(query["after_seq"])))


async def cut_at(events: Sequence[bytes], plans: Iterable[Sequence[int]]) -> None:
    """Watch once per plan through a proxy that cuts the n-th connection at the n-th position of the plan."""
    seqs = list(range(1, len(events) + 1))
    async with serving(replay(events)) as url:
        for plan in plans:
            async with proxy(url, plan) as (way, passed):
                seen = await Watched().follow(way)
            assert seen.seqs == seqs, plan
            assert passed[:-1] == list(plan)[: len(passed) - 1]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service") / "data") as it:
        yield it


def served(service: Running, lines: int) -> tuple[str, list[str], int]:
    """A job that is over: its name, what it printed, the bytes of its stream."""
    job = service.submit()
    service.run(job)
    text = [f"step {number}" for number in range(lines)]
    for rank in range(2):
        service.lines(job, text[rank::2], f"node-0/rank-{rank}", rank)
    service.end(job, Status.SUCCEEDED)
    stream = service.http.get(f"/api/v1/rayjobs/{job}/watch", params={"types": "all"})
    return job, [*text[0::2], *text[1::2]], len(stream.content)


async def cut_service(service: Running, positions: Iterable[int], lines: int) -> None:
    job, text, _ = served(service, lines)
    for position in positions:
        async with proxy(service.url, [position]) as (way, passed):
            seen = await Watched().follow(way, job=job)
        assert [event["line"] for event in seen.events if event["type"] == "log"] == text, position
        assert seen.seqs == list(range(1, len(seen.seqs) + 1))
        assert passed[:-1] in ([], [position])


def test_the_service_over_a_line_that_is_cut(service):
    _, _, size = served(service, 16)
    assert 2800 < size < 4096
    asyncio.run(cut_service(service, range(0, size + 300, 131), 16))


@pytest.mark.slow
def test_the_service_cut_at_every_byte(service):
    _, _, size = served(service, 16)
    asyncio.run(cut_service(service, range(size + 300), 16))


def four_kibibytes() -> list[bytes]:
    events = recorded(25, ranks=2)
    assert 4096 - 200 < len(ok(b"".join(events))) <= 4096
    return events


def test_cut_at_many_bytes_of_a_recorded_stream():
    events = four_kibibytes()
    whole = len(ok(b"".join(events)))
    asyncio.run(cut_at(events, [[position] for position in [*range(0, whole, 61), *range(whole - 12, whole)]]))


@pytest.mark.slow
def test_cut_at_every_byte_of_a_recorded_stream():
    events = four_kibibytes()
    asyncio.run(cut_at(events, [[position] for position in range(len(ok(b"".join(events))))]))


def test_many_cuts_of_a_long_stream():
    events = recorded(1500, ranks=8)
    choose = random.Random(7)
    plans = [[choose.randrange(2, 30_000) for _ in range(choose.randrange(3, 25))] for _ in range(3)]
    asyncio.run(cut_at(events, plans))


@pytest.mark.slow
def test_very_many_cuts_of_a_very_long_stream():
    events = recorded(50_000, ranks=8)
    choose = random.Random(11)
    plans = [[choose.randrange(2, 400_000) for _ in range(40)] for _ in range(5)]
    asyncio.run(cut_at(events, plans))


def test_a_connection_that_is_silent_is_lost():
    async def run() -> Watched:
        events = recorded(50)
        async with serving(replay(events)) as url, proxy(url, [600, 1500], stall=True) as (way, passed):
            seen = await Watched().follow(way, Patience(read=0.3, pause=0.0, cap=0.0))
        assert len(passed) == 3
        return seen

    seen = asyncio.run(run())
    assert seen.seqs == list(range(1, 54))
    assert len(seen.notes) == 2
    assert "ReadTimeout" in seen.notes[0]


def test_a_clean_end_before_final_is_a_cut():
    events = recorded(3)
    seen = watched(scripted(ok(b""), ok(b"".join(events[:3])), ok(after(events, 3))))
    assert (seen.seqs, seen.verdict.status) == ([1, 2, 3, 4, 5, 6], Status.SUCCEEDED)
    assert "the stream ended before the verdict" in seen.notes[0]


def test_a_final_that_is_cut_in_half_is_none():
    events = recorded(1, status="FAILED")
    half = b"".join(events)[:-30]
    seen = watched(scripted(ok(half), cut(half), ok(after(events, 3))))
    assert (seen.seqs, seen.verdict.status) == ([1, 2, 3, 4], Status.FAILED)


@pytest.mark.parametrize(
    "trouble",
    [
        plain("503 Service Unavailable", {"error": "starting"}),
        plain("500 Internal Server Error", {"error": "bug"}),
        plain("429 Too Many Requests", {"error": "slow down"}, "Retry-After: 0\r\n"),
        ok(b"<html>please log in</html>", kind="text/html"),
        ok(b"<html>\n"),
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nContent-Length: 500\r\n\r\n{}",
        b"nonsense\r\n\r\n",
        b"",
    ],
)
def test_trouble_on_the_way_is_tried_again(trouble):
    events = recorded(2)
    seen = watched(scripted(trouble, trouble, cut(b"".join(events[:2])), trouble, ok(after(events, 2))))
    assert (seen.seqs, seen.verdict.status) == ([1, 2, 3, 4, 5], Status.SUCCEEDED)


@pytest.mark.parametrize(
    ("answer", "error", "code", "said"),
    [
        (plain("401 Unauthorized", {"error": "token unknown"}), UnauthorisedError, 77, "token unknown"),
        (plain("403 Forbidden", {"error": "scope read"}), UnauthorisedError, 77, "scope read"),
        (plain("404 Not Found", {"error": "no job\nhere \x1b[31m"}), AbsentError, 78, "no job here"),
        (plain("422 Unprocessable Content", {"error": "after_seq"}), ConfigError, 78, "after_seq"),
        (plain("302 Found", None, "Location: http://elsewhere/\r\n"), ConfigError, 78, "redirects"),
    ],
)
def test_a_refusal_is_final(answer, error, code, said):
    with pytest.raises(error, match=said) as caught:
        watched(scripted(answer))
    assert caught.value.exit_code == code
    assert "\x1b" not in str(caught.value)


def test_events_the_service_itself_has_lost_do_not_hold_the_verdict_up():
    events = recorded(6)
    seen = watched(replay(events[:4] + events[6:]))
    assert seen.seqs == [1, 2, 3, 4, 7, 8, 9]
    assert "the service has no events between 4 and 7" in seen.notes


def test_events_lost_on_one_connection_are_fetched_again():
    events = recorded(6)
    seen = watched(scripted(ok(b"".join(events[:4] + events[6:])), ok(after(events, 4))))
    assert seen.seqs == list(range(1, 10))


def test_nothing_new_for_too_long_is_no_verdict():
    with pytest.raises(InfraError, match=r"verdict not obtainable: .*corral watch .* --after-seq 2") as caught:
        watched(scripted(cut(b"".join(recorded(1)[:2])), b""), Patience(pause=0.01, cap=0.05, reconnect=0.5))
    assert caught.value.exit_code == 75


def test_a_service_that_repeats_old_events_for_ever_is_no_verdict():
    stale = cut(b"".join(recorded(1)[:2]))
    with pytest.raises(InfraError, match="verdict not obtainable"):
        watched(lambda path, query: stale, Patience(pause=0.01, cap=0.05, reconnect=0.5))


def over(events: list[bytes], state: str = "SUCCEEDED") -> dict[str, bytes]:
    """Answers of a service whose watch is out of reach."""
    job = {
        "job_id": JOB, "state": state, "attempt": 1, "owner": "me", "repository": "a/b", "commit_sha": "0" * 7,
        "branch": "", "github_run_id": "1", "github_run_attempt": 1, "name_suffix": "job", "image": "", "command": [],
        "env": [], "secrets": [], "labels": {}, "resources": {}, "timeouts": {}, "priority": 0, "created": 1.0,
        "state_since": 1.0, "last_seq": len(events), "verdict": {"status": "SUCCEEDED", "cause": "", "message": ""},
    }  # fmt: skip
    shown = [json.loads(event) for event in events if json.loads(event)["type"] != "log"]
    listed = {"events": shown, "next_seq": len(events), "done": True}
    return {
        f"GET /api/v1/rayjobs/{JOB}": plain("200 OK", job),
        f"GET /api/v1/rayjobs/{JOB}/events": plain("200 OK", listed),
    }


def test_the_final_event_counts_wherever_it_is_read():
    pages = over(recorded(3))
    seen = watched(lambda path, query: pages.get(path, b""), Patience(pause=0.01, cap=0.05, reconnect=0.3))
    assert seen.verdict.status is Status.SUCCEEDED
    assert any("are not shown: corral logs" in note for note in seen.notes)


@pytest.mark.parametrize("events", [recorded(3)[:-1], []])
def test_a_state_without_its_final_event_is_no_verdict(events):
    pages = over(events)
    with pytest.raises(InfraError, match="verdict not obtainable"):
        watched(lambda path, query: pages.get(path, b""), Patience(pause=0.01, cap=0.05, reconnect=0.3))


@pytest.mark.parametrize("status", ["GREAT", "succeeded", ""])
def test_an_unknown_verdict_is_none(status):
    with pytest.raises(InfraError, match="verdict not obtainable"):
        watched(replay(recorded(0, status=status)))


def test_filters_are_asked_for_and_jumps_are_then_no_loss():
    asked = []

    def answer(path: str, query: dict[str, str]) -> bytes:
        asked.append(query)
        events = recorded(8, ranks=1)
        return (
            cut(b"".join(events[:3]))
            if len(asked) == 1
            else ok(after(events[:4] + events[6:], int(query["after_seq"])))
        )

    async def run() -> Watched:
        async with serving(answer) as url:
            return await Watched().follow(url, wanted=Wanted(frozenset({"log"}), (0, 3)))

    seen = asyncio.run(run())
    assert seen.seqs == [1, 2, 3, 4, 7, 8, 9, 10, 11]
    expected = {"format": "ndjson", "types": "final,log,status", "ranks": "0,3"}
    assert asked == [expected | {"after_seq": "0"}, expected | {"after_seq": "3"}]


def test_pauses_grow_to_the_cap_with_jitter():
    pauses = Patience(pause=0.1, cap=5.0).pauses()
    drawn = [next(pauses) for _ in range(12)]
    for number, pause in enumerate(drawn):
        top = min(5.0, 0.1 * 2**number)
        assert top / 2 <= pause <= top
    assert drawn[-3:] != sorted({5.0})


def test_an_unreachable_service_is_69_soon():
    async def run() -> None:
        async with Api(endpoint("http://127.0.0.1:9", env={}), Patience(first=0.2, pause=0.05)) as api:
            await api.job(JOB)

    start = time.monotonic()
    with pytest.raises(CorralError, match="no answer from the service") as caught:
        asyncio.run(run())
    assert caught.value.exit_code == 69
    assert time.monotonic() - start < 5
