"""Files of other nodes, as far as they are known here, under `run/` of the head. Pure file work: it knows no Ray."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from corral.job.agent.mirror_node import Known, Piece
from corral.job.protocol.names import relative_path_problem


class Copy:
    """Of the files of one node. owners: path → node whose file is here, for all nodes; what the head has itself, or
    another node was first with, stays."""

    def __init__(self, node: str, run: Path, owners: dict[str, str]) -> None:
        self._node, self._run, self._owners = node, run, owners
        self.known: dict[str, Known] = {}

    def take(self, piece: Piece) -> None:
        """Raises OSError when it cannot be written; it is told again then."""
        target = self._run / piece.path
        if relative_path_problem(piece.path) is not None:
            return
        if piece.path not in self._owners and not os.path.lexists(target):
            self._owners[piece.path] = self._node
        if self._owners.get(piece.path) == self._node:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._replace(target, piece) if piece.whole else self._append(target, piece)
        self.known[piece.path] = piece.known

    def _append(self, target: Path, piece: Piece) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(target, flags, 0o600), "wb", buffering=0) as file:
            if piece.start == 0 and piece.path in self.known:
                file.truncate(0)  # another file has taken its place
            file.seek(piece.start)
            content = memoryview(piece.content)
            while content:
                content = content[file.write(content) :]

    def _replace(self, target: Path, piece: Piece) -> None:
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_bytes(piece.content)
            temporary.replace(target)
        finally:
            with suppress(OSError):
                temporary.unlink()
