"""Secrets out of text: exact values and the encodings they usually appear in."""

from __future__ import annotations

import base64
import html
import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import groupby

MASK = "***"
SHORTEST = 4  # characters of the shortest value that is looked for: shorter ones occur in any text

# What percent-encoders leave as it is, besides letters, digits and `_.-~`: Python's two, JavaScript's
# encodeURIComponent and encodeURI, and RFC 3986 for a segment of a path and for a query.
_LEFT_ALONE = ("", "/", "!*'()", ";,/?:@&=+$#!*'()", "!$&'()*+,;=:@", "!$&'()*+,;=:@/?")


class Redactor:
    """Replaces every occurrence of a value, or of one of its encodings, by `***`.

    Encodings: base64 (standard and URL-safe, at all three alignments inside a longer encoded text), percent-encoding,
    the inside of a JSON string and of an HTML text, and each line of a value of several lines, as output is read by
    lines. Values below 4 characters are not redacted and are listed in `skipped` (by position); neither is what
    remains of a base64 text when fewer than 4 of its characters depend on the value alone.
    One compiled expression, by first character and then the longest first, so that no tail of a longer secret survives.
    longest: bytes of the longest form that is looked for; 0 when there is none.
    """

    def __init__(self, values: Iterable[str]) -> None:
        values = list(values)
        self.skipped = [index for index, value in enumerate(values) if len(value) < SHORTEST]
        forms = {form for value in values if len(value) >= SHORTEST for form in _forms(value)}
        self._pattern = re.compile(_any_of(forms)) if forms else None
        self.longest = max((len(form.encode("utf-8", "surrogatepass")) for form in forms), default=0)

    def __call__(self, text: str) -> str:
        return self._pattern.sub(MASK, text) if self._pattern else text

    def mask(self, data: bytes) -> bytes:
        """As many bytes, with a `*` for each byte of a value or of one of its encodings."""
        if self._in_bytes is None:
            return data
        return self._in_bytes.sub(lambda match: b"*" * len(match[0]), data)

    @cached_property
    def _in_bytes(self) -> re.Pattern[bytes] | None:
        return re.compile(self._pattern.pattern.encode("utf-8", "surrogatepass")) if self._pattern else None


def _any_of(texts: Iterable[str]) -> str:
    """Grouped by first character: six times as fast as one flat list of 64 secrets' forms."""
    ordered = sorted(texts, key=lambda text: (text[0], -len(text), text))
    groups = groupby(ordered, key=lambda text: text[0])
    return "|".join(
        f"{re.escape(first)}(?:{'|'.join(re.escape(text[1:]) for text in group)})" for first, group in groups
    )


def _forms(value: str) -> Iterator[str]:
    lines = [line.strip() for line in value.splitlines()]
    for part in {value, value.strip(), *lines}:
        if len(part) >= SHORTEST:
            yield from (form for form in _encodings(part) if len(form) >= SHORTEST)


def _encodings(text: str) -> Iterator[str]:
    yield text
    data = text.encode("utf-8", "surrogatepass")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):
            yield _inner_base64(encode(b"\0" * before + data).decode().rstrip("="), before, len(data))
    for safe in _LEFT_ALONE:
        quoted = urllib.parse.quote(data, safe=safe)
        yield quoted
        yield re.sub(r"%[0-9A-F]{2}", lambda match: match[0].lower(), quoted)
        yield quoted.replace("%20", "+")
    for ascii_only in (True, False):
        yield json.dumps(text, ensure_ascii=ascii_only)[1:-1]
    yield json.dumps(text)[1:-1].replace("/", "\\/")
    yield repr(text)[1:-1]
    yield html.escape(text)


def _inner_base64(encoded: str, before: int, size: int) -> str:
    """The characters whose six bits all come from the value, which starts `before` bytes into the encoded bytes."""
    first = -(-before * 8 // 6)
    last = (before + size) * 8 // 6
    return encoded[first:last]
