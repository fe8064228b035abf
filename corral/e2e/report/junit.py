"""junit.xml: a test for each expectation, as every CI reads it."""

from __future__ import annotations

from xml.etree import ElementTree

from corral.e2e.report import text
from corral.e2e.report.story import Story
from corral.e2e.result import Check

MOST_TESTS = 5_000
_LONGEST = 20_000  # characters of a failure


def junit(story: Story) -> str:
    """The document. Groups of checks are class names; a run that came to no check, or failed beside them, is a test of
    its own that has an error; failures come first."""
    result = story.result
    checks = sorted(result.checks, key=lambda check: check.ok)
    shown = checks[:MOST_TESTS]
    tests = [_test(story, check) for check in shown]
    errors = 0
    if not story.passed and not story.failed:
        tests.insert(0, _error(story))
        errors = 1
    failures = sum(not check.ok for check in shown)
    numbers = {"tests": str(len(tests)), "failures": str(failures), "errors": str(errors)}
    suites = ElementTree.Element("testsuites", numbers | {"name": "corral e2e"})
    suite = ElementTree.SubElement(
        suites,
        "testsuite",
        numbers
        | {
            "name": text.line(result.case),
            "skipped": "0",
            "time": f"{_seconds(result.seconds):.3f}",
            "timestamp": text.moment(result.started).strftime("%Y-%m-%dT%H:%M:%S"),
        },
    )
    suite.append(_properties(story))
    suite.extend(tests)
    if len(checks) > len(shown):
        left_out = ElementTree.SubElement(suite, "system-out")
        left_out.text = f"{len(checks) - len(shown)} further checks are in result.json only"
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=False)


def _seconds(value: float) -> float:
    """Not negative, no minus zero either."""
    return min(value, 1e9) if value > 0 else 0.0


def _properties(story: Story) -> ElementTree.Element:
    result = story.result
    properties = ElementTree.Element("properties")
    values = {
        "status": result.status,
        "where": result.where,
        "corral": result.corral,
        "commit": result.commit,
        "again": result.again,
    }
    for name, value in values.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": text.line(value, 2000)})
    return properties


def _test(story: Story, check: Check) -> ElementTree.Element:
    name = f"{text.line(story.result.case)}.{check.group}"
    test = ElementTree.Element("testcase", {"classname": name, "name": text.line(check.name), "time": "0.000"})
    if not check.ok:
        place = f"\n{check.file}:{check.line or 1}" if check.file else ""
        told = f"{check}{place}\n{check.detail}\n{_facts(story)}"
        failure = ElementTree.SubElement(test, "failure", {"type": check.group, "message": text.line(check)})
        failure.text = text.fit(told, _LONGEST)
    return test


def _error(story: Story) -> ElementTree.Element:
    result = story.result
    test = ElementTree.Element(
        "testcase", {"classname": f"{text.line(result.case)}.run", "name": "the run", "time": "0.000"}
    )
    error = ElementTree.SubElement(test, "error", {"type": result.status, "message": text.line(result.reason, 2000)})
    error.text = text.fit(_facts(story), _LONGEST)
    return test


def _facts(story: Story) -> str:
    return "\n".join(f"{fact.name}: {fact.value}" for fact in story.facts)
