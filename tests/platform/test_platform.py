"""Device types from device files, and the facts that follow."""

from __future__ import annotations

import pytest

from corral.platform import PLATFORMS, detect, platform


@pytest.mark.parametrize(
    ("files", "device"),
    [
        ([], "cpu"),
        (["null", "nvidiactl", "nvidia-uvm", "nvidia-modeset"], "cpu"),
        (["davinci_manager", "hisi_hdc"], "cpu"),
        (["nvidiactl", "nvidia0"], "cuda"),
        (["nvidia3"], "cuda"),
        (["davinci_manager", "davinci0", "davinci15"], "npu"),
        (["nvidia0", "davinci0"], "npu"),
    ],
)
def test_detect(tmp_path, files, device):
    for name in files:
        (tmp_path / name).touch()
    assert detect(tmp_path).device == device


def test_facts():
    assert {name: facts.device for name, facts in PLATFORMS.items()} == {n: n for n in ("cpu", "cuda", "npu")}
    assert [platform(name).ray_resource for name in ("cpu", "cuda", "npu")] == ["CPU", "GPU", "NPU"]
    assert [platform(name).backend for name in ("cpu", "cuda", "npu")] == [
        "gloo",
        "cpu:gloo,cuda:nccl",
        "cpu:gloo,npu:hccl",
    ]
    assert platform("npu").visible_devices == "ASCEND_RT_VISIBLE_DEVICES"
    assert platform("cuda").visible_devices == "CUDA_VISIBLE_DEVICES"
    with pytest.raises(KeyError):
        platform("tpu")
