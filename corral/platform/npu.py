"""Ascend NPU."""

from corral.platform.facts import Platform

NPU = Platform(
    device="npu",
    ray_resource="NPU",
    backend="cpu:gloo,npu:hccl",
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    ray_noset="RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    compute_dtype="bfloat16",
    device_files="davinci[0-9]*",
)
