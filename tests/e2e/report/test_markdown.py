from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from corral.e2e.report.markdown import LIMIT, markdown
from corral.e2e.report.story import read_story
from corral.e2e.result import ParityReport, Result
from tests.e2e.report.made import ERROR, EVIL, check, crashed, diverged, passed, records, row, slow_pair

NOWHERE = Path("/nonexistent/run")
OURS = ["h3", "h4", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "details", "summary", "pre", "ul", "li"]


class Rendered(HTMLParser):
    """Fails for an element that a summary never has, for an attribute, and for tags that are not nested."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text = ""
        self._open: list[str] = []
        self.feed(MarkdownIt("commonmark").enable("table").render(source))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in OURS, tag
        assert tag == "details" or not attrs, attrs
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def place(self, *texts: str) -> list[int]:
        for text in texts:
            assert text in self.text, text
        return [self.text.index(text) for text in texts]


def text_of(result: Result, folder: Path = NOWHERE, most: int = LIMIT) -> Rendered:
    source = markdown(read_story(result, folder), most)
    assert len(source.encode()) <= most
    return Rendered(source)


def test_a_passed_run(tmp_path):
    records(tmp_path)
    shown = text_of(passed(), tmp_path)
    shown.place("✅", "PASSED two-node-ppo", "2 of 2 expectations hold", "42 numbers are equal", "policy loss", "world")
    assert "❌" not in shown.text


def test_what_failed_stands_first(tmp_path):
    records(tmp_path)
    shown = text_of(crashed(), tmp_path)
    where = shown.place(
        "❌",
        "FAILED two-node-ppo",
        "the code or the data",
        "3 (2 steps recorded)",
        "update_actor",
        "corral e2e replay run/result.json",
        "Not as expected",
        "node-1/rank-5: up to its first error",
        "Last step",
        "Expectations that hold: 1",
    )
    assert where == sorted(where)
    assert ERROR in shown.text


def test_the_first_difference():
    text_of(diverged()).place("first difference in gradients (step 2, rank 5)", "a denominator", "❌ first", "0.5")


def test_what_was_found_before_the_run():
    text_of(slow_pair()).place("Found before the run", "rank 0 to rank 2: expected at least 100 MiB/s, found 7.0 MiB/s")


def test_it_keeps_its_limit_and_says_what_is_left_out(tmp_path):
    records(tmp_path, text="a long line " * 1000 + "\n" * 3 + "x\n" * 10_000)
    checks = [check(f"check {i}" + "|`*_" * 100, ok=i % 2 == 0, detail="y" * 30_000) for i in range(500)]
    rows = [row(ok=False, name=f"w{i}" * 300) for i in range(500)]
    result = crashed(checks=checks, parity=ParityReport(rows=rows, first=rows[0]), reason="|" * 10_000)
    text_of(result, tmp_path).place("and 150 more")
    small = text_of(result, tmp_path, 20_000)
    small.place("❌", "did not fit in here; report.html has everything")


HOSTILE = [EVIL, "<!--", "<![CDATA[", "```", "\n\n</pre>\n\n# x", "    code", "|||", "&lt;b&gt;"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text(tmp_path, text):
    everything_says(text, tmp_path)


@settings(max_examples=40)
@given(st.text())
def test_any_text_stays_text(text):
    everything_says(text, None)


def everything_says(text: str, folder: Path | None) -> None:
    if folder is not None:
        records(folder, text, f"{text}\n\n{text}")
    bad = check(text, ok=False, expected=text, found=text, detail=f"{text}\n\n{text}", file=text, line=1)
    parity_row = row(phase=text, ok=False, name=text, reference=text, found=text)
    fields = dict.fromkeys(("case", "summary", "reason", "again", "where", "failure_class"), text)
    parity = ParityReport(rows=[parity_row], first=parity_row, compared={text: 2}, hint=text)
    text_of(crashed(**fields, checks=[bad], parity=parity), folder or NOWHERE)
