"""The commands in README.md and docs/ are run as they stand, in order, one empty home per document. Each block starts
in the folder that the one before has left, as in one terminal.

A block after `<!-- slow -->` is run by `make test-slow` only; one after `<!-- not run: reason -->` never, and the
reason shows as a skipped test.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from corral.e2e.process import Limit, Signals, run_to_the_end

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^(?:<!-- (?P<mark>slow|not run: .+?) -->\n\s*)?```(?:bash|sh)\n(?P<code>.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)|src=\"(?!https?:)([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    place: str  # file:line
    code: str
    mark: str  # "", "slow" or "not run: reason"


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [
        Block(
            f"{document.name}:{text.count(chr(10), 0, found.start('code'))}",
            found["code"],
            found["mark"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def run_blocks(listed: list[Block], home: Path, seconds: float) -> None:
    """Run each block with a strict shell, the first in a folder which has the examples of the checkout in it."""
    home.mkdir()
    (home / "examples").symlink_to(ROOT / "examples")
    env = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    here, left = home, home.with_name("left")
    for block in listed:
        chunks: list[bytes] = []
        with Signals() as signals:
            ended = run_to_the_end(
                ["bash", "-euo", "pipefail", "-c", f'{block.code}\npwd >"$1"', "bash", str(left)],
                env=env,
                cwd=here,
                output=chunks.append,
                limits=[Limit(seconds, "not done")],
                stop_seconds=20,
                signals=signals,
            )
        shown = f"{block.code}\n{b''.join(chunks).decode(errors='replace')[-4000:]}"
        assert not signals.received
        assert ended.cut is None, f"{block.place} {ended.cut}:\n{shown}"
        assert ended.exit_code == 0, f"{block.place} exits {ended.exit_code}:\n{shown}"
        assert ended.leftovers == (), f"{block.place} leaves processes"
        here = Path(left.read_text().rstrip("\n"))


def with_blocks(*marks: str) -> list[Path]:
    return [document for document in DOCUMENTS if any(block.mark in marks for block in blocks(document))]


@pytest.mark.parametrize("document", with_blocks(""), ids=lambda path: path.name)
def test_commands_run(document, tmp_path):
    run_blocks([block for block in blocks(document) if block.mark == ""], tmp_path / "home", seconds=120)


@pytest.mark.slow
@pytest.mark.parametrize("document", with_blocks("slow"), ids=lambda path: path.name)
def test_slow_commands_run(document, tmp_path):
    run_blocks([block for block in blocks(document) if block.mark in ("", "slow")], tmp_path / "home", seconds=900)


@pytest.mark.parametrize(
    "block",
    [block for document in DOCUMENTS for block in blocks(document) if block.mark.startswith("not run")],
    ids=lambda block: block.place,
)
def test_commands_that_are_not_run(block):
    pytest.skip(block.mark)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    found = [first or second for first, second in _LINK.findall(document.read_text(encoding="utf-8"))]
    assert [link for link in found if not (document.parent / link).exists()] == []


def test_the_readme_gives_commands_to_run():
    assert len([block for block in blocks(DOCUMENTS[0]) if block.mark == ""]) >= 3


def test_a_failing_block_is_seen(tmp_path):
    document = tmp_path / "page.md"
    document.write_text(
        "Text\n\n```bash\ntrue\nfalse\ntrue\n```\n\n<!-- slow -->\n```sh\nsleep 1\n```\n```python\n1\n```\n"
    )
    first, second = blocks(document)
    assert (first.place, first.code, first.mark) == ("page.md:3", "true\nfalse\ntrue\n", "")
    assert (second.code, second.mark) == ("sleep 1\n", "slow")
    with pytest.raises(AssertionError, match=r"page\.md:3 exits 1"):
        run_blocks([first], tmp_path / "home", seconds=30)


def test_a_block_starts_where_the_one_before_it_ended(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("```bash\nmkdir inside && cd inside\n```\n\n```bash\ntouch here\n```\n")
    run_blocks(blocks(document), tmp_path / "home", seconds=30)
    assert (tmp_path / "home/inside/here").exists()
