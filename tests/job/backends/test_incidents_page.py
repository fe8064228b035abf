"""docs/incidents.md names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/incidents.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^\[(\w+)\]: \.\./(\S+)$", PAGE, re.M))
ROWS = re.findall(r"^\| (\d+) \| .* \| ([^|]+) \|$", PAGE, re.M)


def test_every_row_says_how_it_is_tested():
    assert [int(number) for number, _ in ROWS] == [
        1, 2, 3, *range(6, 10), *range(11, 39), 40, 41
    ]  # fmt: skip
    assert all(tested.startswith(("real", "scripted: ", "not tested")) for _, tested in ROWS)
    assert sum(tested.startswith("not tested") for _, tested in ROWS) == 4


def test_the_tests_that_it_names_are_there():
    for number, tested in ROWS:
        label = re.search(r"\[(\w+)\]", tested)
        names = re.findall(r"`(test_\w+)_…`", tested)
        assert (label is None) == (not names), number
        for name in names:
            assert label is not None
            text = (ROOT / FILES[label[1]]).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}_", text, re.M), name
    for path in re.findall(r"`(tests/\S+\.py)`", PAGE):
        assert (ROOT / path).is_file(), path
