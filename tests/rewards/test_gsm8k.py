"""The answer rule on edge strings, strict and flexible."""

import pytest

from corral.errors import DataError
from corral.rewards.gsm8k import score_math_answer

STRICT_CASES = [
    # response, ground truth, score
    ("#### 42", "42", 1.0),
    ("so 6 * 7 = 42.\n#### 42", "42", 1.0),
    ("#### 42\n", "42", 1.0),
    ("#### 42 dollars", "42", 1.0),
    ("#### 1 #### 42", "42", 1.0),  # the last one counts
    ("#### 42 #### 1", "42", 0.0),
    ("#### 1,042", "1042", 1.0),
    ("#### ,4,2,", "42", 1.0),
    ("#### -42", "-42", 1.0),
    ("#### -42", "42", 0.0),
    ("#### 42.", "42", 0.0),
    ("#### 42.0", "42", 0.0),
    ("#### 042", "42", 0.0),
    ("#### 4 2", "42", 0.0),
    ("#### 42.5", "42.5", 1.0),
    ("####  42", "42", 0.0),  # two spaces
    ("####42", "42", 0.0),
    ("### 42", "42", 0.0),
    ("##### 42", "42", 1.0),
    ("#### $42", "42", 0.0),
    ("#### 42%", "42", 1.0),
    ("#### x #### 42 #### y", "42", 1.0),
    ("#### --42", "-42", 0.0),
    ("#### +42", "42", 0.0),
    ("#### ٤٢", "42", 0.0),
    ("The answer is 42", "42", 0.0),
    ("42", "42", 0.0),
    ("", "42", 0.0),
    ("#### ", "42", 0.0),
    ("#### 42" + "x" * 293, "42", 1.0),  # 300 characters in all
    ("#### 42" + "x" * 294, "42", 0.0),  # the marker's first # is outside the last 300
    ("#### 7" + " " * 400 + "#### 42", "42", 1.0),
]


@pytest.mark.parametrize(("response", "truth", "score"), STRICT_CASES)
def test_strict(response, truth, score) -> None:
    assert score_math_answer("openai/gsm8k", response, truth, {}) == score


FLEXIBLE_CASES = [
    ("#### 42.", "42", 1.0),
    ("#### 42.0", "42", 1.0),
    ("####  $1,042.00", "1042", 1.0),
    ("The answer is 42", "42", 1.0),
    ("42 apples, which is all.", "42", 1.0),
    ("42, or rather 43", "42", 0.0),
    ("50-8=42", "42", 1.0),
    ("50-8", "8", 1.0),  # a subtraction, not minus eight
    ("it is -8", "-8", 1.0),
    ("it is -$8", "-8", 1.0),
    ("it is 8", "-8", 0.0),
    ("a half: .5", "0.5", 1.0),
    ("x" * 10 + "42" + "x" * 1000, "42", 1.0),  # no tail window
    ("none", "42", 0.0),
    ("", "42", 0.0),
    ("12", "no number", 0.0),
    ("1" * 400, "1" * 400, 1.0),
    ("1" * 400, "1" * 399 + "2", 0.0),
]


@pytest.mark.parametrize(("response", "truth", "score"), FLEXIBLE_CASES)
def test_flexible(response, truth, score) -> None:
    assert score_math_answer("openai/gsm8k", response, truth, {}, method="flexible") == score


def test_format_score_goes_to_wrong_answers_that_are_stated() -> None:
    assert score_math_answer("", "#### 1", "2", {}, format_score=0.1) == 0.1
    assert score_math_answer("", "1", "2", {}, format_score=0.1) == 0.0


def test_another_method_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"'lenient' is unknown; choose one of strict, flexible"):
        score_math_answer("", "#### 1", "1", {}, method="lenient")
