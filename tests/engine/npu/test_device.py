"""Asking for a device that is not there gives one line that says what was looked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from corral.engine import device
from corral.engine.device import plugin, require
from corral.engine.distributed import device_of
from corral.engine.rank import Rank
from corral.errors import ConfigError
from tests.engine.npu.mapping import npu_on_cpu

MINOR = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No device files, and no memory of a plugin of another test."""
    monkeypatch.setattr(device, "DEVICES", tmp_path)
    plugin.cache_clear()
    yield
    plugin.cache_clear()
    sys.modules.pop("torch_npu", None)


def refusal(name: str = "npu", count: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        require(name, count)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def package(folder: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torch_npu.py").write_text(content)
    monkeypatch.syspath_prepend(folder)


def test_without_the_package(tmp_path: Path) -> None:
    assert refusal() == (
        f"trainer.device=npu: looked for {tmp_path}/davinci[0-9]*: none; torch_npu: not installed; install "
        f"torch-npu=={MINOR}.*, or set trainer.device=cpu"
    )


def test_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    assert "davinci[0-9]*: 2; torch_npu: not installed" in refusal()


def test_a_package_for_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "__version__ = '2.1.0.post3'", monkeypatch)
    assert f"torch_npu 2.1.0.post3: made for torch 2.1, and this is torch {torch.__version__}" in refusal()


def test_a_package_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "raise ImportError('libhccl.so: cannot open\\nmore')", monkeypatch)
    assert "torch_npu: does not load (libhccl.so: cannot open); see docs/ascend.md" in refusal()


def test_a_rank_is_told_the_same() -> None:
    with pytest.raises(ConfigError, match="torch_npu: not installed"):
        device_of(Rank(device="npu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_type_that_torch_knows(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert refusal("cuda", 4) == (
        f"trainer.device=cuda: looked for {tmp_path}/nvidia[0-9]*: 1; torch {torch.__version__}: sees 0 devices, and 4 "
        "are needed; run where they are, or set trainer.device=cpu"
    )


def test_cpu_is_always_there() -> None:
    require("cpu", 8)
    assert plugin("cpu") is None


def test_the_standin_fits_this_torch() -> None:
    with npu_on_cpu() as standin:
        assert plugin("npu") is standin
