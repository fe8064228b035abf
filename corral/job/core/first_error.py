"""The line that tells why a job failed, found while its output goes by.

What counts: the last line of a Python traceback (of a chain of them, its last one), Corral's own `error: ...`, a check
of `corral doctor` that failed, a worker that died, a crash that Python or the shell reports, a command or module that
is not there, and the texts of collective libraries and full disks. Of several, a cause comes before what its peers say
because of it (a connection that was closed), what the job did not outlive before what it did, and then the earliest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

LONGEST = 500  # characters kept of a line
OUTLIVED = 30.0  # seconds after which a source that still writes has outlived its error

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Who repeats a line puts its origin before it: Corral's driver, torch's exception hook, Ray.
_PREFIX = re.compile(r"\[node-(?P<node>\d+) rank-(?P<rank>\d+)\] |\[rank(?P<torch>\d+)\]: ?|\([^()]*pid=\d+[^()]*\) ")
_PLACE = re.compile(r"\bnode-(?P<node>\d+) rank (?P<rank>\d+)\b")
_NODE = re.compile(r"\bnode-(?P<node>\d+)\b")

_TRACEBACK = re.compile(r"(?P<group>\s*\+ Exception Group )?Traceback \(most recent call last\):\s*$")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*|:)?$")
_GROUP_BAR = re.compile(r"\s+[|+] ")
_CHAIN = ("During handling of the above exception, another", "The above exception was the direct cause of")
_WORKER_ERROR = re.compile(
    r"(?:\S*\.)?WorkerError: \S+ failed on node-\d+ rank \d+: (?P<said>.*); the traceback is in "
)
# As `corral doctor` prints a check that failed, the worst one first. where: a node or rank, or `one to another`.
_CHECK = re.compile(r"FAILED  (?P<check>[a-z_]+)(?: on (?P<where>[^:]+))?: (?P<said>expected .*, found .*)")

_LINES = re.compile(
    "|".join(
        [
            r"(?:[\w./-]+: )?error: \S",  # Corral's own, and argparse's
            r"FAILED  [a-z_]+(?: on [^:]+)?: expected .*, found ",  # by `corral doctor`
            r"worker node-\d+ rank \d+ .*\bdied\b",
            r"Fatal Python error: ",
            r"(?:SyntaxError|IndentationError|TabError): ",  # of a script itself: no traceback line before it
            r"\S+: line \d+: .+: (?:No such file or directory|command not found|Permission denied|cannot execute)",
            r"(?:\S*/)?(?:ba|da|z)?sh: .+: (?:No such file or directory|(?:command )?not found|Permission denied)",
            r"\S+: line \d+: +\d+ +(?:Segmentation fault|Bus error|Aborted|Killed|Illegal instruction)\b",
            r"(?:Segmentation fault|Bus error|Aborted|Killed|Illegal instruction)(?: \(core dumped\))?$",
            r"\S*python[\d.]*: (?:can't open file|No module named|Error while finding module)",
            r"terminate called ",
            r"thread '[^']*' panicked at ",
        ]
    )
)
_ANYWHERE = re.compile(
    r"Watchdog caught collective operation timeout|\bEI0006\b|\bEJ0001\b|\bHCCL\b.*\btimeout\b|No space left on device"
)
# One of these is in every line that matters; looking for plain texts costs a tenth of the expressions above.
_HINTS = (
    *(
        "Traceback",
        "rror: ",
        "FAILED  ",
        "Error",
        "died",
        "No such file",
        "not found",
        "ermission denied",
        "cannot execute",
        "fault",
    ),
    *("Bus error", "Aborted", "Killed", "Illegal", "python", "terminate", "panicked", "Watchdog", "EI0006", "EJ0001"),
    *("HCCL", "No space left", "above exception"),
)
# What a rank says because another one is gone, or because the cluster below it is.
_PEER = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset|refused)|[Bb]roken pipe|EI0006|EJ0001|Watchdog caught|"
    r"remote process exited|ncclRemoteError|Socket Timeout|wait timeout|RayActorError|ActorDiedError|ActorUnavailable|"
    r"after an earlier failure"
)


@dataclass(frozen=True)
class Found:
    """text: the error itself, without a prefix that names its origin. time: Unix seconds of the line.
    peer: says something about another rank. node, rank: None when nothing tells them."""

    text: str
    source: str
    time: float
    node: int | None = None
    rank: int | None = None
    peer: bool = False


@dataclass
class _Reading:
    """Where the reader of one stream of lines is. group: inside the traceback of an exception group."""

    traceback: bool = False
    group: bool = False
    chained: bool = False
    found: Found | None = None
    outlived: Found | None = None


class FirstError:
    """Fed with lines of any sources in any mixture, each source in its own order; `found` may be read at any time.

    Memory: a few words a source. A line that holds no sign of an error costs a microsecond or two.
    """

    def __init__(self) -> None:
        self._readings: dict[tuple[str, int | None, int | None], _Reading] = {}

    def feed(self, source: str, node: int | None, rank: int | None, line: str, time: float) -> None:
        """One line, without its line end. source: `driver` or `node-N/rank-R`. time: Unix seconds of its writing,
        as near as the caller knows it."""
        if (key := (source, node, rank)) not in self._readings:
            self._readings[key] = _Reading()
        if not self._busy(self._readings[key], source, time, line):
            return
        line = _ANSI.sub("", line).rstrip()
        while match := _PREFIX.match(line):
            named = match["rank"] or match["torch"]
            if rank is None and named:
                node, rank = int(match["node"]) if match["node"] else node, int(named)
            line = line[match.end() :]
        reading = self._readings.setdefault((source, node, rank), _Reading())
        self._read(reading, Found(line, source, time, node, rank))

    @property
    def found(self) -> Found | None:
        """The best so far: a cause, then what peers said, then what was outlived; of equals the earliest."""
        lasting = [reading.found for reading in self._readings.values() if reading.found]
        past = [reading.outlived for reading in self._readings.values() if reading.outlived]
        return min(lasting or past, key=lambda found: (found.peer, found.time), default=None)

    def _busy(self, reading: _Reading, source: str, time: float, line: str) -> bool:
        """Whether the line has to be looked at; also notices that the source goes on after its error."""
        if (found := reading.found) and time - found.time > OUTLIVED:
            reading.outlived = reading.outlived or found
            reading.found = None
        if reading.traceback or reading.chained:
            return True
        for hint in _HINTS:
            if hint in line:
                return True
        # Inside a prefixed traceback the reading belongs to the origin named by the prefix.
        return source == "driver" and _PREFIX.match(line) is not None

    def _read(self, reading: _Reading, line: Found) -> None:
        text = line.text
        if match := _TRACEBACK.search(text):
            reading.traceback, reading.group = True, bool(match["group"])
        elif reading.traceback:
            if reading.group:
                text = _GROUP_BAR.sub("", text, count=1)
            if text and not text[0].isspace():
                reading.traceback = False
                if _EXCEPTION.match(text):
                    self._note(reading, replace(line, text=text))
        elif text.startswith(_CHAIN):
            reading.chained = reading.found is not None
        elif _LINES.match(text) or _ANYWHERE.search(text):
            self._note(reading, line)

    def _note(self, reading: _Reading, line: Found) -> None:
        found, reading.chained, chained = _placed(line), False, reading.chained
        if reading.found is None or (reading.found.peer and not found.peer):
            reading.found = found
        elif chained:
            reading.found = replace(found, time=reading.found.time)


def first_error(lines: Iterable[tuple[str, int | None, int | None, str, float]]) -> Found | None:
    """The error among (source, node, rank, line, time); None when there is none. See FirstError."""
    reader = FirstError()
    for source, node, rank, line, time in lines:
        reader.feed(source, node, rank, line, time)
    return reader.found


def place_in(text: str) -> tuple[int | None, int | None]:
    """(node, rank) that a text names as `node-1 rank 5`."""
    match = _PLACE.search(text)
    return (int(match["node"]), int(match["rank"])) if match else (None, None)


def _placed(line: Found) -> Found:
    """Node and rank as the text names them, unless the source does; the text without what repeats them."""
    text = line.text.strip()
    node, rank = line.node, line.rank
    if match := _CHECK.match(text):
        where = match["where"] or ""
        nodes, ranks = re.findall(r"node-(\d+)", where), re.findall(r"rank (\d+)", where)
        node, rank = int(nodes[0]) if nodes else node, int(ranks[0]) if ranks else rank
        text = f"{match['check']}{f' on {where}' if ' to ' in where else ''}: {match['said']}"
    elif rank is None:
        named_node, rank = place_in(text)
        if rank is not None:
            node = named_node
        elif node is None and text.startswith("error: ") and (match := _NODE.search(text)):
            node = int(match["node"])
    if match := _WORKER_ERROR.match(text):
        text = match["said"]
    return replace(line, text=text[:LONGEST], node=node, rank=rank, peer=_PEER.search(text) is not None)
