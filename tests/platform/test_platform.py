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


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
    ],
)
def test_the_peak_of_a_device_by_its_name(name, tera):
    assert platform("cuda").peak(name) == tera * 1e12


def test_a_device_nobody_knows_has_no_peak():
    assert platform("cuda").peak("Tesla V100-SXM2-32GB") is None
    assert platform("cuda").peak("NVIDIA RTX A4000") is None  # neither an A40 nor an A400
    assert platform("cpu").peak("x86_64") is None
    assert platform("npu").peak("Ascend910B2") == 354e12
