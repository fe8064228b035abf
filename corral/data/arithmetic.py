"""Word problems of graded difficulty, the same for the same seed, with worked answers in GSM8K's style.

A problem of level L tells a story of L operations on one quantity, so its answer takes L steps to work out. All
quantities are whole numbers from 0 to 999.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.data.rows import Row, math_row, write_splits
from corral.errors import DataError

DATA_SOURCE = "corral/arithmetic"
LEVELS = (1, 2, 3, 4)
LARGEST = 999
_TRIES = 1000

_NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam"),
    *("Maya", "Noah", "Olga", "Pablo", "Rosa", "Sven", "Tara", "Yuki"),
)


@dataclass(frozen=True)
class _Scene:
    """What a story is about. In the sentences {who} is a name, {what} the counted thing, {k} the number of the step."""

    things: tuple[str, ...]
    opening: str
    add: tuple[str, ...]
    subtract: tuple[str, ...]
    multiply: tuple[str, ...]
    divide: tuple[str, ...]
    question: str


_SCENES = (
    _Scene(
        things=("apples", "marbles", "stickers", "cookies", "pencils", "coins", "books", "shells"),
        opening="{who} has {k} {what}.",
        add=("{who} buys {k} more {what}.", "A friend gives {who} {k} more {what}."),
        subtract=("{who} gives {k} of the {what} away.", "{who} loses {k} of the {what}."),
        multiply=("Then {who} collects until there are {k} times as many {what}.",),
        divide=("{who} shares the {what} equally among {k} people and keeps one share.",),
        question="How many {what} does {who} have now?",
    ),
    _Scene(
        things=("loaves", "cakes", "rolls", "pies"),
        opening="A bakery run by {who} starts the day with {k} {what}.",
        add=("The oven gives {k} more {what}.", "A helper brings {k} more {what}."),
        subtract=("{k} {what} are sold.", "{k} of the {what} get burnt and are thrown away."),
        multiply=("With a second oven the number of {what} becomes {k} times as large.",),
        divide=("The {what} are split equally over {k} shops, and {who} keeps the part of one shop.",),
        question="How many {what} does the bakery of {who} have at the end?",
    ),
    _Scene(
        things=("miles", "laps", "meters", "steps"),
        opening="On Monday {who} runs {k} {what}.",
        add=("The next day it is {k} {what} more than the day before.",),
        subtract=("The next day it is {k} {what} less than the day before.",),
        multiply=("The next day it is {k} times as many {what} as the day before.",),
        divide=("The next day {who} is tired: the {what} of the day before are divided by {k}.",),
        question="How many {what} does {who} run on the last day?",
    ),
)


@dataclass(frozen=True)
class Problem:
    """answer: the worked solution, one line a step, ending in `#### result`."""

    question: str
    answer: str
    result: int
    level: int


def word_problem(stream: random.Random, level: int) -> Problem:
    """One problem of `level` operations (1 to 4), drawn from `stream`."""
    scene = stream.choice(_SCENES)
    who, what = stream.choice(_NAMES), stream.choice(scene.things)
    value = stream.randint(2, 99)
    story = [scene.opening.format(who=who, what=what, k=value)]
    lines = []
    for _ in range(level):
        sentence, sign, k, after = _operation(stream, scene, value)
        story.append(sentence.format(who=who, what=what, k=k))
        lines.append(f"{value} {sign} {k} = {after} {what}.")
        value = after
    story.append(scene.question.format(who=who, what=what))
    return Problem(" ".join(story), "\n".join([*lines, f"#### {value}"]), value, level)


def _operation(stream: random.Random, scene: _Scene, value: int) -> tuple[str, str, int, int]:
    """A sentence, its sign, its number and the value after it, among those that keep the value whole and in range."""
    divisors = [k for k in range(2, 13) if value and value % k == 0]
    largest_factor = min(5, LARGEST // value) if value else 0
    kinds = ["+"] * (value < LARGEST) + ["-"] * (value > 0) + ["*"] * (largest_factor >= 2) + ["/"] * bool(divisors)
    sign = stream.choice(kinds)
    if sign == "+":
        k = stream.randint(1, min(60, LARGEST - value))
        return stream.choice(scene.add), sign, k, value + k
    if sign == "-":
        k = stream.randint(1, value)
        return stream.choice(scene.subtract), sign, k, value - k
    if sign == "*":
        k = stream.randint(2, largest_factor)
        return stream.choice(scene.multiply), sign, k, value * k
    k = stream.choice(divisors)
    return stream.choice(scene.divide), sign, k, value // k


def arithmetic_rows(*, seed: int, train: int, test: int) -> dict[str, list[Row]]:
    """Rows of both splits; no question occurs twice. The levels 1 to 4 take turns.

    The test split depends on the seed and its own size only, and a longer train split begins with the shorter one.
    Raises DataError when a count is below 1 or more questions are asked for than there are.
    """
    for split, count in (("train", train), ("test", test)):
        if count < 1:
            raise DataError(f"--{split} is {count}; it has to be at least 1")
    seen: set[str] = set()
    out: dict[str, list[Row]] = {}
    for split, count in (("test", test), ("train", train)):
        problems = _distinct_problems(random.Random(f"corral arithmetic {seed} {split}"), seen)
        out[split] = [
            math_row(
                data_source=DATA_SOURCE,
                split=split,
                index=index,
                question=problem.question,
                answer=problem.answer,
                final=str(problem.result),
                level=problem.level,
            )
            for index, problem in zip(range(count), problems, strict=False)
        ]
    return {"train": out["train"], "test": out["test"]}


def _distinct_problems(stream: random.Random, seen: set[str]) -> Iterator[Problem]:
    """Problems of the levels in turn, without the questions in `seen`, which grows."""
    while True:
        for level in LEVELS:
            for _ in range(_TRIES):
                problem = word_problem(stream, level)
                if problem.question not in seen:
                    break
            else:
                raise DataError(f"no new problem of level {level} after {len(seen)} problems; ask for fewer rows")
            seen.add(problem.question)
            yield problem


def write_arithmetic(out: Path, *, seed: int, train: int, test: int) -> list[Path]:
    """Write train.parquet and test.parquet to `out`."""
    return write_splits(out, arithmetic_rows(seed=seed, train=train, test=test))
