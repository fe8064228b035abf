"""Reports of a run, made of its result and of the records beside it alone: junit.xml, report.md, report.html."""

from __future__ import annotations

from pathlib import Path

from corral import atomic
from corral.e2e.result import Result


def write_reports(result: Result, folder: Path) -> None:
    """Write the three into the run's folder, each whole or not at all. Raises InfraError when one cannot be written."""
    from corral.e2e.report.junit import junit
    from corral.e2e.report.markdown import markdown
    from corral.e2e.report.page import page
    from corral.e2e.report.records import read_findings
    from corral.e2e.report.story import read_story

    story = read_story(result, folder)
    records = folder / (story.main.folder if story.main is not None else "job")
    findings = read_findings(records, result.job)
    atomic.write_text(folder / "junit.xml", '<?xml version="1.0" encoding="utf-8"?>\n' + junit(story) + "\n")
    atomic.write_text(folder / "report.md", markdown(story, findings))
    atomic.write_text(folder / "report.html", page(story, findings))
