"""Secrets do not come through, in whatever form and at whatever place."""

from __future__ import annotations

import base64
import html
import json
import urllib.parse

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from corral.job.core.redact import MASK, SHORTEST, Redactor

SECRETS = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=8, max_size=40).filter(
    lambda text: text == text.strip() and len(set(text)) > 3 and MASK not in text
)
ANY = st.binary(max_size=30)


def b64(before: bytes, secret: str, after: bytes) -> str:
    return base64.b64encode(before + secret.encode() + after).decode()


FORMS = [
    lambda secret: secret,
    lambda secret: urllib.parse.quote(secret),
    lambda secret: urllib.parse.quote(secret, safe=""),
    lambda secret: urllib.parse.quote_plus(secret),
    lambda secret: json.dumps(secret)[1:-1],
    lambda secret: json.dumps(secret, ensure_ascii=False)[1:-1],
    lambda secret: repr(secret)[1:-1],
    lambda secret: html.escape(secret),
]


@given(secret=SECRETS, others=st.lists(SECRETS, max_size=3), form=st.sampled_from(FORMS), around=st.text(max_size=10))
def test_a_value_and_its_escaped_forms_never_come_through(secret, others, form, around):
    shown = form(secret)
    assume(shown not in around + around)
    text = Redactor([*others, secret])(f"{around} token={shown}; {around}")
    assert shown not in text
    assert secret not in text
    assert MASK in text


@given(secret=SECRETS, before=ANY, after=ANY, safe=st.booleans())
def test_base64_of_a_text_that_holds_it_gives_nothing_of_it(secret, before, after, safe):
    encode = base64.urlsafe_b64encode if safe else base64.b64encode
    redacted = Redactor([secret])(encode(before + secret.encode() + after).decode())
    assert MASK in redacted
    left, right = redacted.split(MASK, 1)[0], redacted.rsplit(MASK, 1)[1]
    whole = encode(before + secret.encode() + after).decode()
    first, last = len(left), len(whole) - len(right)
    # Of the secret's bits, only those that share a character with a neighbour may be left: five on either side.
    assert first * 6 <= len(before) * 8 + 5
    assert last * 6 >= (len(before) + len(secret.encode())) * 8 - 5


@given(secret=SECRETS, others=st.lists(SECRETS, max_size=3), form=st.sampled_from(FORMS), around=ANY)
def test_masked_bytes_keep_their_length_and_hold_no_value(secret, others, form, around):
    shown = form(secret).encode()
    assume(shown not in around)
    redactor = Redactor([*others, secret])
    masked = redactor.mask(around + shown + around)
    assert len(masked) == len(around + shown + around)
    assert shown not in masked
    assert len(shown) <= redactor.longest


@given(secret=SECRETS, text=st.text(max_size=60))
def test_other_text_is_left_alone(secret, text):
    redactor = Redactor([secret])
    if redactor(text) != text:
        pieces = [form(secret) for form in FORMS]
        assert any(piece in text for piece in pieces)


def test_the_longest_secret_is_taken_whole():
    assert Redactor(["abcd", "abcdefgh"])("x abcdefgh y abcd z") == f"x {MASK} y {MASK} z"


def test_lines_of_a_key_file_are_secret_one_by_one():
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEFAA\n-----END KEY-----\n"
    redactor = Redactor([key])
    assert redactor("got kqhkiG9w0BAQEFAA") == f"got {MASK}"
    assert "MIIE" not in redactor(key)


def test_a_file_that_ends_with_a_line_end_is_found_without_it():
    assert Redactor(["hunter2hunter2\n"])("x=hunter2hunter2 y") == f"x={MASK} y"


@pytest.mark.parametrize("value", ["", "a", "abc"])
def test_values_too_short_to_be_told_from_text_are_named(value):
    assert len(value) < SHORTEST
    redactor = Redactor(["longer", value])
    assert redactor.skipped == [1]
    assert redactor(f"{value} longer") == f"{value} {MASK}"


def test_without_secrets_nothing_is_done():
    text = "a" * 100
    assert Redactor([])(text) is text


def test_expressions_in_a_value_are_plain_text():
    assert Redactor(["a.*b(c[d\\"])("a.*b(c[d\\ aXXb(c[d\\") == f"{MASK} aXXb(c[d\\"


@pytest.mark.parametrize(
    "shown", ["pass%20word%26x", "pass+word%26x", "pass%20word&x", "pass word&amp;x", "pass word&x", "cGFzcyB3b3JkJn"]
)
def test_a_space_and_an_ampersand_in_every_form(shown):
    assert Redactor(["pass word&x"])(f"<{shown}>").startswith(f"<{MASK}")


def test_both_base64_forms_of_one_token():
    assert b64(b"user:", "tok?en>1234", b"")[8:] not in Redactor(["tok?en>1234"])(b64(b"user:", "tok?en>1234", b""))
