"""Raw output of a job, as bytes of a file, into lines that are safe to store and to show. Pure: no I/O.

The agent reads the files while the job runs, the service what is left after an agent was lost. The same lines come out
for the same bytes, whatever the sizes of the chunks they were fed in, also when a reader starts at `end` of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate

LONGEST = 1 << 16  # bytes of a line that are handed on as one; more becomes further lines with offsets of their own
OVERLAP = 1 << 12  # bytes beyond a cut that are looked at, so that no secret up to this length is cut in two

Redactor = Callable[[str], str]

_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n"
_CONTROLS = dict.fromkeys([*range(0x09), *range(0x0A, 0x20), *range(0x7F, 0xA0)])
_ANSI = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC and other strings: titles, links
    r"|\x1b[ -/]*[0-Z\\^-~]"  # the short ones; without [ and ], so that of half a sequence only the ESC goes
)
_HALF_ANSI = re.compile(rb"\x1b[^@-Z\\-~]{0,62}\Z|\x1b\[[0-?]{0,60}[ -/]{0,2}\Z")


class LineReader:
    """Cuts bytes into lines from byte `start` of a file on; `end`: the byte up to which lines have come out.

    A line ends at \\n and is at most LONGEST bytes long: a longer one comes out in pieces, never cut inside a UTF-8
    character, an ANSI sequence or a secret. Of a line that was overwritten with \\r (progress bars) the last state that
    shows anything is kept. ANSI sequences and control characters except tab are removed, invalid UTF-8 is replaced by
    U+FFFD, and `redactor` sees each cleaned line on its own: a secret of several lines has to be given to it line by
    line.
    """

    def __init__(self, start: int, redactor: Redactor | None = None) -> None:
        self.end = start
        self._redactor = redactor
        self._rest = b""

    def feed(self, data: bytes) -> tuple[list[str], list[int]]:
        """The lines that are complete now, and the byte of the file at which each starts."""
        data = self._rest + data
        complete = data.rfind(b"\n") + 1
        block, self._rest = data[:complete], data[complete:]
        lines, offsets = self._plain(block) or self._careful(block)
        while len(self._rest) > LONGEST + OVERLAP:
            self._take(self._rest, lines, offsets)
            self._rest = self._rest[self.end - offsets[-1] :]
        return lines, offsets

    def flush(self) -> tuple[list[str], list[int]]:
        """The last line of a file that does not end with \\n; nothing when there is none."""
        lines: list[str] = []
        offsets: list[int] = []
        while self._rest:
            self._take(self._rest, lines, offsets)
            self._rest = self._rest[self.end - offsets[-1] :]
        return lines, offsets

    def _plain(self, block: bytes) -> tuple[list[str], list[int]] | None:
        """The fast path: printable ASCII without a secret and without a long line, which is nearly everything."""
        if block.translate(None, _PLAIN):
            return None
        text = block.decode("ascii")
        if self._redactor is not None and self._redactor(text) != text:
            return None
        lines = text.split("\n")
        lines.pop()
        lengths = [len(line) + 1 for line in lines]
        if lengths and max(lengths) > LONGEST:
            return None
        offsets = list(accumulate(lengths, initial=self.end))
        self.end = offsets.pop()
        return lines, offsets

    def _careful(self, block: bytes) -> tuple[list[str], list[int]]:
        lines: list[str] = []
        offsets: list[int] = []
        for line in block.split(b"\n")[:-1]:
            while len(line) > LONGEST:
                self._take(line, lines, offsets)
                line = line[self.end - offsets[-1] :]
            offsets.append(self.end)
            lines.append(self._shown(line))
            self.end += len(line) + 1
        return lines, offsets

    def _take(self, line: bytes, lines: list[str], offsets: list[int]) -> None:
        """Append the first piece of a line that is not cut yet, without its line end."""
        length = len(line) if len(line) <= LONGEST else self._cut(line)
        offsets.append(self.end)
        lines.append(self._shown(line[:length]))
        self.end += length

    def _cut(self, line: bytes) -> int:
        """Length of the first piece of a line longer than LONGEST. Looks at LONGEST + OVERLAP bytes at most."""
        length = line.rfind(b"\r", 0, LONGEST) + 1
        if line[:length].strip(b"\r"):
            return length
        length = LONGEST
        while length > LONGEST - 3 and line[length] & 0xC0 == 0x80:  # inside a character
            length -= 1
        if half := _HALF_ANSI.search(line, LONGEST - 64, length):
            length = half.start()
        if self._redactor is None:
            return length
        for shorter in range(length, length - OVERLAP, -1):
            before, after = (
                without_controls(part.decode("utf-8", "replace"))
                for part in (line[shorter - OVERLAP : shorter], line[shorter : shorter + OVERLAP])
            )
            whole = self._redactor(before + after)
            if line[shorter] & 0xC0 != 0x80 and whole == self._redactor(before) + self._redactor(after):
                return shorter
        return length

    def _shown(self, raw: bytes) -> str:
        text = raw.decode("utf-8", "replace")
        if not text.isprintable():
            if "\r" in text:
                text = next((state for state in reversed(text.split("\r")) if without_controls(state).strip()), "")
            text = without_controls(text)
        return text if self._redactor is None else self._redactor(text)


def without_controls(text: str) -> str:
    """What a terminal would show of it, in one line."""
    if "\x1b" in text or "\x9b" in text:
        text = _ANSI.sub("", text)
    return text.translate(_CONTROLS)
