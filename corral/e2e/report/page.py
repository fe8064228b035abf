"""report.html: one file that needs nothing else, and no script to be read. What failed stands first."""

from __future__ import annotations

from corral.e2e.report import facts, text
from corral.e2e.report.comparison import comparison
from corral.e2e.report.curves import curves
from corral.e2e.report.html import Bad, Child, Element, document, el, folded, pairs, table
from corral.e2e.report.log_view import Budget, excerpt, logs
from corral.e2e.report.preflight import preflight
from corral.e2e.report.records import read_json
from corral.e2e.report.story import Story
from corral.e2e.report.timeline import timeline
from corral.e2e.result import Check

MOST_CHECKS, MOST_NAMED = 1_000, 10


def page(story: Story) -> str:
    sections = _sections(story)
    navigation = el("nav", (el("a", title, href=f"#{name}") for name, title, _ in sections), aria_label="Sections")
    body: list[Child] = [
        _head(story),
        navigation,
        *(el("section", el("h2", title), content, id=name) for name, title, content in sections),
        el("footer", f"Corral {text.line(story.result.corral, 80)}. All of it is in result.json and the records too."),
    ]
    return document(f"{story.result.status} {text.line(story.result.case)}", [el("main", body)])


def _sections(story: Story) -> list[tuple[str, str, list[Child]]]:
    """(anchor, title, content), what explains a failure before what describes the run."""
    main, reference, findings = story.main, story.reference, story.findings
    checks = ("checks", "Checks", _checks(story))
    found = [("preflight", "Before the run", preflight(findings))] if findings else []
    parity = [("parity", "Parity", comparison(story.result.parity))] if story.result.parity is not None else []
    bad_start = any(not finding.ok for finding in findings)
    sections = [*found, checks, *parity] if bad_start else [checks, *parity]
    log = _log_section(story)
    log_first = story.failing is not None and not story.passed
    sections += [log] if log_first else []
    if main is not None:
        sections.append(("timeline", "Timeline", timeline(main.trace)))
        sections.append(("metrics", "Metrics", curves(main.steps, reference.steps if reference is not None else None)))
    sections += [] if bad_start else found
    planned = story.folder / main.folder / "plan.json" if main is not None else None
    if planned is not None and planned.exists():
        sections.append(("plan", "Plan", facts.plan(read_json(planned))))
    jobs = facts.job("Job", main) if main is not None else []
    jobs += facts.job("Reference job", reference) if reference is not None else []
    if jobs:
        sections.append(("jobs", "Jobs", jobs))
    sections += [log] if main is not None and not log_first else []
    return [(name, title, content) for name, title, content in sections if content]


def _head(story: Story) -> Element:
    result = story.result
    started = text.moment(result.started).strftime("%Y-%m-%d %H:%M UTC")
    chips = [started, text.seconds(result.seconds), f"on {text.line(result.where, 120)}"]
    chips += [f"commit {text.line(result.commit[:12])}"] if result.commit else []
    if result.checks:
        failed = len(story.failed)
        held = f"{len(result.checks) - failed} of {len(result.checks)} checks hold"
        chips.append(held)
    lines: list[Child] = [
        el("p", el("span", result.status, class_="badge"), class_="verdict"),
        el("h1", text.line(result.case)),
        el("p", text.line(result.summary, 1000), class_="summary"),
        el("ul", (el("li", chip) for chip in chips), class_="chips"),
    ]
    if story.facts:
        facts_shown = ((fact.name, el("code", fact.value) if fact.code else fact.value) for fact in story.facts)
        lines.append(pairs(facts_shown, "facts"))
        side = story.failing or story.main
        lines.append(excerpt(side) if side is not None else None)
    return el("header", lines, class_="passed" if story.passed else "failed")


def _checks(story: Story) -> list[Child]:
    checks = story.result.checks
    if not checks:
        return [el("p", "the run ended before any check was made", class_="note")]
    failed, passed = story.failed, [check for check in checks if check.ok]
    parts: list[Child] = [_check_table(failed[:MOST_CHECKS])] if failed else []
    for group in dict.fromkeys(check.group for check in passed):
        parts.append(_group(group, [check for check in passed[:MOST_CHECKS] if check.group == group]))
    left_out = max(0, len(failed) - MOST_CHECKS) + max(0, len(passed) - MOST_CHECKS)
    if left_out:
        parts.append(el("p", f"{left_out} further checks are in result.json only", class_="note"))
    return parts


def _group(group: str, checks: list[Check]) -> Element:
    """Those of a group that hold, behind one line that names them."""
    named = checks[:MOST_NAMED]
    names = ", ".join(text.line(check.name, 80) for check in named)
    said = el("span", names if named == checks else f"{names} and {len(checks) - len(named)} more", class_="quiet")
    mark = el("span", "✓", class_="mark", title="as expected")
    return folded([mark, " ", el("b", group), f" {len(checks)} ", said], _check_table(checks))


def _check_table(checks: list[Check]) -> Element:
    return table(["", "group", "check", "expected", "found"], (_check(check) for check in checks), "checks")


def _check(check: Check) -> list[Child]:
    found: list[Child] = [text.line(check.found)]
    if check.file:
        place = f"{check.file}:{check.line}" if check.line else check.file
        found.append(el("div", el("code", text.line(place)), class_="note"))
    if check.detail:
        found.append(folded("detail", el("pre", text.fit(check.detail, 20_000))))
    mark = el("span", "✓" if check.ok else "✗", class_="mark", title="as expected" if check.ok else "not as expected")
    cells: list[Child] = [mark, check.group, text.line(check.name), text.line(check.expected), el("div", found)]
    return cells if check.ok else Bad(cells)


def _log_section(story: Story) -> tuple[str, str, list[Child]]:
    budget = Budget()
    search = el(
        "p",
        el("label", "Only lines with ", el("input", type="search", id="filter", autocomplete="off")),
        el("span", id="filtered", class_="quiet"),
        class_="filter",
        hidden="",
    )
    content: list[Child] = [search]
    sides = [side for side in (story.main, story.reference) if side is not None]
    for side in sorted(sides, key=lambda side: side is not story.failing):
        name = "reference" if side is story.reference else "job"
        if len(sides) > 1:
            content.append(el("h3", "Reference job" if side is story.reference else "Job"))
        content += logs(side, name, budget)
    if not any(side.logs for side in sides):
        content = [el("p", "no log was recorded", class_="note")]
    return "logs", "Logs", content
