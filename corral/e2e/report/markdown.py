"""report.md: the summary of a step in GitHub Actions. All text of a job stands as code, so that it makes no markup."""

from __future__ import annotations

import html

from corral.e2e.report import text
from corral.e2e.report.parity_rows import phases, worth_showing
from corral.e2e.report.story import Story
from corral.e2e.report.terminal import last_step, parity_line
from corral.e2e.result import Check
from corral.findings import Finding
from corral.job.client.github import as_code

LIMIT = 900 << 10  # bytes; a step takes 1 MiB
MOST_CHECKS, MOST_ROWS, LOG_LINES = 100, 40, 60
_MARKS = {"equal": "✅", "differs": "❌", "first": "❌ first", "absent": "–"}


def markdown(story: Story, most: int = LIMIT) -> str:
    """The whole report in at most so many bytes: sections are left out from the end, and that is said."""
    parts = [_head(story)]
    parts += [_failed(story), _preflight(story.findings), _parity(story)]
    parts += [_log(story), _figures(story), _passed(story)]
    shown, left_out, room = [], 0, most - 200
    for at, part in enumerate(filter(None, parts)):
        room -= len(part.encode("utf-8", "replace")) + 1
        if room < 0 and at:
            left_out += 1
        else:
            shown.append(part)
    if left_out:
        shown.append(f"{text.count(left_out, 'section')} did not fit in here; report.html has everything.\n")
    return "\n".join(shown)


def _head(story: Story) -> str:
    result = story.result
    lines = [f"### {'✅' if story.passed else '❌'} {_code(story.headline, 1000)}", ""]
    if story.facts:
        lines += ["| | |", "|---|---|"]
        lines += [f"| {fact.name} | {_code(fact.value, 1000)} |" for fact in story.facts]
        lines.append("")
    else:
        lines += [f"{_code(result.summary)}", ""]
    failed = len(story.failed)
    where = f"on {_code(result.where)}, {text.seconds(result.seconds)}"
    if result.checks:
        lines.append(f"{len(result.checks) - failed} of {len(result.checks)} expectations hold, {where}.")
    else:
        lines.append(f"No expectation was looked at, {where}.")
    if result.parity is not None:
        lines += ["", f"{_code(parity_line(result.parity), 1000)}"]
    return "\n".join(lines) + "\n"


def _failed(story: Story) -> str:
    failed = story.failed
    if not failed:
        return ""
    lines = ["#### Not as expected", "", *_check_table(failed[:MOST_CHECKS])]
    if len(failed) > MOST_CHECKS:
        lines.append(f"\nand {len(failed) - MOST_CHECKS} more.")
    for check in failed[:10]:
        if check.detail:
            lines.append(_folded(check.name, check.detail))
    return "\n".join(lines) + "\n"


def _check_table(checks: list[Check]) -> list[str]:
    rows = []
    for check in checks:
        cells = " | ".join(map(_code, (check.name, check.expected, check.found)))
        rows.append(f"| {'✅' if check.ok else '❌'} {check.group} | {cells} |")
    return ["| | expectation | expected | found |", "|---|---|---|---|", *rows]


def _preflight(findings: list[Finding]) -> str:
    bad = [finding for finding in findings if not finding.ok]
    if not bad:
        return ""
    lines = ["#### Found before the run", ""]
    lines += [f"- ❌ {_code(finding.line())}" for finding in bad[:MOST_ROWS]]
    if len(bad) > MOST_ROWS:
        lines.append(f"- and {len(bad) - MOST_ROWS} more")
    return "\n".join(lines) + "\n"


def _parity(story: Story) -> str:
    report = story.result.parity
    if report is None:
        return ""
    lines = [
        "#### Parity with the reference run",
        "",
        "| phase | | numbers compared | widest gap |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {_code(phase.phase)} | {_MARKS[phase.state]} | {phase.compared} | {text.number(phase.gap)} |"
        for phase in phases(report)
    ]
    differing = [row for row in worth_showing(report, MOST_ROWS) if not row.ok]
    if differing:
        lines += ["", "| difference | where | reference | found | gap |", "|---|---|---|---|---|"]
        lines += [
            f"| {_code(row.name)} | {_code(row.where())} | {_code(row.reference)} | {_code(row.found)} "
            f"| {text.number(row.gap)} |"
            for row in differing
        ]
    return "\n".join(lines) + "\n"


def _log(story: Story) -> str:
    """The lines up to the first error, or the last ones, of the log to read first."""
    if story.passed:
        return ""
    side = story.failing or story.main
    log = side.failing_log() if side is not None else None
    if log is None:
        return ""
    lines = "\n".join(text.fit(line.text.rstrip(), 500) for line in log.tail(LOG_LINES))
    return _folded(f"{log.source}: {'up to its first error' if log.error else 'last lines'}", lines, opened=True)


def _figures(story: Story) -> str:
    lines = last_step(story)
    return _folded("Last step", "\n".join(lines)) if lines else ""


def _passed(story: Story) -> str:
    passed = [check for check in story.result.checks if check.ok]
    if not passed:
        return ""
    table = "\n".join(_check_table(passed[:MOST_CHECKS]))
    more = f"\n\nand {len(passed) - MOST_CHECKS} more." if len(passed) > MOST_CHECKS else ""
    title = f"Expectations that hold: {len(passed)}"
    return f"<details><summary>{title}</summary>\n\n{table}{more}\n\n</details>\n"


def _folded(title: str, content: str, opened: bool = False) -> str:
    """Lines as they are, behind a title. A pre element ends where its end tag is, whatever blank lines it holds."""
    inside = html.escape(text.fit(content, 40_000))
    tag = "<details open>" if opened else "<details>"
    return f"{tag}<summary>{_code(title)}</summary>\n\n<pre>{inside}</pre>\n</details>\n"


def _code(value: object, most: int = 300) -> str:
    return as_code(text.line(value, most))
