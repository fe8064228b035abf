"""Scoring in processes of its own: a function that hangs, crashes or prints cannot take the run's driver with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType, TracebackType
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from corral.config.plan import RewardPlan
from corral.errors import DataError
from corral.exits import signals_held
from corral.rewards.custom import check_file
from corral.rewards.worker import Failure, RewardItem, Score, Scoring, loaded, score_item, start_worker

__all__ = ["RewardItem", "RewardPool", "Score"]

_Answer = TypeVar("_Answer")


class _WorkerProcess(SpawnProcess):
    """A spawned process that does not import the driver's main module a second time.

    Nothing of it is needed to score, and it may be heavy, have no main guard, or be no file at all (a script on stdin).
    """

    def start(self) -> None:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


class _WorkerContext(SpawnContext):
    Process = _WorkerProcess


class RewardPool:
    """`plan.num_workers` processes that score responses. Use it as a context manager; leaving it ends them all.

    Entering starts the processes, which load the custom function, without waiting for them, so the cost is hidden
    behind whatever the caller does next. load_seconds: how long loading may take. Processes are spawned, not forked
    (the driver has threads), and import little.
    """

    def __init__(self, plan: RewardPlan, *, load_seconds: float = 300.0) -> None:
        if plan.custom_path is not None:
            check_file(plan.custom_path)
        self._scoring = Scoring(plan.custom_path, plan.custom_name, dict(plan.reward_kwargs))
        self._timeout = plan.timeout
        self._load_seconds = load_seconds
        self._pool = ProcessPool(
            max_workers=plan.num_workers,
            initializer=start_worker,
            initargs=[self._scoring],
            context=_WorkerContext(),
        )
        self._loaded: Future[Failure | None] | None = None

    def __enter__(self) -> RewardPool:
        try:
            with signals_held():  # a process that is being spawned cannot be ended yet
                self._loaded = self._pool.schedule(loaded)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._pool.stop()
        self._pool.join()

    def ready(self) -> None:
        """Wait until a custom function is loaded. Raises DataError, in one line, when it cannot be."""
        if self._loaded is not None:
            self._accept(self._outcome(self._loaded, "loading the reward function", self._load_seconds))

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """Scores in the order of the items, `plan.timeout` seconds at most for each.

        Raises DataError naming the row when a function raises (its traceback goes to stderr first), takes too long,
        ends its process, or does not return a finite number.
        """
        self.ready()
        futures = [self._pool.schedule(score_item, args=[self._scoring, item], timeout=self._timeout) for item in items]
        try:
            return [
                self._accept(self._outcome(future, f"reward of row {item.row}", self._timeout))
                for item, future in zip(items, futures, strict=True)
            ]
        finally:
            for future in futures:
                future.cancel()

    def _outcome(self, future: Future[_Answer], what: str, limit: float) -> _Answer:
        # The pool ends a process that scores for too long, counted from when it starts on the response; a process still
        # loading has not started on anything, so that wait is limited here.
        try:
            return future.result(timeout=limit if future is self._loaded else None)
        except TimeoutError:
            fix = "make its import fast" if future is self._loaded else "speed it up or raise reward.timeout"
            raise DataError(f"{what} took more than {limit:g} s; {fix}") from None
        except BrokenProcessPool:
            raise DataError(f"{what}: the processes end while they start; what they printed says why") from None
        except ProcessExpired as error:
            raise DataError(f"{what}: the function ended its process (exit code {error.exitcode})") from error

    def _accept(self, outcome: Any) -> Any:
        if isinstance(outcome, Failure):
            sys.stderr.write(outcome.traceback)
            raise DataError(outcome.message)
        return outcome
