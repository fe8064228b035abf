"""A reward function that fails in a whole run: one line, and what it was."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    return float('nan')", "returned nan; a reward has to be finite"),
        ("    return float('-inf')", "returned -inf; a reward has to be finite"),
        ("    raise KeyError('answer')", "compute_score raised KeyError: 'answer'"),
        ("    return 'good'", "'good'"),
        ("    import os; os._exit(3)", "exit code 3"),
    ],
)
def test_a_reward_that_fails(refused, tmp_path: Path, body: str, said: str):
    file = tmp_path / "mine.py"
    file.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n{body}\n")
    line = refused(1, f"reward.custom_reward_function.path={file}", started=True)
    assert said in line
    assert "reward of row" in line


def test_a_reward_file_that_cannot_be_imported(refused, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("import nothing_of_this_name\n")
    line = refused(1, f"reward.custom_reward_function.path={file}", started=True)
    assert "cannot be imported: ModuleNotFoundError" in line
