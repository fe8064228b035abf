from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.e2e.report import write_reports
from corral.e2e.result import ParityReport, Result
from tests.e2e.report.made import (
    ERROR,
    EVIL,
    Page,
    check,
    crashed,
    diverged,
    part,
    passed,
    read_page,
    records,
    row,
    slow_pair,
)


def page_of(result: Result, folder: Path) -> Page:
    write_reports(result, folder)
    return read_page(folder / "report.html")


def test_a_passed_run_shows_what_was_proved(tmp_path):
    records(tmp_path)
    page = page_of(passed(), tmp_path)
    page.place("PASSED", "two-node-ppo", "2 of 2 checks hold", "42 numbers are equal", "rank-5", "QUEUED", "2.50 s")
    assert ERROR in page.text  # what the log says is shown, though nothing failed
    assert "run it again" not in page.text


def test_what_failed_stands_first(tmp_path):
    records(tmp_path)
    page = page_of(crashed(), tmp_path)
    where = page.place(
        "FAILED",
        f"rank 5 on node-1: {ERROR}",
        "the code or the data of the job",
        "3 (2 steps recorded)",
        "update_actor",
        "job/logs/node-1/rank-5.log, line 5",
        "corral e2e replay run/result.json",
        "return 1.0 / len(answer)",
        "expected",
        "seconds by phase".capitalize(),
    )
    assert where == sorted(where)
    sections = [link for link in page.links if link.startswith("#")]
    assert sections[:2] == ["#checks", "#logs"]


def test_the_first_difference_stands_above_the_other_rows(tmp_path):
    records(tmp_path)
    page = page_of(diverged(), tmp_path)
    where = page.place("first difference", "First difference", "a denominator", "differs first")
    assert where == sorted(where)
    assert "divergence/" in page.links


def test_a_slow_pair_is_marked_in_the_matrix_of_pairs(tmp_path):
    page = page_of(slow_pair(), tmp_path)
    assert page.links[0] == "#preflight"
    page.place("rank 0 to rank 2", "pair, MiB/s", "✗ 7", "900", "800", "look at the link")
    html = (tmp_path / "report.html").read_text()
    marked = re.findall(r'<td[^>]*class="s3 bad"[^>]*>([^<]*)</td>', html)
    assert marked == ["✗ 7", "✗ 7"]  # there and back


def test_the_page_needs_nothing_and_allows_nothing(tmp_path):
    records(tmp_path)
    page_of(crashed(), tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy
    assert "default-src 'none'" in policy[1]
    for tag in ("style", "script"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.S)
        assert content
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]
    assert "http://" not in html.replace("http://127.0.0.1:1", "")
    assert "https://" not in html
    assert "url(" not in html
    assert "style=" not in html


BROKEN = ["", "{", "[]", "null", '{"traceEvents": 3}', "[" * 10_000, "\x00\xff"]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_it_stands_whatever_the_records_are(tmp_path, broken):
    records(tmp_path)
    for file in tmp_path.glob("job/**/*"):
        if file.is_file():
            file.write_text(broken)
    page = page_of(crashed(), tmp_path)
    page.place("FAILED", "trace.json is broken or too big")
    shutil.rmtree(tmp_path / "job")
    page_of(crashed(), tmp_path).place("no log was recorded")
    page_of(crashed(job=None, checks=[]), tmp_path).place("before any check was made")


def test_links_and_pipes_in_the_records_are_not_followed(tmp_path):
    records(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("not for the report\n")
    for name in ("driver.log", "metrics.jsonl", "trace.json", "plan.json", "logs/node-1/rank-5.log"):
        (tmp_path / "job" / name).unlink()
        if name == "trace.json":
            os.mkfifo(tmp_path / "job" / name)
        else:
            (tmp_path / "job" / name).symlink_to(secret)
    result = crashed(job=part("FAILED", records="../outside"))
    assert "not for the report" not in page_of(result, tmp_path).text


def test_a_long_log_shows_its_beginning_its_end_and_its_first_error(tmp_path):
    records(tmp_path)
    before = "".join(f"early {i}\n" for i in range(1000))
    after = "".join(f"late {i}\n" for i in range(1000))
    (tmp_path / "job/logs/node-1/rank-5.log").write_text(
        f"{before}Traceback (most recent call last):\n  x\n{ERROR}\n{after}"
    )
    page = page_of(passed(), tmp_path)
    page.place("early 0\n", "early 990\n", "late 10\n", "late 999\n", "862 lines left out", "720 lines left out")
    assert "early 500\n" not in page.text
    assert "late 500\n" not in page.text
    html = (tmp_path / "report.html").read_text()
    assert f'<span class="l e" data-n="1003">{ERROR}\n</span>' in html


def test_what_is_left_out_is_said_and_the_page_stays_small(tmp_path):
    records(tmp_path)
    (tmp_path / "job/driver.log").write_bytes(
        b"x" * 99_999 + b"\n" + (b"a line of the log " * 20 + b"\n") * 25_000 + b"the end\n"
    )
    (tmp_path / "job/metrics.jsonl").write_text('{"step": 1, "m": 1}\n' * 20_500)
    spans = [{"ph": "X", "pid": 0, "tid": i % 90, "name": f"p{i % 30}", "ts": i, "dur": 1 + i} for i in range(20_000)]
    (tmp_path / "job/trace.json").write_text(json.dumps({"traceEvents": spans}))
    checks = [check(f"check {i}", ok=False) for i in range(3_000)]
    rows = [row(ok=False, name=f"w{i}") for i in range(3_000)]
    page = page_of(crashed(checks=checks, parity=ParityReport(rows=rows, first=rows[0])), tmp_path)
    page.place("the end", "2000 further checks", "2600 further rows", "longest phases are drawn", "25 further lanes")
    page.place("only the first 20000 lines of metrics.jsonl", "searched for errors up to 8 MiB", "further characters")
    assert (tmp_path / "report.html").stat().st_size < 12 << 20


def test_differences_that_follow_from_the_first_are_folded(tmp_path):
    rows = [row(ok=False, name=f"differs-{i}.") for i in range(30)]
    page = page_of(crashed(parity=ParityReport(rows=rows, first=rows[0])), tmp_path)
    places = page.place("differs-0.", "differs-11.", "Further differences: 18", "differs-12.", "differs-29.")
    assert places == sorted(places)


@settings(max_examples=25)
@given(st.text(min_size=1) | st.just(EVIL), st.integers(), st.floats())
def test_no_text_of_anybody_becomes_markup(text, number, real):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records(folder, text, text)
        metrics = {"step": number, text: real, "inf": 10**400, "b": 1.7e308}
        (folder / "job/metrics.jsonl").write_text(f"{json.dumps(metrics)}\n{json.dumps(metrics | {'b': -1.7e308})}\n")
        finding = {"check": text, "ok": False, "expected": text, "found": text, "fix": text, "rank": 1, "peer": 2}
        everywhere = row(phase=text, ok=False, name=text, reference=text, found=text, gap=real)
        bad = check(text, ok=False, expected=text, found=text, detail=text, file=text, line=3)
        job = part(
            "FAILED",
            job_id=text,
            command=[text],
            states=[(text, real), (text, 1.0)],
            seconds=real,
            verdict={"status": text, "failing_rank": 5, "first_error": text, "evidence": text},
            preflight=[finding | {"value": real, "unit": text}, {"check": number}],
        )
        fields = dict.fromkeys(("case", "summary", "reason", "failure_class", "where", "corral", "commit"), text)
        parity = ParityReport(rows=[everywhere], first=everywhere, compared={text: 3}, hint=text, dumped=text)
        result = crashed(**fields, again=text, started=real, seconds=real, checks=[bad], job=job, parity=parity)
        page_of(result, folder)
