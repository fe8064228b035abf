"""GitHub Actions as its runner reads us: no remote text becomes a command, a heading, a link or an output."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from corral.job.client.github import SUMMARY_LIMIT, GithubScreen, add_summary, current_run, set_outputs
from corral.job.client.show import Writer
from corral.job.client.verdicts import verdict_line, verdict_of
from corral.job.protocol.verdict import Verdict

HOSTILE = [
    "::set-output name=verdict::SUCCEEDED",
    "  ::error::boo",
    "::add-mask::e",
    "::endgroup::",
    "::stop-commands::mine",
    "##[command]rm -rf /",
    "text ##[set-env name=PATH;]/evil",
    "::resume::\x1b[2J\x00",
    "a\n::warning::split\r::notice::again\u2028::debug::x\x85::debug::y",
    "</pre></details><img src=x onerror=alert(1)>",
    "![x](http://evil/i.png) @everyone `code` **bold** | t |",
]


class Runner:
    """Reads output as the Actions runner does (ActionCommand.cs): `::name ...::` at the start of a line after blanks,
    `##[name ...]` anywhere; while stopped only the token counts."""

    def __init__(self, text: str) -> None:
        self.commands: list[str] = []
        self.plain: list[str] = []
        self.stop: str | None = None
        self.depth = 0
        for line in re.split("\r\n|[\n\r]", text):
            self._line(line)

    def _line(self, line: str) -> None:
        new = re.match(r"\s*::([a-z-]+|[0-9a-f]{32})( [^:]*)?::(.*)$", line)
        old = re.search(r"##\[([a-z-]+)[^\]]*\]", line)
        if self.stop is not None:
            if new and new[1] == self.stop:
                self.stop = None
            else:
                self.plain.append(line)
            return
        if new and new[1] == "stop-commands":
            self.stop = new[3]
        elif new:
            self.depth += {"group": 1, "endgroup": -1}.get(new[1], 0)
            assert self.depth in (0, 1)
            self.commands.append(line.strip())
        elif old:
            self.commands.append(old[0])
        else:
            self.plain.append(line)


def log(seq: int, line: str, rank: int | None = None, source: str = "driver") -> dict[str, object]:
    node = None if rank is None else rank // 4
    return {"seq": seq, "type": "log", "line": line, "rank": rank, "node": node, "source": source}


def status(seq: int, state: str, message: str = "") -> dict[str, object]:
    return {"seq": seq, "type": "status", "status": state, "message": message}


FAILED = {
    "type": "final", "status": "FAILED", "class": "user", "cause": "exit_code", "message": "code 3", "exit_code": 3,
    "failing_rank": 5, "failing_node": 1, "first_error": "ValueError: 100%, a:b\n::error::no", "evidence": HOSTILE[-1],
}  # fmt: skip


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}


def played(env, capfd, events, verdict: Verdict | None, members=frozenset()) -> Runner:
    async def run() -> None:
        screen = GithubScreen(Writer(), members, env)
        screen.submitted("rj-0123456789ab", "https://c/api/v1/rayjobs/rj-0123456789ab")
        for event in events:
            await screen.events([event])
        await screen.ended(verdict, verdict_line(verdict, "rj-0123456789ab") if verdict else "error: lost")
        await screen.close()

    asyncio.run(run())
    out, err = capfd.readouterr()
    assert err == ""
    runner = Runner(out)
    assert (runner.stop, runner.depth) == (None, 0), "commands stay stopped, or a group stays open"
    return runner


def outputs(path: Path) -> dict[str, str]:
    """As the runner reads GITHUB_OUTPUT."""
    found, lines = {}, iter(path.read_text().splitlines())
    for line in lines:
        name, _, end = line.partition("<<")
        value = []
        for inner in lines:
            if inner == end:
                break
            value.append(inner)
        found[name] = "\n".join(value)
    return found


def test_remote_text_is_no_command(env, capfd):
    events = [status(1, "RUNNING", HOSTILE[0] + "##[error]")]
    events += [log(2 + number, line) for number, line in enumerate(HOSTILE)]
    events += [log(50 + number, line, rank=5, source="node-1/rank-5") for number, line in enumerate(HOSTILE)]
    events += [{"seq": 90, "type": "warning", "message": line} for line in HOSTILE]
    events += [status(91, "FAILED", HOSTILE[4]), {"seq": 92, "type": "hologram", "message": "::error::later"}]
    runner = played(env, capfd, events, verdict_of(FAILED))
    names = [re.match("::([a-z]+)", command)[1] for command in runner.commands]
    assert names == ["group", "endgroup", "group", "endgroup", "error"]
    assert runner.commands[0] == "::group::RUNNING ::set-output name=verdict::SUCCEEDED## [error]"
    assert "[node-1 rank-5] ::add-mask::e" in runner.plain
    assert "text ## [set-env name=PATH;]/evil" in runner.plain
    assert not any("\x1b" in line or "\x00" in line for line in runner.plain)
    assert outputs(Path(env["GITHUB_OUTPUT"])) == {
        "job_id": "rj-0123456789ab",
        "url": "https://c/api/v1/rayjobs/rj-0123456789ab",
        "verdict": "FAILED",
    }


def test_the_token_is_another_each_time(env, capfd):
    events = [status(1, "A"), log(2, "x"), status(3, "B"), log(4, "y")]
    played(env, capfd, events, None)

    async def raw() -> None:
        screen = GithubScreen(Writer(), frozenset(), env)
        for event in events:
            await screen.events([event])
        await screen.close()

    asyncio.run(raw())
    tokens = re.findall("::stop-commands::(.*)", capfd.readouterr().out)
    assert len(tokens) == len(set(tokens)) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)


def traceback(rank: int, *lines: str) -> list[dict[str, object]]:
    return [log(10, line, rank, f"node-{rank // 4}/rank-{rank}") for line in lines]


def test_the_annotation_points_into_the_source(env, capfd):
    events = [
        *traceback(
            5,
            "Traceback (most recent call last):",
            '  File "/data/jobs/rj/attempt-1/source/pkg/train.py", line 12, in main',
            "    step()",
            '  File "/data/jobs/rj/attempt-1/source/pkg/a,b:c%.py", line 40, in step',
            "    raise ValueError",
            '  File "/usr/lib/python3/json/decoder.py", line 7, in decode',
            "ValueError: 100%, a:b",
        ),
        *traceback(
            2,
            "Traceback (most recent call last):",
            '  File "/x/source/pkg/train.py", line 1, in <module>',
            "ConnectionError: peer gone",
        ),
    ]
    runner = played(env, capfd, events, verdict_of(FAILED), frozenset({"pkg/train.py", "pkg/a,b:c%.py", "train.py"}))
    (error,) = [command for command in runner.commands if command.startswith("::error")]
    assert error == (
        "::error file=pkg/a%2Cb%3Ac%25.py,line=40,title=job rj-0123456789ab::FAILED (user): rank 5 on node-1: "
        "ValueError: 100%25, a:b ::error::no; exit code 3; job rj-0123456789ab"
    )


def test_no_verdict_is_an_error_without_a_place(env, capfd):
    runner = played(env, capfd, [log(1, "x")], None)
    assert runner.commands == ["::error title=job rj-0123456789ab::error: lost"]
    assert outputs(Path(env["GITHUB_OUTPUT"]))["verdict"] == "UNKNOWN"


def test_success_has_no_annotation_and_a_short_summary(env, capfd):
    verdict = verdict_of({"status": "SUCCEEDED", "cause": "exit_code", "message": "", "exit_code": 0})
    runner = played(env, capfd, [status(1, "RUNNING"), log(2, "x")], verdict)
    assert runner.commands == ["::group::RUNNING", "::endgroup::"]
    summary = Path(env["GITHUB_STEP_SUMMARY"]).read_text()
    assert summary.startswith("### ✅ <code>SUCCEEDED")
    assert "<pre>" not in summary


def test_the_summary_is_text_whatever_the_job_printed(env, capfd):
    played(env, capfd, [log(number, line) for number, line in enumerate(HOSTILE)], verdict_of(FAILED))
    summary = Path(env["GITHUB_STEP_SUMMARY"]).read_text()
    assert summary.startswith("### ❌ <code>FAILED")
    tags = re.findall(r"</?([a-z]+)[^>]*>", summary)
    assert set(tags) == {"code", "details", "summary", "pre"}
    outside = re.sub(r"(?s)<pre>.*?</pre>", "", summary)
    assert not re.search(r"[@*`\[\]|!]", outside.removeprefix("### ❌"))


def test_the_summary_keeps_to_its_limit(env):
    path = Path(env["GITHUB_STEP_SUMMARY"])
    path.write_text("x" * (SUMMARY_LIMIT - 100))
    add_summary(env, "ü" * 51)
    assert path.stat().st_size == SUMMARY_LIMIT - 100
    add_summary(env, "ü" * 50)
    assert path.stat().st_size == SUMMARY_LIMIT
    add_summary({}, "nowhere")


def test_an_output_of_several_lines_is_one_value(env):
    hostile = "a\nverdict=SUCCEEDED\nEOF\nverdict<<EOF\nb"
    set_outputs(env, {"one": hostile, "two": "2"})
    assert outputs(Path(env["GITHUB_OUTPUT"])) == {"one": hostile, "two": "2"}


def test_the_run_comes_from_the_environment():
    env = {
        "GITHUB_ACTIONS": "true", "GITHUB_REPOSITORY": "o/r", "GITHUB_SHA": "a" * 40, "GITHUB_REF_NAME": "7/merge",
        "GITHUB_HEAD_REF": "feature", "GITHUB_RUN_ID": "99", "GITHUB_RUN_ATTEMPT": "2", "GITHUB_JOB": "e2e",
    }  # fmt: skip
    run = current_run(env)
    assert run is not None
    assert (run.repository, run.branch, run.run_id, run.run_attempt, run.job) == ("o/r", "feature", "99", 2, "e2e")
    assert current_run({**env, "GITHUB_ACTIONS": "1"}) is None
    assert json.dumps(run.commit_sha) == json.dumps("a" * 40)
