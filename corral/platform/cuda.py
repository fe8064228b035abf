"""NVIDIA GPU."""

from corral.platform.facts import Platform

CUDA = Platform(
    device="cuda",
    ray_resource="GPU",
    backend="cpu:gloo,cuda:nccl",
    visible_devices="CUDA_VISIBLE_DEVICES",
    compute_dtype="bfloat16",
    device_files="nvidia[0-9]*",
    probe=32.0,
    fast_enough=4096.0,
    of_no_use=64.0,
    deterministic={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
)
