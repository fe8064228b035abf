"""The reward pool with real processes: order, user functions of every shape, faults, and nothing left behind."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from corral.config.plan import RewardPlan
from corral.errors import DataError
from corral.rewards.pool import RewardItem, RewardPool


def reward_plan(
    path: Path | str | None = None, *, timeout: float = 60.0, workers: int = 1, **kwargs: Any
) -> RewardPlan:
    return RewardPlan(
        custom_path=None if path is None else str(path),
        custom_name="compute_score",
        reward_kwargs=kwargs,
        num_workers=workers,
        timeout=timeout,
    )


def item(row: int = 0, solution: str = "#### 4", truth: Any = "4", source: str = "corral/arithmetic") -> RewardItem:
    return RewardItem(row, source, solution, truth, {"level": 1})


@pytest.fixture
def function(tmp_path):
    def write(body: str) -> Path:
        file = tmp_path / "my_reward.py"
        file.write_text(textwrap.dedent(body))
        return file

    return write


def workers_alive() -> list[int]:
    """Processes this one started, but for multiprocessing's resource tracker, which lives as long as Python does."""
    return [p.pid for p in psutil.Process().children(recursive=True) if "resource_tracker" not in " ".join(p.cmdline())]


def test_built_in_scorers_keep_the_order_and_closing_leaves_no_process() -> None:
    before = workers_alive()
    items = [
        item(row, f"#### {row % 7}", "3", source)
        for row in range(40)
        for source in ("openai/gsm8k", "corral/arithmetic")
    ]
    with RewardPool(reward_plan(workers=2)) as pool:
        scores = pool.score([*items, item(99, "")])
        assert [score.value for score in scores] == [float(i.row % 7 == 3) for i in items] + [0.0]
        assert len(workers_alive()) >= len(before) + 2
    assert workers_alive() == before


def test_reward_kwargs_reach_the_built_in_scorer_and_unknown_ones_are_refused() -> None:
    with RewardPool(reward_plan(method="flexible")) as pool:
        assert pool.score([item(solution="four: 4.0")])[0].value == 1.0
    with RewardPool(reward_plan(methd="flexible")) as pool, pytest.raises(DataError, match="methd"):
        pool.score([item()])


def test_an_unknown_source_names_the_known_ones_and_the_way_out() -> None:
    with RewardPool(reward_plan()) as pool, pytest.raises(DataError) as caught:
        pool.score([item(7, source="my/data")])
    for part in ("row 7", "'my/data'", "openai/gsm8k", "corral/arithmetic", "custom_reward_function.path"):
        assert part in str(caught.value)


def test_a_function_gets_its_keywords_and_may_return_a_dict_be_async_or_use_array_numbers(function) -> None:
    file = function(
        """
        import asyncio, dataclasses, sys
        import numpy as np

        @dataclasses.dataclass
        class Mine:
            x: int = 1

        def by_row(data_source, solution_str, ground_truth, extra_info, weight):
            assert "torch" not in sys.modules and "transformers" not in sys.modules and "ray" not in sys.modules
            kind = solution_str
            if kind == "dict":
                return {"score": np.float32(0.5), "acc": True, "list": np.arange(2), "mine": Mine(), "t": ground_truth}
            if kind == "array":
                return np.array(3.0)
            return weight * extra_info["level"]

        async def compute_score(**keywords):
            await asyncio.sleep(0)
            return by_row(**keywords)
        """
    )
    with RewardPool(reward_plan(file, weight=2)) as pool:
        mapped, array, number = pool.score([item(0, "dict"), item(1, "array"), item(2, "")])
    assert (mapped.value, array.value, number.value) == (0.5, 3.0, 2.0)
    assert mapped.extra == {"acc": True, "list": [0, 1], "mine": "Mine(x=1)", "t": "4"}


def test_a_function_can_be_named_by_module() -> None:
    with RewardPool(RewardPlan("examples.digit_share_reward", "compute_score", {"sign": -1}, 1, 60.0)) as pool:
        assert [score.value for score in pool.score([item(0, "a1b2"), item(1, "")])] == [-0.5, 0.0]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return float('nan')", "nan; a reward has to be finite"),
        ("return float('inf')", "inf; a reward has to be finite"),
        ("return 'high'", "'high'; it has to be a number"),
        ("return None", "None; it has to be a number"),
        ("return {'acc': 1}", r"without 'score' \(its keys: acc\)"),
        ("return {'score': None}", "None; it has to be a number"),
        ("raise ValueError('two\\nlines')", "compute_score raised ValueError: two lines"),
        ("raise KeyError('answer')", "compute_score raised KeyError: 'answer'"),
        ("class Own(Exception): pass\n    raise Own('mine')", "compute_score raised Own: mine"),
        ("import sys; sys.exit(3)", "compute_score raised SystemExit: 3"),
        ("import os; os._exit(3)", r"ended its process \(exit code 3\)"),
    ],
)
def test_a_faulty_function_ends_in_one_line_that_names_the_row(function, capfd, body, problem) -> None:
    file = function(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
    with (
        RewardPool(reward_plan(file)) as pool,
        pytest.raises(DataError, match=rf"^reward of row 5: .*{problem}") as caught,
    ):
        pool.score([item(5)])
    assert "\n" not in str(caught.value)
    if "raised" in problem:
        assert f'{file}", line' in capfd.readouterr().err


@pytest.mark.parametrize("hang", ["while True: pass", "__import__('re').match(r'(a+)+$', 'a' * 40 + 'b')"])
def test_a_function_that_hangs_is_ended_and_named(function, hang) -> None:
    """Also inside C code that never lets go of the interpreter."""
    before = workers_alive()
    file = function(
        f"""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "hang":
                {hang}
            return 1
        """
    )
    with RewardPool(reward_plan(file, timeout=2.0, workers=2)) as pool:
        with pytest.raises(DataError, match=r"reward of row 8 took more than 2 s.*reward\.timeout"):
            pool.score([item(7), item(8, "hang"), item(9)])
        assert [score.value for score in pool.score([item(10)])] == [1.0]
    assert workers_alive() == before


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("def compute_scor(): ...", "has no function 'compute_score'"),
        ("compute_score = 3", "is not a function: 'compute_score'"),
        ("import no_such_package_at_all", "cannot be imported: ModuleNotFoundError"),
        ("import os; os._exit(4)", "the processes end while they start"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        ("def compute_score(solution_str): ...", "cannot be called with data_source"),
        ("def compute_score(data_source, solution_str, ground_truth, extra_info, must): ...", "must"),
    ],
)
def test_what_is_wrong_with_a_file_is_known_before_anything_is_scored(function, capfd, body, problem) -> None:
    with RewardPool(reward_plan(function(body), workers=2)) as pool, pytest.raises(DataError, match=problem) as caught:
        pool.ready()
    assert len(str(caught.value).splitlines()) == 1
    assert capfd.readouterr().err.count("Traceback") == ("imported" in problem)


def test_a_slow_import_is_not_charged_to_the_first_response_and_an_endless_one_is_ended(function) -> None:
    before = workers_alive()
    slow = function(
        """
        import time
        time.sleep(2.5)
        def compute_score(**keywords): return 1
        """
    )
    with RewardPool(reward_plan(slow, timeout=2.0, workers=2)) as pool:
        assert [score.value for score in pool.score([item(row) for row in range(4)])] == [1.0] * 4
    endless = reward_plan(function("while True: pass"))
    problem = "loading the reward function took more than 1 s"
    with RewardPool(endless, load_seconds=1.0) as pool, pytest.raises(DataError, match=problem):
        pool.ready()
    assert workers_alive() == before


def test_a_missing_file_or_module_is_one_line(tmp_path) -> None:
    with pytest.raises(DataError, match=r"gone\.py: no such file"):
        RewardPool(reward_plan(tmp_path / "gone.py"))
    with (
        RewardPool(reward_plan("no_such_module_at_all")) as pool,
        pytest.raises(DataError, match="ModuleNotFoundError"),
    ):
        pool.ready()


def test_leaving_early_and_never_scoring_ends_the_processes(function) -> None:
    before = workers_alive()
    file = function("def compute_score(**keywords):\n    while True: pass\n")
    with pytest.raises(KeyboardInterrupt), RewardPool(reward_plan(file)):
        raise KeyboardInterrupt
    assert workers_alive() == before


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_workers_do_not_run_the_drivers_main_module(tmp_path, function, how) -> None:
    """A driver without a main guard, heavy at its top, from a file or from stdin: its workers stay light."""
    file = function(
        """
        import sys

        def compute_score(**keywords):
            return float("xml.dom" in sys.modules or "torch" in sys.modules)
        """
    )
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import xml.dom
            from corral.config.plan import RewardPlan
            from corral.rewards.pool import RewardItem, RewardPool

            with RewardPool(RewardPlan({str(file)!r}, "compute_score", {{}}, 1, 60.0)) as pool:
                print(pool.score([RewardItem(0, "any", "", "", {{}})])[0].value)
            """
        )
    )
    command = [sys.executable, str(script)] if how == "file" else [sys.executable, "-"]
    done = subprocess.run(command, stdin=script.open(), capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("0.0\n", 0), done.stderr
