"""The contract of import paths: what a user's estimator is given, may return, and what is said when it does not fit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from corral.algorithms.advantages import ESTIMATORS, AdvantageInput, estimator
from corral.algorithms.hooks import load
from corral.errors import ConfigError, DataError

GIVEN = {
    "rewards", "values", "mask", "offsets", "group", "gamma", "lam", "norm_by_std", "old_log_probs", "sum_pi_squared",
    "rollout_is_weights", "baseline", "components", "component_weights",
}  # fmt: skip


def batch() -> AdvantageInput:
    return AdvantageInput(
        rewards=torch.tensor([1.0, 2.0, 3.0]),
        values=None,
        mask=torch.tensor([True, False, True]),
        offsets=torch.tensor([0, 2, 3]),
        group=torch.tensor([0, 0]),
        gamma=1.0,
        lam=1.0,
    )


def write(folder: Path, body: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(f"import torch\n{body}\n")
    return file


def test_a_file_adds_an_estimator(tmp_path: Path) -> None:
    file = write(tmp_path, "def doubled(batch):\n    return 2 * batch.rewards.double(), batch.rewards")
    advantages, returns = estimator(f"{file}:doubled")(batch())
    assert advantages.tolist() == [2.0, 0.0, 6.0]
    assert returns.tolist() == [1.0, 0.0, 3.0]
    assert advantages.dtype == torch.float32
    assert {f.name for f in fields(AdvantageInput)} == GIVEN


def test_a_module_adds_an_estimator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "def same(batch):\n    return batch.rewards, batch.rewards", "corral_test_hook_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert estimator("corral_test_hook_module:same")(batch())[0].tolist() == [1.0, 0.0, 3.0]


def test_names_come_first_and_need_no_check() -> None:
    assert estimator("rloo") is ESTIMATORS["rloo"]


def test_an_object_of_the_registrys_type_fits_too(tmp_path: Path) -> None:
    file = write(tmp_path, "settings = {'a': 1}\nnumber = 3")
    assert load(f"{file}:settings", {"known": {"a": 0}}, "a.key") == {"a": 1}
    with pytest.raises(ConfigError, match=r"number is of type int, expected a function"):
        load(f"{file}:number", {"known": {"a": 0}}, "a.key")


def test_a_file_runs_once_and_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = write(tmp_path, "kept = []\ndef f(batch):\n    return kept")
    second = write(tmp_path / "other", "def f(batch):\n    return 2")
    assert load(f"{first}:f", {}, "key")(None) is load(f"{first}:f", {}, "key")(None)
    assert load(f"{second}:f", {}, "key")(None) == 2


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("grpoo", "algorithm.adv_estimator=grpoo is unknown; the nearest name is 'grpo'"),
        ("rlo", "the nearest name is 'rloo'"),
        (":f", "is unknown"),
        ("mine.py:", "is unknown"),
        ("{folder}/none.py:f", "no file {folder}/none.py"),
        ("{folder}/mine.py:g", "has no 'g'"),
        ("{folder}/mine.py:n", "n is of type int, expected a function"),
        ("{folder}/broken.py:f", "cannot be imported: ZeroDivisionError: division by zero"),
        ("{folder}/leaves.py:f", "cannot be imported: SystemExit: 3"),
        ("corral_no_such_module:f", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(tmp_path: Path, spec: str, said: str) -> None:
    write(tmp_path, "n = 3")
    write(tmp_path, "1 / 0", "broken.py")
    write(tmp_path, "raise SystemExit(3)", "leaves.py")
    with pytest.raises(ConfigError) as error:
        estimator(spec.format(folder=tmp_path))
    assert said.format(folder=tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "returned NoneType, expected (advantages, returns)"),
        ("(batch.rewards,)", "returned tuple, expected (advantages, returns)"),
        ("(batch.rewards[:2], batch.rewards)", "advantages are (2,), expected a tensor (3,)"),
        ("(batch.rewards, 1.0)", "returns are float, expected a tensor (3,)"),
        ("(batch.rewards / 0, batch.rewards)", "2 of 3 advantages are not finite"),
    ],
)
def test_a_result_that_does_not_fit_is_one_line(tmp_path: Path, returned: str, said: str) -> None:
    file = write(tmp_path, f"def f(batch):\n    return {returned}")
    with pytest.raises(DataError) as error:
        estimator(f"{file}:f")(batch())
    assert said in str(error.value)
    assert "\n" not in str(error.value)
