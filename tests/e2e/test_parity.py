"""The parity gate on made-up records: every difference is found, at its place, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from corral.e2e.case import Parity
from corral.e2e.parity import compare, parity_checks
from tests.e2e.phase_files import (
    SHAPES,
    TIGHT,
    TOKEN_FLOATS,
    Step,
    add,
    at_step,
    compared,
    write_run,
)

# Tensors in the order in which a step computes them: phase and row of each.
SAMPLE_PLACES = {
    "scores": ("rewards", "scores"),
    "rollout_log_probs": ("log_probs", "rollout_log_probs"),
    "old_log_probs": ("log_probs", "old_log_probs"),
    "ref_log_probs": ("log_probs", "ref_log_probs"),
    "values": ("values", "values"),
    "rewards": ("rewards", "rewards"),
    "advantages": ("advantages", "advantages"),
    "returns": ("advantages", "returns"),
}
UPDATES = [(role, k) for role in ("critic", "actor") for k in range(2)]
PLACES = (
    SAMPLE_PLACES
    | {f"gradients/{r}/{k}/{p}": ("gradients", f"{r}/{k}/gradients") for r, k in UPDATES for p in SHAPES}
    | {f"weights/{r}/{p}": ("weights", f"{r}/weights") for r in ("critic", "actor") for p in SHAPES}
)
# The order in which they are told apart: a role's tensors of one kind make one row.
ROWS = list(dict.fromkeys(PLACES.values()))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("parity") / "one", world=1)


# Equal -------------------------------------------------------------------------------------------------------------


def test_equal_runs_are_equal_in_every_phase_and_nothing_is_dumped(reference: Path, tmp_path: Path):
    report = compared(reference, tmp_path, lambda step: None)
    assert report.first is None
    assert report.hint == ""
    assert report.dumped is None
    assert not (tmp_path / "divergence").exists()
    checks = parity_checks(report)
    assert [check.name for check in checks] == [
        *("samples", "rewards", "log_probs", "values", "advantages", "gradients", "weights", "metrics", "metric names")
    ]
    assert all(check.ok and check.group == "parity" for check in checks)


def test_every_number_is_counted_once(reference: Path, tmp_path: Path):
    report = compared(reference, tmp_path, lambda step: None)
    tensors = [load_file(file) for file in sorted(reference.glob("phases/*.safetensors"))]
    of_phase = {
        "values": ("values",),
        "log_probs": ("rollout_log_probs", "old_log_probs", "ref_log_probs"),
        "rewards": ("scores", "rewards"),
        "advantages": ("advantages", "returns"),
        "samples": ("prompt_ids", "response_ids", "response_mask"),
    }
    for phase, names in of_phase.items():
        assert report.compared[phase] == sum(step[name].size for step in tensors for name in names)
    weights = sum(array.size for step in tensors for name, array in step.items() if name.startswith("weights/"))
    assert report.compared["weights"] == weights


# One entry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLACES)
def test_one_wrong_entry_is_named_by_phase_and_row(name: str, reference: Path, tmp_path: Path):
    report = compared(reference, tmp_path, add(name, 1e-3, at=2, number=2))
    first = report.first
    assert first is not None
    assert (first.step, first.phase, first.name) == (2, *PLACES[name])
    assert first.gap == pytest.approx(1e-3)
    assert [row for row in report.rows if not row.ok] == [first]
    assert [check.name for check in parity_checks(report) if not check.ok] == [first.phase]


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(list(PLACES)),
    number=st.integers(1, 2),
    place=st.integers(0, 10**6),
    sign=st.sampled_from((-1, 1)),
    size=st.one_of(st.floats(0, 0.99), st.floats(1.01, 1e9)),
)
def test_a_change_above_tolerance_is_found_first_and_none_below(
    reference: Path, name: str, number: int, place: int, sign: int, size: float
):
    here = load_file(reference / "phases" / f"step-{number:06d}.safetensors")
    at = place % here[name].size
    value = float(here[name].reshape(-1)[at])
    amount = sign * size * (TIGHT.atol + TIGHT.rtol * abs(value))
    with TemporaryDirectory() as folder:
        report = compared(reference, Path(folder), add(name, amount, at, number))
    if size < 1:
        assert report.first is None
        return
    first = report.first
    assert first is not None
    assert (first.step, first.phase, first.name) == (number, *PLACES[name])
    assert [row for row in report.rows if not row.ok] == [first]
    assert repr(value) in first.reference
    if name in SAMPLE_PLACES:
        lengths = here["response_lengths"] if name != "scores" else np.ones(len(here["row"]), dtype=int)
        sample = int(np.searchsorted(lengths.cumsum(), at, side="right"))
        assert (first.row, first.sample) == (here["row"][sample], here["sample_index"][sample])


NAMED: dict[str, tuple[Callable[[Step], float], Callable[[Step, float], object]]] = {
    "actor/loss": (lambda s: s.metrics["actor/loss"], lambda s, x: s.metrics.update({"actor/loss": x})),
    "actor/1/statistics": (
        lambda s: sum(part["stats"]["share"] for part in s.update("actor", 1)["parts"]),
        lambda s, x: s.update("actor", 1).update(parts=[{"rank": 0, "stats": {"share": x, "loss": _loss(s)}}]),
    ),
    "critic/0/denominators": (
        lambda s: s.update("critic", 0)["denominators"]["tokens"],
        lambda s, x: s.update("critic", 0)["denominators"].update(tokens=x),
    ),
    "critic/1/grad_norm": (
        lambda s: s.update("critic", 1)["grad_norm"],
        lambda s, x: s.update("critic", 1).update(grad_norm=x),
    ),
}


def _loss(step: Step) -> float:
    return sum(part["stats"]["loss"] for part in step.update("actor", 1)["parts"])


@pytest.mark.parametrize("size", [-1e6, -1.01, -0.99, 0.99, 1.01, 1e6])
@pytest.mark.parametrize("name", NAMED)
def test_numbers_with_names_are_held_to_the_same_tolerance(name: str, size: float, reference: Path, tmp_path: Path):
    read, write = NAMED[name]

    def change(step: Step) -> None:
        value = read(step)
        write(step, value + size * (TIGHT.atol + TIGHT.rtol * abs(value)))

    report = compared(reference, tmp_path, at_step(2, change))
    if abs(size) < 1:
        assert report.first is None
        return
    assert report.first is not None
    assert (report.first.step, report.first.name) == (2, name)
    assert [row for row in report.rows if not row.ok] == [report.first]


@settings(max_examples=12, deadline=None)
@given(wrong=st.sets(st.tuples(st.integers(1, 2), st.sampled_from(list(PLACES))), min_size=2, max_size=5))
def test_of_many_differences_the_first_computed_is_first(reference: Path, wrong: set[tuple[int, str]]):
    def change(step: Step) -> None:
        for number, name in wrong:
            add(name, 0.5, number=number)(step)

    with TemporaryDirectory() as folder:
        report = compared(reference, Path(folder), change)
    expected = min((number, ROWS.index(PLACES[name])) for number, name in wrong)
    assert report.first is not None
    assert (report.first.step, ROWS.index((report.first.phase, report.first.name))) == expected
    assert next(check.name for check in parity_checks(report) if not check.ok) == report.first.phase


# What is no tensor of floats ---------------------------------------------------------------------------------------


STRUCTURE: dict[str, tuple[Callable[[Step], object], str, str]] = {
    "a prompt token": (add("prompt_ids", 1), "samples", "prompts"),
    "the data row": (add("row", 1), "samples", "prompts"),
    "the sample's index": (add("sample_index", 5), "samples", "prompts"),
    "the group": (add("group", 9), "samples", "prompts"),
    "a response token": (add("response_ids", 1), "samples", "responses"),
    "the mask": (lambda s: s.tensors["response_mask"].__setitem__(0, False), "samples", "response_mask"),
    "mini-batch": (lambda s: s.update("actor", 1)["rows"].__setitem__(0, 99), "gradients", "actor/1/mini-batch"),
    "tokens": (
        lambda s: s.update("critic", 0)["denominators"].update(tokens=1),
        "gradients",
        "critic/0/denominators",
    ),
    "a statistic": (
        lambda s: s.update("actor", 0)["parts"][3]["stats"].update(loss=9.0),
        "gradients",
        "actor/0/statistics",
    ),
    "grad_norm": (lambda s: s.update("actor", 0).update(grad_norm=9.0), "gradients", "actor/0/grad_norm"),
    "skipped": (lambda s: s.update("actor", 1).update(skipped=True), "gradients", "actor/1/skipped"),
    "a step less": (lambda s: s.updates.pop(), "gradients", "optimizer steps"),
    "a metric": (lambda s: s.metrics.update({"actor/loss": 9.0}), "metrics", "actor/loss"),
}


@pytest.mark.parametrize("what", STRUCTURE)
def test_other_differences_are_named(what: str, reference: Path, tmp_path: Path):
    change, phase, name = STRUCTURE[what]
    report = compared(reference, tmp_path, at_step(1, change))
    assert report.first is not None
    assert (report.first.step, report.first.phase, report.first.name) == (1, phase, name)


def test_other_tokens_are_shown_and_later_fields_compared_where_tokens_agree(reference: Path, tmp_path: Path):
    def change(step: Step) -> None:
        """The first response loses its last token, and with it an entry of every field."""
        end = int(step.tensors["response_lengths"][0]) - 1
        for name in ("response_ids", "response_mask", *TOKEN_FLOATS):
            step.tensors[name] = np.delete(step.tensors[name], end)
        step.tensors["response_lengths"][0] -= 1
        step.tensors["values"][-1] += 1

    report = compared(reference, tmp_path, at_step(1, change))
    assert report.first is not None
    assert (report.first.name, report.first.row, report.first.sample, report.first.rank) == ("responses", 10, 0, 0)
    assert "ends after" in report.first.found
    assert [row.name for row in report.rows if not row.ok] == ["responses", "values"]


# Metrics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["reference", "found"])
def test_a_metric_of_one_side_only_is_silently_missing(side: str, reference: Path, tmp_path: Path):
    def change(step: Step) -> None:
        if side == "found":
            del step.metrics["critic/loss"]
        else:
            step.metrics["critic/new"] = 1.0

    report = compared(reference, tmp_path, at_step(2, change))
    assert report.first is not None
    assert getattr(report.first, side) == "silently missing"
    failed = {check.name: check for check in parity_checks(report) if not check.ok}
    assert failed.keys() == {"metrics", "metric names"}
    which = "critic/loss is silently missing in the run" if side == "found" else "critic/new is silently missing in the"
    assert which in failed["metric names"].found


@pytest.mark.parametrize("name", ["timing_s/step", "perf/throughput", "global_seqlen/max", "mine/thing"])
def test_metrics_that_may_differ_are_not_compared(name: str, reference: Path, tmp_path: Path):
    parity = TIGHT.model_copy(update={"ignore": ["mine/"]})
    report = compared(reference, tmp_path, lambda step: step.metrics.update({name: 7.0}), parity)
    assert report.first is None


def test_without_phases_metrics_are_compared_and_the_report_says_so(tmp_path: Path):
    one = write_run(tmp_path / "one", world=1, mode="none")
    report = compared(one, tmp_path, lambda step: None, mode="none")
    assert report.first is None
    assert report.compared.keys() == {"metrics"}
    assert "only metrics were compared" in report.hint
    assert [check.found for check in parity_checks(report) if check.name == "phase records"] == [
        "none: only metrics were compared"
    ]
    other = compare(one, write_run(tmp_path / "x", add_metric, mode="none"), TIGHT, tmp_path / "divergence")
    assert other.first is not None
    assert other.first.name == "actor/loss"
    assert "only metrics were compared" in other.hint


def test_phases_that_were_to_be_kept_and_are_not_are_no_proof(tmp_path: Path):
    one, many = (write_run(tmp_path / name, mode="none") for name in ("one", "many"))
    plan = json.loads((many / "plan.json").read_text())
    (many / "plan.json").write_text(json.dumps(plan | {"trainer": {"record_phases": "full"}}))
    report = compare(one, many, TIGHT, tmp_path / "divergence")
    bad = [check for check in parity_checks(report) if not check.ok]
    assert [check.name for check in bad] == ["samples"]
    assert "none, though plan.json says full" in bad[0].found


@pytest.mark.parametrize("ignore", [[], ["actor/"]])
def test_nothing_that_could_be_compared_is_no_proof(ignore: list[str], tmp_path: Path):
    line = {"step": 1, "perf/x": 1.0} | ({"actor/loss": 1.0} if ignore else {})
    for number, name in enumerate(("one", "many")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line | {"perf/x": number}) + "\n")
    report = compare(tmp_path / "one", tmp_path / "many", Parity(args=[], ignore=ignore), tmp_path / "divergence")
    bad = [check for check in parity_checks(report) if not check.ok]
    assert [str(check) for check in bad] == [
        "numbers: expected some to compare, found no number that both runs have; every metric is one that may differ"
    ]


def test_half_a_surrogate_pair_and_a_long_text_are_shown_and_cut(tmp_path: Path):
    def change(step: Step) -> None:
        step.metrics.update({"\ud800": step.number, "text": "x" * 10_000})

    one = write_run(tmp_path / "one", world=1)
    report = compare(one, write_run(tmp_path / "other", change), TIGHT, tmp_path / "divergence")
    names = {row.name: row for row in report.rows}
    assert "silently missing" in names["\\ud800"].reference
    assert len(names["text"].found) < 600
    assert json.loads(report.model_dump_json())


def add_metric(step: Step) -> None:
    step.metrics["actor/loss"] += 1


def test_a_text_metric_is_compared_as_text(tmp_path: Path):
    one = write_run(tmp_path / "one", lambda step: step.metrics.update(note="a"), world=1)
    same = compare(one, write_run(tmp_path / "same", lambda s: s.metrics.update(note="a")), TIGHT, tmp_path / "d")
    assert same.first is None
    other = compare(one, write_run(tmp_path / "other", lambda s: s.metrics.update(note="b")), TIGHT, tmp_path / "d")
    assert other.first is not None
    assert (other.first.name, other.first.reference, other.first.found) == ("note", "'a'", "'b'")


# Tensors -----------------------------------------------------------------------------------------------------------


def test_in_single_precision_a_tensor_is_judged_by_the_norm_of_the_difference(tmp_path: Path):
    single = Parity(args=[], rtol=1e-4, atol=0.0)
    name = "weights/actor/embed.weight"
    one = write_run(tmp_path / "one", world=1, dtype="float32", steps=1)
    norm = float(np.linalg.norm(load_file(one / "phases" / "step-000001.safetensors")[name]))
    for size, ok in ((0.5, True), (2.0, False)):
        many = write_run(tmp_path / str(size), add(name, size * 1e-4 * norm), dtype="float32", steps=1)
        report = compare(one, many, single, tmp_path / "divergence")
        assert (report.first is None) == ok


def test_summaries_see_values_order_and_signs(tmp_path: Path):
    one = write_run(tmp_path / "one", world=1, mode="summary")

    def reversed_order(step: Step) -> None:
        step.tensors["weights/actor/head.weight"] = step.tensors["weights/actor/head.weight"][::-1]

    for k, (change, name, text) in enumerate(
        [
            (add("gradients/actor/1/embed.weight", 0.1), "actor/1/gradients", "of embed.weight"),
            (reversed_order, "actor/weights", "dot of head.weight"),
        ]
    ):
        report = compare(one, write_run(tmp_path / str(k), change, mode="summary"), TIGHT, tmp_path / "divergence")
        assert report.first is not None
        assert report.first.name == name
        assert text in report.first.reference
    same = compare(one, write_run(tmp_path / "full", mode="full"), TIGHT, tmp_path / "divergence")
    assert same.first is None  # of a full and a summary side, the summaries


def test_both_sides_are_dumped(reference: Path, tmp_path: Path):
    name = "gradients/actor/1/head.weight"
    report = compared(reference, tmp_path, add(name, 0.25, at=3))
    assert report.dumped == "divergence"
    sides = [load_file(tmp_path / "divergence" / f"{side}.safetensors") for side in ("reference", "found")]
    assert sides[0].keys() == sides[1].keys() == {f"gradients/actor/1/{param}" for param in SHAPES}
    assert (sides[1][name] - sides[0][name]).reshape(-1)[3] == pytest.approx(0.25)
    index = json.loads((tmp_path / "divergence" / "index.json").read_text())
    entry = next(entry for entry in index["tensors"] if entry["name"] == name)
    assert (entry["differing"], entry["at"]) == (1, [1, 1])
    assert len(index["updates"]["found"][0]["parts"]) == 8


def test_a_dump_that_cannot_be_written_does_not_hide_the_difference(reference: Path, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    many = write_run(tmp_path / "many", add("values", 1.0))
    report = compare(reference, many, TIGHT, tmp_path / "file" / "divergence")
    assert report.first is not None
    assert report.dumped is None
    assert "could not be kept" in report.hint
