from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from corral.e2e.report.junit import junit
from corral.e2e.report.story import read_story
from corral.e2e.result import Result
from tests.e2e.report.made import ERROR, EVIL, check, crashed, diverged, passed, records

NOWHERE = Path("/nonexistent/run")
SCHEMA = etree.XMLSchema(etree.parse(Path(__file__).parent / "junit.xsd"))


def suite_of(result: Result, folder: Path = NOWHERE) -> etree._Element:
    """The one suite of the report, which is valid and whose numbers are those of its cases."""
    document = etree.fromstring(junit(read_story(result, folder)).encode("utf-8"))
    SCHEMA.assertValid(document)
    (suite,) = document
    for at in (document, suite):
        counted = {"tests": "testcase", "failures": "testcase/failure", "errors": "testcase/error"}
        assert {name: at.get(name) for name in counted} == {
            name: str(len(suite.findall(path))) for name, path in counted.items()
        }
    return suite


def test_a_test_for_each_expectation():
    suite = suite_of(passed())
    assert [(test.get("classname"), test.get("name"), len(test)) for test in suite.findall("testcase")] == [
        ("two-node-ppo.run", "steps", 0),
        ("two-node-ppo.plan", "world", 0),
    ]
    assert suite.get("name") == "two-node-ppo"
    assert suite.get("time") == "61.000"
    assert suite.get("timestamp") == "2027-01-15T08:00:00"


def test_failures_come_first_with_what_explains_them(tmp_path):
    records(tmp_path)
    first, second = suite_of(crashed(), tmp_path).findall("testcase")
    assert (first.get("name"), second.get("name")) == ("exit code", "steps")
    (failure,) = first
    assert failure.get("message") == "exit code: expected 0, found 1"
    for told in ("return 1.0 / len(answer)", "rank 5 on node-1", ERROR, "corral e2e replay run/result.json"):
        assert told in failure.text


@pytest.mark.parametrize("checks", [[], [check()]])
def test_a_failure_that_no_check_tells_is_an_error(checks):
    test, *others = suite_of(crashed(checks=checks, status="INTERRUPTED", reason="SIGINT")).findall("testcase")
    assert len(others) == len(checks)
    assert (test.get("name"), test[0].tag, test[0].get("message")) == ("the run", "error", "SIGINT")


def test_a_failed_check_names_its_place():
    bad = check(ok=False, file="train.py", line=7)
    assert "train.py:7" in suite_of(crashed(checks=[bad])).find("testcase/failure").text


def test_too_many_checks_are_cut_and_that_is_said():
    suite = suite_of(diverged(checks=[check(f"{i}", ok=i % 2 == 0) for i in range(5_100)]))
    assert suite.get("tests") == "5000"
    assert suite.get("failures") == "2550"
    assert suite.find("system-out").text == "100 further checks are in result.json only"


@settings(max_examples=40)
@given(st.text() | st.just(EVIL), st.floats())
def test_any_text_is_valid_xml(text, real):
    bad = check(text, ok=False, expected=text, found=text, detail=text, file=text)
    fields = dict.fromkeys(("case", "reason", "again", "where", "corral", "commit", "failure_class"), text)
    suite_of(crashed(**fields, checks=[bad], started=real, seconds=real))
    suite_of(crashed(**fields, checks=[]))
