"""A run on Ascend, seen from a machine that has none: its plan prints, and the run itself is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from corral.config import generation
from corral.config.plan import Plan
from corral.config.show import render
from corral.errors import ConfigError
from corral.platform import platform
from corral.trainer.run import open_run
from tests.config.conftest import base, files, install, no_vllm, plan_of
from tests.engine.npu.mapping import npu_on_cpu
from tests.trainer.runs import Inputs, metrics, samples, train_here

__all__ = ["base", "files", "no_vllm", "plan_of"]  # fixtures

NPU = "trainer.device=npu"
pytestmark = pytest.mark.skipif(bool(list(Path("/dev").glob("davinci[0-9]*"))), reason="there is an NPU here")


def test_the_plan_needs_no_npu(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(NPU, "trainer.nnodes=2", "trainer.n_gpus_per_node=4", RAY_ADDRESS="head:6379")
    said = render(plan)
    assert "8 = 2 nodes × 4 devices, npu, on Ray at head:6379" in said
    assert "bfloat16 on float32 weights; fused modules" in said
    assert "npu: this path has been tested without a device only; docs/ascend.md says how" in said
    assert plan.actor.model.fused_modules
    assert plan.critic is not None
    assert not plan_of(NPU, "critic.model.fused_modules=False").critic.model.fused_modules  # type: ignore[union-attr]


@pytest.mark.parametrize("key", ["actor_rollout_ref.actor.fsdp_config.dtype", "critic.fsdp.model_dtype"])
def test_float64_is_refused(key: str, plan_of: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=f"{key}=float64: npu trains in float32 or bfloat16"):
        plan_of(NPU, f"{key}=fp64")


def test_a_plan_with_vllm_says_what_the_nodes_need(
    plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = "actor_rollout_ref.rollout.name=vllm"
    said = render(plan_of(NPU, vllm))
    assert "name=vllm: vllm and vllm_ascend are not installed here; every node of the run needs it" in said
    assert plan_of(NPU, vllm, "actor_rollout_ref.rollout.fallback=native").rollout.name == "native"
    monkeypatch.setattr(generation, "detect", lambda: platform("npu"))
    with pytest.raises(ConfigError, match=r"name=vllm on npu: vllm and vllm_ascend are not installed; install it"):
        plan_of(NPU, vllm)


@pytest.mark.parametrize("trains", ["expandable_segments:True", None])
def test_the_allocator_goes_together_with_vllm(
    plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, trains: str | None
) -> None:
    install(monkeypatch, "vllm", "vllm_ascend")
    if trains:
        with pytest.raises(ConfigError, match=r"PYTORCH_NPU_ALLOC_CONF=expandable_segments:True: vllm cannot give"):
            plan_of(NPU, PYTORCH_NPU_ALLOC_CONF=trains)
    else:
        assert plan_of(NPU).rollout.name == "vllm"
        assert plan_of(NPU).rollout.environment == {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}


def test_the_run_says_what_was_looked_for(plan_of: Callable[..., Plan]) -> None:
    """Before data or model are read: the fixtures' are none."""
    said = r"^trainer.device=npu: looked for /dev/davinci\[0-9\]\*: none; torch_npu: "
    with pytest.raises(ConfigError, match=said), open_run(plan_of(NPU), {}):
        pass


@pytest.fixture
def unchanged() -> Iterator[None]:
    """What a run in this process changes for good is put back."""
    before, rotary = dict(os.environ), modeling_qwen3.apply_rotary_pos_emb
    yield
    torch.use_deterministic_algorithms(False)
    modeling_qwen3.apply_rotary_pos_emb = rotary
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("unchanged")
def test_a_run_on_the_npus_path_is_the_run_on_cpu(inputs: Inputs, tmp_path: Path) -> None:
    """With the device type npu on tensors in host memory: attention, norms, SwiGLU and rotary embedding by the fused
    kernels, in generation, scoring and training."""
    dtypes = [f"{block}.dtype=float32" for block in ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp")]
    same = [*dtypes, "data.max_response_length=8", "reward.num_workers=1", "trainer.full_determinism=True"]
    assert train_here(inputs.overrides(tmp_path / "cpu", *same, "trainer.device=cpu")) == 0
    with npu_on_cpu() as standin:
        assert train_here(inputs.overrides(tmp_path / "npu", *same, NPU)) == 0
        assert set(standin.CALLS) == {"npu_fusion_attention", "npu_rms_norm", "npu_swiglu", "npu_rotary_mul"}
    assert torch.are_deterministic_algorithms_enabled()
    assert (os.environ["HCCL_DETERMINISTIC"], os.environ["PYTORCH_NPU_ALLOC_CONF"]) == (
        "true",
        "expandable_segments:True",
    )
    (npu,), (cpu,) = metrics(tmp_path / "npu"), metrics(tmp_path / "cpu")
    assert npu.keys() == cpu.keys()
    for name in cpu:
        if not name.startswith(("timing_s/", "perf/", "timing_per_token_ms/")) and "/perf/" not in name:
            assert npu[name] == pytest.approx(cpu[name], rel=1e-4, abs=1e-5), name
    assert samples(tmp_path / "npu", 1) != []
    assert [s["output"] for s in samples(tmp_path / "npu", 1)] == [s["output"] for s in samples(tmp_path / "cpu", 1)]


@pytest.mark.slow
def test_as_a_command(base: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "corral", "train", *base, NPU],

        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: trainer.device=npu: looked for ")
    assert done.stdout.startswith("plan\n")
