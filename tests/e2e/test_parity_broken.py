"""The parity gate on broken records: what is no number, files that are missing, cut, or do not fit together."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.e2e.parity import compare, parity_checks
from corral.e2e.result import ParityReport
from tests.e2e.phase_files import TIGHT, Change, Step, compared, drop_sample, write_run


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("parity") / "one", world=1)


# Not a number ------------------------------------------------------------------------------------------------------


def _statistic(value: float) -> Change:
    return lambda step: step.update("actor", 0)["parts"][0]["stats"].update(loss=value)


def _set(name: str, value: float) -> Change:
    return lambda step: step.tensors[name].reshape(-1).__setitem__(1, value)


STRANGE = {
    "values": ("values", lambda value: _set("values", value)),
    "scores": ("scores", lambda value: _set("scores", value)),
    "gradients": ("critic/0/gradients", lambda value: _set("gradients/critic/0/head.weight", value)),
    "weights": ("actor/weights", lambda value: _set("weights/actor/head.weight", value)),
    "statistics": ("actor/0/statistics", _statistic),
    "metrics": ("actor/loss", lambda value: lambda step: step.metrics.update({"actor/loss": value})),
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("place", STRANGE)
def test_what_is_not_finite_is_equal_to_nothing(place: str, both: bool, value: float, tmp_path: Path):
    name, make = STRANGE[place]
    one = write_run(tmp_path / "one", make(value) if both else lambda step: None, world=1, steps=1)
    report = compared(one, tmp_path, make(value), steps=1)
    assert report.first is not None
    assert report.first.name == name
    assert report.first.gap is None
    assert ("nan" if math.isnan(value) else "inf") in report.first.found
    ParityReport.model_validate_json(report.model_dump_json())


# Broken records ----------------------------------------------------------------------------------------------------


def test_phases_of_one_side_only(reference: Path, tmp_path: Path):
    report = compared(reference, tmp_path, lambda step: None, mode="none")
    assert report.first is not None
    assert (report.first.name, report.first.reference, report.first.found) == (
        *("phase records", "recorded", "not recorded"),
    )
    assert not parity_checks(report)[0].ok


def test_a_run_that_ended_early(reference: Path, tmp_path: Path):
    report = compared(reference, tmp_path, lambda step: None, steps=1)
    assert [(row.step, row.name) for row in report.rows if not row.ok] == [(2, "phase records"), (2, "metrics.jsonl")]


@pytest.mark.parametrize("name", ["metrics.jsonl", "phases/step-000001.json", "phases/step-000001.safetensors"])
@pytest.mark.parametrize("broken", ["reference", "found"])
def test_a_missing_or_truncated_file_is_a_failing_row(name: str, broken: str, reference: Path, tmp_path: Path):
    whole = write_run(tmp_path / "whole")
    for kind in ("missing", "truncated"):
        side = tmp_path / kind
        shutil.copytree(whole if broken == "found" else reference, side)
        content = (side / name).read_bytes()
        (side / name).unlink()
        if kind == "truncated":
            (side / name).write_bytes(content[:-20])
        pair = (reference, side) if broken == "found" else (side, whole)
        report = compare(*pair, TIGHT, tmp_path / "divergence")
        assert report.first is not None
        failing = [row for row in report.rows if not row.ok]
        assert {row.name for row in failing} <= {"metrics.jsonl", "phase records"}
        if name != "phases/step-000001.json" or kind == "truncated":
            assert any("cannot be read" in getattr(row, broken) for row in failing)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_file_is_a_crash(reference: Path, data: st.DataObject):
    with TemporaryDirectory() as folder:
        side = Path(folder) / "side"
        shutil.copytree(reference, side)
        file = data.draw(st.sampled_from(sorted(path for path in side.rglob("*") if path.is_file())))
        content = file.read_bytes()
        start = data.draw(st.integers(0, min(len(content), 3000)))
        junk = data.draw(st.binary(max_size=40))
        file.write_bytes(content[:start] + junk + content[start + data.draw(st.integers(0, 40)) :])
        for pair in ((reference, side), (side, reference), (side, side)):
            report = compare(*pair, TIGHT, Path(folder) / "divergence")
            parity_checks(report)
            ParityReport.model_validate_json(report.model_dump_json())


def _shapes(step: Step) -> None:
    step.tensors["weights/actor/head.weight"] = np.zeros((2, 2))


def _without(name: str) -> Change:
    return lambda step: step.tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        (_without("values"), "values", "silently missing"),
        (_without("response_ids"), "samples", "response_ids"),
        (_shapes, "actor/weights", "head.weight (2, 2)"),
        (drop_sample, "scores", "(7,)"),
        (lambda step: step.tensors["response_lengths"].__setitem__(0, 50), "samples", "do not fit"),
    ],
)
def test_records_that_do_not_fit_together(change: Change, name: str, text: str, reference: Path, tmp_path: Path):
    report = compared(reference, tmp_path, change)
    assert report.first is not None
    assert report.first.name == name
    assert text in report.first.found


def test_nothing_at_all(tmp_path: Path):
    report = compare(tmp_path / "no", tmp_path / "where", TIGHT, tmp_path / "divergence")
    assert report.first is not None
    assert report.first.name == "metrics.jsonl"
    assert not all(check.ok for check in parity_checks(report))
