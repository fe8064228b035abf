"""GitHub Actions: who we are from the environment, output in groups, a summary, outputs and one annotation.

The runner obeys lines of the form `::command::` and `##[command]`, whoever wrote them. So remote text is only printed
while commands are stopped under a random token that the job cannot know.
"""

from __future__ import annotations

import html
import os
import secrets
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from corral.job.client.cursor import Event
from corral.job.client.show import OUT, Piece, Writer, happening, log_line
from corral.job.client.text import one_line
from corral.job.client.traceback import Tracebacks
from corral.job.protocol.states import Status
from corral.job.protocol.verdict import Verdict

LEASE = 600.0  # seconds: a runner that dies says nothing
SUMMARY_LIMIT = 1 << 20  # bytes, of one step
_TAIL = 60  # log lines in the summary


@dataclass(frozen=True)
class Run:
    """The workflow run we are part of."""

    repository: str
    commit_sha: str
    branch: str
    run_id: str
    run_attempt: int
    job: str


def current_run(env: Mapping[str, str] = os.environ) -> Run | None:
    """None outside GitHub Actions."""
    if env.get("GITHUB_ACTIONS") != "true":
        return None
    attempt = env.get("GITHUB_RUN_ATTEMPT", "1")
    return Run(
        env.get("GITHUB_REPOSITORY", ""),
        env.get("GITHUB_SHA", ""),
        env.get("GITHUB_HEAD_REF") or env.get("GITHUB_REF_NAME", ""),
        env.get("GITHUB_RUN_ID", ""),
        int(attempt) if attempt.isdecimal() else 1,
        env.get("GITHUB_JOB", ""),
    )


class GithubScreen:
    """All on stdout: the runner reads both streams, but not in the order they were written.

    members: files of the source, for the annotation.
    """

    def __init__(self, writer: Writer, members: Set[str], env: Mapping[str, str] = os.environ) -> None:
        self._writer = writer
        self._env = env
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._tracebacks = Tracebacks(members)
        self._token: str | None = None
        self._group = False
        self._job_id = self._url = ""

    async def events(self, events: list[Event]) -> None:
        text = "".join(self._shown(event) for event in events)
        if text:
            await self._writer.write([(OUT, text)])

    def note(self, line: str) -> None:
        self._writer.write_soon([self._remote(f"-- {line}")])

    async def print(self, line: str) -> None:
        await self._writer.write([self._remote(line)])

    def submitted(self, job_id: str, url: str) -> None:
        self._job_id, self._url = job_id, url
        self.note(f"job {job_id} at {url}")
        set_outputs(self._env, {"job_id": job_id, "url": url})

    async def ended(self, verdict: Verdict | None, line: str) -> None:
        text = self._close_group()
        if verdict is None or verdict.status is not Status.SUCCEEDED:
            text += self._annotation(verdict, line)
        text += self._remote(line)[1]
        await self._writer.write([(OUT, text)])
        set_outputs(self._env, {"verdict": str(verdict.status) if verdict else "UNKNOWN"})
        add_summary(self._env, self._summary(verdict, line))

    async def close(self) -> None:
        """Let the runner obey again, and end the open group."""
        await self._writer.write([(OUT, self._close_group())])

    def _shown(self, event: Event) -> str:
        if event["type"] == "log":
            self._tracebacks.feed(event)
            line = log_line(event)
            self._tail.append(line[:500])
            return self._remote(line)[1]
        text = happening(event)
        if text is None:
            return ""
        if event["type"] != "status":
            return self._remote(f"-- {text}")[1]
        closed = self._close_group()
        self._group = True
        return f"{closed}::group::{_data(text)}\n"

    def _remote(self, line: str) -> Piece:
        """A line that may hold anything. `##[` is cut in two, for the viewer of stored logs reads it too."""
        text = line.replace("##[", "## [") + "\n"
        if self._token is None:
            self._token = secrets.token_hex(16)
            text = f"::stop-commands::{self._token}\n{text}"
        return OUT, text

    def _resume(self) -> str:
        token, self._token = self._token, None
        return f"::{token}::\n" if token else ""

    def _close_group(self) -> str:
        open_, self._group = self._group, False
        return self._resume() + ("::endgroup::\n" if open_ else "")

    def _annotation(self, verdict: Verdict | None, line: str) -> str:
        place = self._tracebacks.place(verdict.failing_rank) if verdict else None
        return error_command(line, f"job {self._job_id}", place.file if place else None, place.line if place else None)

    def _summary(self, verdict: Verdict | None, line: str) -> str:
        good = verdict is not None and verdict.status is Status.SUCCEEDED
        rows = [f"### {'✅' if good else '❌'} {as_code(line)}", "", f"Job {as_code(self._url)}"]
        if verdict is not None and verdict.evidence:
            rows += ["", f"Evidence: {as_code(verdict.evidence)}"]
        if self._tail and not good:
            last = html.escape("\n".join(self._tail))
            rows += ["", f"<details><summary>Last lines</summary>\n\n<pre>{last}</pre>\n</details>"]
        return "\n".join(rows) + "\n"


def set_outputs(env: Mapping[str, str], values: Mapping[str, str]) -> None:
    """Outputs of the step, whatever line breaks they hold."""
    path = env.get("GITHUB_OUTPUT")
    if not path:
        return
    lines = []
    for name, value in values.items():
        end = f"end-{secrets.token_hex(16)}"
        lines.append(f"{name}<<{end}\n{value}\n{end}\n")
    _append(Path(path), "".join(lines))


def summary_room(env: Mapping[str, str]) -> int:
    """Bytes that the summary of the step can still take; 0 where there is none."""
    path = env.get("GITHUB_STEP_SUMMARY")
    if not path:
        return 0
    return max(0, SUMMARY_LIMIT - (os.path.getsize(path) if os.path.exists(path) else 0))


def add_summary(env: Mapping[str, str], markdown: str) -> None:
    """Append to the summary of the step, unless it does not fit."""
    path = env.get("GITHUB_STEP_SUMMARY")
    if path and len(markdown.encode("utf-8", "replace")) <= summary_room(env):
        _append(Path(path), markdown)


def error_command(message: str, title: str, file: str | None = None, line: int | None = None) -> str:
    """The line that makes the runner show an error, at a place of the repository when there is one."""
    where = "" if file is None else f"file={_property(file)},"
    where += "" if file is None or line is None else f"line={line},"
    return f"::error {where}title={_property(title)}::{_data(message)}\n"


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def _data(text: str) -> str:
    return text.replace("##[", "## [").replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_code(text: str) -> str:
    """Text that is only text: punctuation as character references, so that a job makes no link, image or mention."""
    escaped = (f"&#{ord(c)};" if c.isascii() and not c.isalnum() and c != " " else c for c in one_line(text))
    return f"<code>{''.join(escaped)}</code>"
