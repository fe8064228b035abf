from __future__ import annotations

from pathlib import Path

from corral.e2e.report import index, write_reports
from corral.e2e.result import Result
from tests.e2e.report.made import EVIL, Page, crashed, passed, read_page
from tests.e2e.report.test_markdown import Rendered


def overview(folder: Path, *results: tuple[str, Result]) -> tuple[Page, str]:
    runs = []
    for name, result in results:
        (folder / name).mkdir()
        write_reports(result, folder / name)
        runs.append((result, folder / name))
    index(runs, folder)
    return read_page(folder / "index.html"), (folder / "summary.md").read_text()


def test_failed_cases_first_each_with_its_report(tmp_path):
    page, summary = overview(tmp_path, ("good", passed(case="a-good")), ("bad", crashed(case="a-bad")))
    page.place(
        "FAILED", "1 of 2 cases failed", "a-bad", "rank 5 on node-1", "corral e2e replay run/result.json", "a-good"
    )
    assert page.text.index("a-bad") < page.text.index("a-good")
    assert page.links == ["bad/report.html", "good/report.html"]
    assert all((tmp_path / link).is_file() for link in page.links)
    shown = Rendered(summary).text
    assert shown.index("❌") < shown.index("a-bad") < shown.index("✅") < shown.index("a-good")


def test_all_passed(tmp_path):
    page, summary = overview(tmp_path, ("one", passed()), ("two", passed()))
    page.place("PASSED", "2 cases passed", "2 of 2")
    assert "❌" not in summary


def test_hostile_text_stays_text(tmp_path):
    page, summary = overview(tmp_path, ("a b#c%", crashed(case=EVIL, reason=EVIL, again=EVIL, failure_class=EVIL)))
    assert page.links == ["a%20b%23c%25/report.html"]
    assert "<script>alert(1)" in Rendered(summary).text
