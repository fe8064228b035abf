"""Ctrl-C and SIGTERM at several moments of a run: the exit code says which, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.trainer.runs import Inputs, command, metrics, temporary_files
from tests.workers.clusters import until

MARKER = "CORRAL_TEST_RUN"
ENDS_WITHIN = 60.0  # seconds; a few on a quiet machine
SLOW_REWARD = """
import pathlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info, flag):
    pathlib.Path(flag).touch()
    time.sleep(3600)
"""


class Started:
    """A run in a process of its own, with everything that it starts."""

    def __init__(self, overrides: list[str], run_dir: Path) -> None:
        self.run_dir = run_dir
        self.marker = uuid.uuid4().hex
        self.output = run_dir.with_suffix(".log")
        # SPT_NOENV: processes that rename themselves (Ray's do) keep their environment readable.
        env = {**os.environ, MARKER: self.marker, "SPT_NOENV": "1"}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command(overrides), env=env, stdout=output, stderr=output)

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # gone meanwhile
        return found

    def reach(self, moment: Callable[[], bool]) -> None:
        """Wait for a fact; fail when the run ends before it holds."""

        def there() -> bool:
            assert self.process.poll() is None or moment(), self.output.read_text()
            return moment()

        until(there)

    def says(self, text: str) -> bool:
        return text in self.output.read_text()

    def doing(self, method: str, rank: int = 0) -> bool:
        """Whether the rank is inside this call, by its progress file."""
        file = self.run_dir / "progress" / f"rank-{rank}.json"
        if not file.exists():
            return False
        record = json.loads(file.read_text())
        return record["method"] == method and record["state"] == "running"

    def assert_gone(self) -> None:
        until(lambda: self.alive() == [], 20.0)


@pytest.fixture
def start(inputs: Inputs, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    made: list[Started] = []

    def begin(*more: str) -> Started:
        run_dir = tmp_path / "run"
        made.append(Started(inputs.overrides(run_dir, "reward.num_workers=1", *LONG, *more), run_dir))
        return made[-1]

    yield begin
    for run in made:
        for process in run.alive():
            process.kill()
        run.process.wait()


# Hundreds of steps, with a rollout long enough to be met.
LONG = ["trainer.total_training_steps=200", "data.max_response_length=64"]


def assert_nothing_half_written(run: Started) -> None:
    if run.run_dir.exists():
        metrics(run.run_dir)
        for name in ("plan.json", "trace.json"):
            if (run.run_dir / name).exists():
                json.loads((run.run_dir / name).read_text())
        assert temporary_files(run.run_dir) == []
    for export in run.run_dir.glob("global_step_*/*/*"):
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in export.iterdir()}


def assert_ended(run: Started, number: signal.Signals) -> None:
    assert run.process.wait(ENDS_WITHIN) == 128 + number, run.output.read_text()
    run.assert_gone()
    text = run.output.read_text()
    assert "Traceback" not in text
    assert text.strip().splitlines()[-1] == {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    assert_nothing_half_written(run)


MOMENTS: dict[str, tuple[Callable[[Started], bool], list[str]]] = {
    "importing": (lambda run: run.says("run folder"), []),
    "starting": (lambda run: (run.run_dir / "plan.json").exists(), []),
    "generating": (lambda run: run.doing("generate"), ["data.max_response_length=1000"]),
    "scoring": (lambda run: run.doing("infer"), []),
    "updating": (lambda run: run.doing("update"), []),
    "pushing": (lambda run: run.doing("push_weights"), []),
    "saving": (lambda run: run.doing("save"), ["trainer.save_freq=1"]),
    "between steps": (lambda run: run.says("step:2 "), ["trainer.save_freq=1"]),
}


def interrupt(start: Callable[..., Started], moment: str, number: signal.Signals) -> None:
    reached, more = MOMENTS[moment]
    run = start(*more)
    run.reach(lambda: reached(run))
    run.process.send_signal(number)
    assert_ended(run, number)


BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)


@pytest.mark.parametrize(
    ("moment", "number"), [("importing", signal.SIGTERM), ("updating", signal.SIGINT), ("saving", signal.SIGTERM)]
)
def test_one_process(start: Callable[..., Started], moment: str, number: signal.Signals):
    interrupt(start, moment, number)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("moment", MOMENTS)
def test_one_process_at_every_moment(start: Callable[..., Started], moment: str, number: signal.Signals):
    interrupt(start, moment, number)


@pytest.mark.slow
def test_while_a_reward_function_hangs(start, tmp_path: Path):
    run = start(*hanging_reward(tmp_path))
    run.reach((tmp_path / "called").exists)
    run.process.send_signal(signal.SIGINT)
    assert_ended(run, signal.SIGINT)


@pytest.mark.slow
def test_a_second_ctrl_c_changes_nothing(start):
    run = start("trainer.save_freq=1")
    run.reach(lambda: run.doing("update"))
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    code = run.process.wait(ENDS_WITHIN)
    assert code in (130, -signal.SIGINT), run.output.read_text()
    run.assert_gone()
    assert_nothing_half_written(run)


def test_kill_while_a_reward_function_hangs(start, tmp_path: Path):
    run = start(*hanging_reward(tmp_path))
    run.reach((tmp_path / "called").exists)
    run.process.kill()
    run.process.wait()
    run.assert_gone()


def hanging_reward(tmp_path: Path) -> list[str]:
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    return [
        f"reward.custom_reward_function.path={tmp_path}/slow.py",
        f"reward.custom_reward_function.reward_kwargs={{flag: {tmp_path}/called}}",
        "reward.timeout=7200",
    ]


# Two nodes of two ranks on local Ray nodes ---------------------------------------------------------------------------

NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.save_freq=1"]


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("moment", ["nodes start", "ranks start", "generating", "updating", "saving"])
def test_two_nodes(start, moment: str, number: signal.Signals):
    run = start(*NODES)
    reached = {
        "nodes start": lambda: (run.run_dir / "plan.json").exists(),
        "ranks start": lambda: run.says("started 2 local Ray nodes"),
        "generating": lambda: run.doing("generate", rank=1),
        "updating": lambda: run.doing("update", rank=1),
        "saving": lambda: run.doing("save", rank=1),
    }
    run.reach(reached[moment])
    run.process.send_signal(number)
    assert_ended(run, number)


@pytest.mark.parametrize("moment", [pytest.param("ranks start", marks=pytest.mark.slow), "update"])
def test_two_nodes_and_a_killed_driver(start, moment: str):
    run = start(*NODES)
    run.reach(lambda: run.says("started 2 local Ray nodes") if moment == "ranks start" else run.doing(moment, rank=1))
    run.process.kill()
    run.process.wait()
    run.assert_gone()
