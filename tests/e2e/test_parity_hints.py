"""What the report says about the first difference: on which ranks, in which mini-batches, by which factor; the docs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from corral.e2e.case import Parity
from corral.e2e.parity import compare, parity_checks
from corral.e2e.parity_causes import CAUSES
from corral.e2e.parity_metrics import IGNORED, ROUNDING
from tests.e2e.phase_files import SHAPES, Change, Step, write_run

TIGHT = Parity(args=[], rtol=1e-9, atol=1e-9)
DOCS = Path(__file__).parents[2] / "docs" / "parity.md"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("hints") / "one", world=1, steps=1)


def hint(reference: Path, folder: Path, change: Change) -> str:
    report = compare(reference, write_run(folder / "many", change, steps=1), TIGHT, folder / "divergence")
    assert report.first is not None
    assert any(report.hint in check.detail for check in parity_checks(report))
    return report.hint


def on_samples(name: str, samples: list[int], change=lambda array: array + 0.5) -> Change:
    """Changes all tokens of some samples."""

    def apply(step: Step) -> None:
        of_token = np.repeat(np.arange(8), step.tensors["response_lengths"])
        chosen = np.isin(of_token, samples)
        step.tensors[name] = np.where(chosen, change(step.tensors[name]), step.tensors[name])

    return apply


@pytest.mark.parametrize(
    ("name", "samples", "words"),
    [
        ("rollout_log_probs", [5], "all of them were computed by rank 5: 1 of the 1 it had"),
        (
            "old_log_probs",
            [4, 5],
            "all of them were computed by ranks 4 to 5 (one sequence-parallel group): 2 of the 2 it had",
        ),
        ("values", [1, 2, 7], "they were computed by ranks 0, 2, 6, and not by 4"),
        ("rollout_log_probs", [4, 6], "all of them were computed on node 1"),
        ("old_log_probs", list(range(8)), "all 8 samples differ; they are on all ranks"),
        ("values", [4, 6], "all of them are in mini-batch 1 of the critic"),
        ("advantages", [0, 7], "2 of 8 samples differ; "),
    ],
)
def test_where_the_samples_were_computed(name: str, samples: list[int], words: str, reference: Path, tmp_path: Path):
    assert words in hint(reference, tmp_path, on_samples(name, samples))


def test_what_the_driver_computes_is_of_no_rank(reference: Path, tmp_path: Path):
    assert "rank" not in hint(reference, tmp_path, on_samples("advantages", [3])).split("usual causes")[0]


@pytest.mark.parametrize(("of", "words"), [(0, "only first tokens"), (-1, "only last tokens")])
def test_tokens_at_an_end_of_their_responses(of: int, words: str, reference: Path, tmp_path: Path):
    def change(step: Step) -> None:
        ends = np.cumsum(step.tensors["response_lengths"])
        at = ends - 1 if of else np.concatenate([[0], ends[:-1]])
        step.tensors["response_mask"][at] = False

    assert words in hint(reference, tmp_path, change)


@pytest.mark.parametrize(
    ("kind", "words"), [("float32", "rounding to float32"), ("float16", "rounding to bfloat16 or float16")]
)
def test_rounding_is_told(kind: str, words: str, reference: Path, tmp_path: Path):
    rounded = on_samples("old_log_probs", [0, 3], lambda array: array.astype(kind).astype("float64"))
    assert words in hint(reference, tmp_path, rounded)


def test_a_few_wide_gaps_are_no_rounding(reference: Path, tmp_path: Path):
    def dropped(array: np.ndarray) -> np.ndarray:
        return np.where(np.arange(array.size) % 5 == 0, array + 1.0, array * (1 + 5e-3))

    words = hint(reference, tmp_path, on_samples("old_log_probs", list(range(8)), dropped))
    assert "rounding" not in words


def scaled(*factors: float) -> Change:
    """The gradients of one optimizer step, each tensor by a factor."""

    def change(step: Step) -> None:
        for param, factor in zip(SHAPES, factors, strict=True):
            step.tensors[f"gradients/actor/0/{param}"] = step.tensors[f"gradients/actor/0/{param}"] * factor

    return change


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((2.0,) * 3, "one factor explains all: found = 2 * reference, exactly the sequence-parallel degree"),
        ((0.5,) * 3, "one factor explains all: reference = 2 * found, exactly the sequence-parallel degree"),
        ((4.0,) * 3, "found = 4 * reference, exactly the data-parallel degree"),
        ((0.125,) * 3, "reference = 8 * found, exactly the world size"),
        ((-1.0,) * 3, "reference = -1 * found"),
        ((3.0,) * 3, "one factor explains all: found = 3 * reference;"),
        ((3.7, 4.1, 4.4), "about 4.1 times the reference, but by no one factor"),
        ((1 + 1e-7, 1 + 2e-7, 1 + 3e-7), "rounding to float32"),
        ((1.0, 1.0, 5.0), "1 of 3 tensors differ (head.weight)"),
    ],
)
def test_how_gradients_differ(factors: tuple[float, ...], words: str, reference: Path, tmp_path: Path):
    assert words in hint(reference, tmp_path, scaled(*factors))


def test_a_factor_is_told_from_summaries_too(tmp_path: Path):
    one = write_run(tmp_path / "one", world=1, steps=1, mode="summary")
    many = write_run(tmp_path / "many", scaled(2.0, 2.0, 2.0), steps=1, mode="summary")
    assert "found = 2 * reference" in compare(one, many, TIGHT, tmp_path / "divergence").hint


def test_a_rank_whose_part_stands_out(reference: Path, tmp_path: Path):
    def change(step: Step) -> None:
        for rank, part in enumerate(step.update("critic", 1)["parts"]):
            part["stats"]["loss"] = 1.0 + 0.01 * rank + 50.0 * (rank == 5)

    words = hint(reference, tmp_path, change)
    assert "the part of ranks 4 to 5 of loss stands out" in words
    same_world = write_run(tmp_path / "eight", steps=1)
    report = compare(same_world, tmp_path / "many", TIGHT, tmp_path / "divergence")
    assert "of loss stands out" not in report.hint  # the parts of all ranks are others


def test_a_mean_that_each_rank_takes_over_its_own_tokens(reference: Path, tmp_path: Path):
    def change(step: Step) -> None:
        scaled(3.1, 4.5, 6.2)(step)
        for part in step.update("actor", 0)["parts"]:
            part["stats"]["share"] *= 4.1

    report = compare(reference, write_run(tmp_path / "many", change, steps=1), TIGHT, tmp_path / "divergence")
    assert report.first is not None
    assert report.first.name == "actor/0/statistics"
    assert "share is 4.1 times the reference, near the data-parallel degree: each rank seems to divide" in report.hint
    assert "about 4.5 times the reference, but by no one factor" in report.hint  # of the gradients that follow


def test_later_phases_say_what_they_follow(reference: Path, tmp_path: Path):
    def change(step: Step) -> None:
        step.tensors["values"] += 1
        step.tensors["returns"] += 1

    report = compare(reference, write_run(tmp_path / "many", change, steps=1), TIGHT, tmp_path / "divergence")
    details = {check.name: check.detail for check in parity_checks(report) if not check.ok}
    assert details["values"].startswith("first difference of the runs")
    assert details["advantages"].startswith("follows the first difference: values of step 1")


def test_the_docs_have_every_cause_and_every_metric_that_is_not_compared():
    text = DOCS.read_text()
    for name, cause in CAUSES.items():
        assert f"| `{name}` | {cause} |" in text
    for prefix, reason in {**IGNORED, **ROUNDING}.items():
        assert f"| `{prefix}` | {reason} |" in text
