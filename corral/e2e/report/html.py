"""HTML from elements: what is text stays text, whatever it holds."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

from corral.e2e.report import text

Element = ElementTree.Element
Child = Element | str | None
_HERE = Path(__file__).parent


def el(tag: str, *children: Child | Iterable[Child], **attributes: str | None) -> Element:
    """An element. class_ stands for class, `_` in a name for `-`; attributes that are None are left out."""
    given = {
        name.rstrip("_").replace("_", "-"): text.fit(value) for name, value in attributes.items() if value is not None
    }
    element = Element(tag, given)
    for child in children:
        _append(element, child)
    return element


def _append(element: Element, child: Child | Iterable[Child]) -> None:
    if child is None:
        return
    if isinstance(child, Element):
        element.append(child)
    elif not isinstance(child, str):
        for one in child:
            _append(element, one)
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + text.fit(child)
    else:
        element.text = (element.text or "") + text.fit(child)


def table(heads: Iterable[str], rows: Iterable[Iterable[Child]], class_: str = "") -> Element:
    """A table that scrolls inside the page when it is wider than it."""
    head = el("thead", el("tr", (el("th", name, scope="col") for name in heads)))
    body = el("tbody")
    for row in rows:
        kind = "bad" if isinstance(row, Bad) else None
        body.append(el("tr", (el("td", cell) for cell in row), class_=kind))
    return el("div", el("table", head, body, class_=class_ or None), class_="wide")


class Bad(list[Child]):
    """A row of a table that is not as it should be."""


def link(to: str, name: str) -> Element:
    """To a file beside the page."""
    return el("a", name, href=quote(to, safe="/-._~"))


def pairs(rows: Iterable[tuple[str, Child]], class_: str | None = None) -> Element:
    """Names with their values."""
    return el("dl", (el("div", el("dt", name), el("dd", value)) for name, value in rows), class_=class_)


def folded(title: Child | Iterable[Child], *content: Child | Iterable[Child]) -> Element:
    return el("details", el("summary", title), *content)


def document(title: str, body: Iterable[Child], script: bool = True) -> str:
    """A page that needs nothing but itself: its style and its script stand in it, and nothing else is allowed."""
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    code = (_HERE / "page.js").read_text(encoding="utf-8") if script else ""
    policy = f"default-src 'none'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    policy += f"; script-src '{_digest(code)}'" if script else ""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", title),
    )
    head.append(_verbatim("style", style))
    page = el("body", body, _verbatim("script", code) if script else None)
    root = el("html", head, page, lang="en")
    return "<!doctype html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"


def _verbatim(tag: str, content: str) -> Element:
    """Of ours, and without an end tag in it: it is written as it is."""
    element = Element(tag)
    element.text = content
    return element


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
