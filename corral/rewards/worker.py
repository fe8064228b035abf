"""What runs inside a reward process: load the scorer once, score one response, answer in plain data.

Nothing of the user's crosses back to the driver but numbers, strings and lists, because an exception or a value of a
class defined in the user's file could not be read there.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import multiprocessing
import os
import signal
import threading
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from numbers import Real
from typing import Any

from corral.errors import DataError
from corral.rewards.custom import check_signature, load_reward_function
from corral.rewards.registry import RewardFunction, scorer_for


@dataclass(frozen=True)
class RewardItem:
    """One response to score. row: data row, for messages; solution: the decoded response, special tokens left out."""

    row: int
    data_source: str
    solution: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Score:
    """value: the reward; extra: whatever else the function returned, as plain data."""

    value: float
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a response has no score. traceback is empty when the fault is not inside the user's code."""

    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Scoring:
    """What to call, as in RewardPlan: the custom function, or (path None) the scorer of the row's data_source."""

    path: str | None
    name: str
    reward_kwargs: dict[str, Any]


_functions: dict[str, RewardFunction] = {}
_loading: list[Failure] = []


def start_worker(scoring: Scoring) -> None:
    """Once per process: load the custom function, if any. What goes wrong is told by `loaded` and `score_item`.

    Ctrl-C reaches the whole process group; the driver alone decides when its workers end. They end with it, also when
    it was killed while a function hangs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = multiprocessing.parent_process()
    if driver is not None:
        threading.Thread(target=_end_with, args=[driver.sentinel], daemon=True).start()
    if scoring.path is None:
        return
    try:
        _functions[scoring.path] = load_reward_function(scoring.path, scoring.name, scoring.reward_kwargs)
    except DataError as error:
        cause = error.__cause__
        _loading.append(Failure(str(error), "".join(traceback.format_exception(cause)) if cause else ""))


def _end_with(driver: int) -> None:
    """driver: a file descriptor that closes with the driver."""
    wait([driver])
    os._exit(1)


def loaded() -> Failure | None:
    """What is wrong with the custom function, if something is."""
    return _loading[0] if _loading else None


def score_item(scoring: Scoring, item: RewardItem) -> Score | Failure:
    """Call the function on one response. Never raises."""
    if _loading:
        return _loading[0]
    try:
        function = _functions[scoring.path] if scoring.path else _built_in(item.data_source, scoring.reward_kwargs)
        result = function(
            data_source=item.data_source,
            solution_str=item.solution,
            ground_truth=item.ground_truth,
            extra_info=item.extra_info,
            **scoring.reward_kwargs,
        )
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return _score(result)
    except DataError as error:
        return Failure(f"reward of row {item.row}: {error}")
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        name = scoring.name if scoring.path else "the scorer"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Failure(f"reward of row {item.row}: {name} raised {reason}", traceback.format_exc())


def _built_in(data_source: str, reward_kwargs: dict[str, Any]) -> RewardFunction:
    if data_source not in _functions:
        scorer = scorer_for(data_source)
        check_signature(scorer, f"for {data_source}", reward_kwargs)
        _functions[data_source] = scorer
    return _functions[data_source]


async def _awaited(result: Any) -> Any:
    return await result


def _score(result: Any) -> Score:
    extra: dict[str, Any] = {}
    if isinstance(result, dict):
        if "score" not in result:
            raise DataError(
                f"the function returned a dict without 'score' (its keys: {', '.join(map(str, result)) or 'none'})"
            )
        extra = {str(key): value for key, value in result.items() if key != "score"}
        result = result["score"]
    value = _plain(result)
    if not isinstance(value, Real):
        raise DataError(
            f"the function returned {value!r:.80}; it has to be a number or a dict with a number under 'score'"
        )
    if not math.isfinite(value):
        raise DataError(f"the function returned {float(value)}; a reward has to be finite")
    return Score(float(value), json.loads(json.dumps(extra, default=_plain_or_text)))


def _plain(value: Any) -> Any:
    """Numbers of array libraries as Python numbers."""
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) in (1, ()) else value


def _plain_or_text(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
