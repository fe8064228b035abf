"""scripts/gpu_check.py runs where there is no device, and says what does not hold."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_everything_that_applies_holds_on_the_cpu(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    assert gpu_check.main(["--device", "cpu", "--quick", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert report["holds"] is True
    assert {row["check"] for row in report["rows"] if row["check"].endswith(": seconds")} == {
        f"{check.__name__}: seconds" for check in gpu_check.CHECKS
    }
    assert sum(row["limit"] is not None for row in report["rows"]) >= 14
    assert not dist.is_initialized()


def test_what_does_not_hold_fails_the_whole(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(bench: object) -> None:
        raise RuntimeError("no kernel\nmore")

    def above(bench: object) -> None:
        bench.add("gap", 0.2, 0.1)  # type: ignore[attr-defined]

    def silent(bench: object) -> None:
        raise AssertionError

    def lost(bench: object) -> None:
        bench.add("gap", gpu_check.worst([0.1, math.nan, 0.0]), 1.0)  # type: ignore[attr-defined]

    for check, line in (
        (raising, "raising: RuntimeError"),
        (above, "gap"),
        (silent, "silent: AssertionError"),
        (lost, "gap"),
    ):
        monkeypatch.setattr(gpu_check, "CHECKS", (check,))
        assert gpu_check.main(["--device", "cpu", "--quick"]) == 1
        found = [row for row in capsys.readouterr().out.splitlines() if row.startswith(line)]
        assert [row.endswith("FAILED") for row in found] == [True]


def test_no_device_is_infrastructure(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpu_check.main([]) == 75
    assert "looked for" in capsys.readouterr().err
