"""Raw bytes of a log source without secrets, to be said where anyone may read: as many bytes, the same line ends."""

from __future__ import annotations

from corral.job.agent.lines import LineReader, without_controls
from corral.job.agent.output import OutputFile
from corral.job.core.redact import Redactor

READ = 1 << 17  # bytes at once


class MaskedReader:
    """From byte `at` of a file on. What comes out ends where a line ends, or a piece of one that is too long: never
    inside a secret."""

    def __init__(self, file: OutputFile, at: int, redactor: Redactor) -> None:
        self._file, self._redactor = file, redactor
        self.restart(at)

    def restart(self, at: int) -> None:
        """Go on from there."""
        self.at = at
        self._raw = b""
        self._lines = LineReader(at, self._redactor)

    def read(self, last: bool) -> tuple[int, bytes]:
        """(first byte, bytes) of what follows; nothing when no more lines are complete. last: the file does not grow
        any more, so that its end is the end of a line."""
        data = self._file.read(self.at + len(self._raw), READ)
        self._raw += data
        self._lines.feed(data)
        if last and not self.behind:
            self._lines.flush()
        start, length = self.at, self._lines.end - self.at
        raw, self._raw = self._raw[:length], self._raw[length:]
        self.at += length
        return start, masked(raw, self._redactor)

    @property
    def behind(self) -> bool:
        """Whether the file holds more than was read of it."""
        return self._file.size() > self.at + len(self._raw)


def masked(raw: bytes, redactor: Redactor) -> bytes:
    """Lines with a `*` for each byte of a secret. Of a line that shows one only without its control characters, nothing
    is left."""
    if redactor.mask(raw) == raw and raw.isascii() and b"\x1b" not in raw and raw.translate(None, _CONTROLS) == raw:
        return raw
    return b"\n".join(_masked_line(line, redactor) for line in raw.split(b"\n"))


def _masked_line(line: bytes, redactor: Redactor) -> bytes:
    found = redactor.mask(line)
    shown = without_controls(found.decode("utf-8", "replace"))
    return found if redactor(shown) == shown else b"*" * len(line)


_CONTROLS = bytes([*range(0x09), *range(0x0B, 0x20), 0x7F])
