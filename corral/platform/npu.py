"""Ascend NPU."""

from corral.platform.facts import Platform

NPU = Platform(
    device="npu",
    ray_resource="NPU",
    backend="cpu:gloo,npu:hccl",
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    compute_dtype="bfloat16",
    device_files="davinci[0-9]*",
    probe=32.0,
    fast_enough=4096.0,
    of_no_use=64.0,
)
