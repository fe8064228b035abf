"""Reports of a run, made of its result and of the records beside it alone: junit.xml, report.md, report.html."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from corral import atomic
from corral.e2e.result import Result


def write_reports(result: Result, folder: Path) -> None:
    """Write the three into the run's folder, each whole or not at all. Raises InfraError when one cannot be written."""
    from corral.e2e.report.junit import junit
    from corral.e2e.report.markdown import markdown
    from corral.e2e.report.page import page
    from corral.e2e.report.story import read_story

    story = read_story(result, folder)
    atomic.write_text(folder / "junit.xml", '<?xml version="1.0" encoding="utf-8"?>\n' + junit(story) + "\n")
    atomic.write_text(folder / "report.md", markdown(story))
    atomic.write_text(folder / "report.html", page(story))


def index(runs: Sequence[tuple[Result, Path]], folder: Path) -> None:
    """index.html and summary.md over several runs, each a result and the folder of its run. Raises InfraError."""
    from corral.e2e.report.overview import index_page, summary

    atomic.write_text(folder / "index.html", index_page(runs, folder))
    atomic.write_text(folder / "summary.md", summary(runs))
