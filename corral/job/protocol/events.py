"""Events of a job: one JSON object a line, `seq` from 1 without gaps, stored before sent, `final` once and last.

The first protocol knows log, status, final and error; the rest is only sent to clients that name `types`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

EventType = Literal["log", "status", "phase", "preflight", "warning", "error", "final"]
FIRST_TYPES: frozenset[str] = frozenset({"log", "status", "error", "final"})
ALL_TYPES: frozenset[str] = frozenset({"log", "status", "phase", "preflight", "warning", "error", "final"})

KEEP_ALIVE = b"\n"  # the first helper skips blank lines
KEEP_ALIVE_SECONDS = 15.0


def encode(seq: int, ts: float, attempt: int, kind: EventType, fields: dict[str, Any]) -> bytes:
    """One event as a line. ts: Unix seconds."""
    event = {"seq": seq, "type": kind, "ts": round(ts, 3), "attempt": attempt, **fields}
    return _line(event)


def _line(event: dict[str, Any]) -> bytes:
    """ASCII: readers that cut lines as Unicode does would also cut at U+0085 or U+2028. Half of a surrogate pair, as
    in file names that are not UTF-8, becomes a question mark."""
    text = json.dumps(event, separators=(",", ":"))
    if "\\ud" in text:
        whole = json.dumps(event, ensure_ascii=False).encode("utf-8", "replace")
        text = json.dumps(json.loads(whole), separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def encode_lines(
    first_seq: int,
    ts: float,
    attempt: int,
    source: str,
    node: int | None,
    rank: int | None,
    lines: Sequence[str],
    offsets: Sequence[int],
) -> bytes:
    """Log events of one source as lines; the hot path of the service, so what is common is encoded once.

    offsets[i] is the byte at which line i starts in the raw file of the source.
    """
    place = {"ts": round(ts, 3), "attempt": attempt, "source": source, "node": node, "rank": rank}
    common = json.dumps(place, separators=(",", ":"))[1:-1]
    quote = json.dumps
    return "".join(
        f'{{"seq":{seq},"type":"log",{common},"src_off":{offset},"line":{quote(line)}}}\n'
        for seq, (line, offset) in enumerate(zip(lines, offsets, strict=True), first_seq)
    ).encode("ascii")


def as_sse(line: bytes) -> bytes:
    """An encoded event as a server-sent event whose id is its seq (HTML standard, section 9.2)."""
    event = json.loads(line)
    return f"id: {event['seq']}\nevent: {event['type']}\n".encode() + b"data: " + line.rstrip(b"\n") + b"\n\n"


def for_first_clients(line: bytes) -> bytes:
    """The same event for a client of the first protocol, which has no CANCELLED: it is told FAILED."""
    if b'"type":"final"' not in line[:64]:
        return line
    event = json.loads(line)
    if event["type"] == "final" and event["status"] == "CANCELLED":
        return _line(event | {"status": "FAILED"})
    return line
