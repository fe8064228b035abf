"""Reading the log files of ranks: where they lie, their last lines, their new bytes, and cutting bytes into lines."""

from __future__ import annotations

from pathlib import Path

CHUNK = 1 << 20  # bytes of one file taken by one poll
LONGEST_LINE = 1 << 16  # bytes without a line end that are handed on as a line, so that memory stays bounded


def rank_log(run_dir: Path, node: int, rank: int) -> Path:
    return run_dir / "logs" / f"node-{node}" / f"rank-{rank}.log"


def node_log(run_dir: Path, node: int) -> Path:
    """Output of the process that imports the modules and forks the ranks of a node."""
    return run_dir / "logs" / f"node-{node}" / "node.log"


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def last_lines(path: Path, count: int = 5) -> str:
    """The last non-empty lines, joined by " / " so that they fit into a one-line message. "(empty)" when none.

    Of a crash that Python reported, the lines from there on: its stack has the innermost call first.
    """
    if not path.exists():
        return "(no such file here)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = file.read().decode("utf-8", "replace").splitlines()
    said = [line.strip()[:400] for line in lines if line.strip()]
    crashes = [index for index, line in enumerate(said) if line.startswith("Fatal Python error")]
    kept = said[crashes[-1] :][: count + 1] if crashes else said[-count:]
    return " / ".join(kept) or "(empty)"


def read_new(run_dir: Path, node: int, offsets: dict[int, int]) -> dict[int, bytes]:
    """Bytes of each rank's log from its offset on, at most CHUNK each; ranks with nothing new are left out."""
    new: dict[int, bytes] = {}
    for rank, offset in offsets.items():
        path = rank_log(run_dir, node, rank)
        if size(path) > offset:
            with path.open("rb") as file:
                file.seek(offset)
                new[rank] = file.read(CHUNK)
    return new


class LineCutter:
    """Turns chunks of bytes into complete lines. Invalid UTF-8 is replaced, never dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > LONGEST_LINE:
            lines.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        return [_text(line) for line in lines]

    def flush(self) -> list[str]:
        """The last line, if the file does not end with a line end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")
