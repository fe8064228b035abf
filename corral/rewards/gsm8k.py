"""The rule that scores GSM8K-style answers: the final number the response states against the ground truth."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from corral.errors import DataError

METHODS = ("strict", "flexible")
_TAIL = 300
_STATED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"(?<![0-9])-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


def score_math_answer(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    *,
    method: str = "strict",
    format_score: float = 0.0,
) -> float:
    """1.0 for the right final answer; `format_score` for a wrong one that is stated as asked; else 0.0.

    strict: only the last 300 characters count. The last `#### ` followed by an optional minus, digits, dots and commas
    is the answer; commas and `$` are taken out and what remains has to equal the ground truth as text, so `42.` or
    `42.0` is not `42`. flexible: the last number anywhere in the response, compared as a number (`$1,042.0` is 1042).
    Raises DataError for another method.
    """
    if method not in METHODS:
        raise DataError(f"reward_kwargs.method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    answer = stated_answer(solution_str) if method == "strict" else last_number(solution_str)
    if answer is None:
        return 0.0
    truth = str(ground_truth)
    right = answer == truth if method == "strict" else _same_number(answer, truth)
    return 1.0 if right else format_score


def stated_answer(solution: str) -> str | None:
    """The answer by the strict rule, None when none is stated."""
    stated = _STATED.findall(solution[-_TAIL:])
    return stated[-1].replace(",", "").replace("$", "") if stated else None


def last_number(solution: str) -> str | None:
    """The last number of a text, without commas and `$`. A minus right after a digit is a subtraction, not a sign."""
    numbers = _NUMBER.findall(solution)
    return numbers[-1].replace(",", "").replace("$", "") if numbers else None


def _same_number(answer: str, truth: str) -> bool:
    expected = last_number(truth)
    return expected is not None and Decimal(answer) == Decimal(expected)
