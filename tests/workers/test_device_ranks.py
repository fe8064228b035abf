"""Ranks on accelerators, as far as it shows without one: each has its own device, and none starts before the fork."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from corral.engine import distributed
from corral.engine.distributed import connect, device_of
from corral.engine.rank import Rank
from corral.trainer.run import PRELOAD
from corral.workers.ray_launcher import _rank_env, _too_few

_TRAPPED = """
import importlib, sys, torch
calls = []
def trap(name):
    def called(*args, **kwargs):
        calls.append(name)
        return 0
    return called
def attribute(name):
    if name.startswith("_cuda"):
        return trap(name)
    raise AttributeError(name)
torch.cuda._is_compiled = lambda: True
torch._C.__getattr__ = attribute
for name in dir(torch._C):  # those of a build with CUDA; one without has none
    if name.startswith("_cuda"):
        setattr(torch._C, name, trap(name))
torch.cuda._lazy_init = trap("_lazy_init")
torch.cuda.init = trap("init")
for module in sys.argv[1:]:
    importlib.import_module(module)
before = list(calls)
torch.cuda.is_available()
print(before, len(calls) > len(before))
"""


def test_what_is_imported_before_the_fork_leaves_cuda_alone() -> None:
    """A process that has asked CUDA for anything cannot be forked. The last word says that the traps work."""
    command = [sys.executable, "-c", _TRAPPED, *PRELOAD, "transformers.models.qwen3.modeling_qwen3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[] True"


def test_each_rank_sees_one_device() -> None:
    ranks = [Rank(r, 8, node=r // 4, local_rank=r % 4, device="cuda", master="10.0.0.1:2345") for r in range(8)]
    names = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    seen = [_rank_env(rank, "CUDA_VISIBLE_DEVICES", names)["CUDA_VISIBLE_DEVICES"] for rank in ranks]
    assert seen == names * 2
    assert "CUDA_VISIBLE_DEVICES" not in _rank_env(ranks[0], "CUDA_VISIBLE_DEVICES", [""])  # Ray was told to leave it


def test_a_node_that_shows_too_few_devices_is_named() -> None:
    line = _too_few("node-1", "CUDA_VISIBLE_DEVICES", ["0", "1"], 4)
    assert "node-1: CUDA_VISIBLE_DEVICES=0,1 shows 2 devices, and 4 ranks" in line


@pytest.mark.parametrize(("shown", "index"), [(1, 0), (8, 3)], ids=["its own", "all of the node"])
def test_the_device_of_a_rank(shown: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: shown)
    assert device_of(Rank(3, 8, local_rank=3, device="cuda")) == torch.device("cuda", index)


def test_the_device_is_set_before_anybody_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every rank of a node would first allocate on device 0, and NCCL would find two ranks on it."""
    happened: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: happened.append(("set_device", device.index)))
    monkeypatch.setattr(torch.cuda, "init", lambda: happened.append("init"))
    monkeypatch.setattr(distributed, "rendezvous", lambda rank: dist.HashStore())
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **rest: happened.append(("group", backend)))
    connect(Rank(2, 4, local_rank=2, device="cuda", master="127.0.0.1:1"))
    assert happened == [("set_device", 2), "init", ("group", "cpu:gloo,cuda:nccl")]
