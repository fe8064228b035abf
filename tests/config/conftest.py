"""Model folder and parquet files that pass every check made without reading them, and the smallest run on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from corral.config import generation
from corral.config.plan import Plan
from corral.config.resolve import resolve

QWEN3_06B = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
}


def write_model(folder: Path, **changes: object) -> Path:
    """A model folder with Qwen3-0.6B's numbers, some of them changed; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3_06B, **changes}))
    return folder


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Of vllm and vllm_ascend these, and no others, as far as plans can see."""
    engines = {"vllm", "vllm_ascend"}
    assert engines.issuperset(packages)
    found = {name: find_spec("json") for name in packages}
    monkeypatch.setattr(generation, "find_spec", lambda name: found.get(name) if name in engines else find_spec(name))


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are those of a machine without vllm, unless a test installs it."""
    install(monkeypatch)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with model/, train.parquet and test.parquet."""
    write_model(tmp_path / "model")
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").write_bytes(b"PAR1 rows and footer PAR1")
    return tmp_path


@pytest.fixture
def base(files: Path) -> list[str]:
    """The fewest keys a run needs: 16 prompts in mini-batches of 8, on cpu."""
    return [
        f"data.train_files={files}/train.parquet",
        f"actor_rollout_ref.model.path={files}/model",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "trainer.device=cpu",
    ]


@pytest.fixture
def plan_of(base: list[str]) -> Callable[..., Plan]:
    """The plan of the smallest run with more keys and, by keyword, environment variables."""

    def plan(*overrides: str, **environ: str) -> Plan:
        return resolve([*base, *overrides], environ).plan

    return plan
