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
    peaks={
        "GB200": 2500.0,
        "B200": 2250.0,
        "GH200": 989.0,
        "H200": 989.0,
        "H100 PCIe": 756.0,
        "H100 NVL": 835.0,
        "H100": 989.0,
        "H800": 989.0,
        "H20": 148.0,
        "A100": 312.0,
        "A800": 312.0,
        "A40": 150.0,
        "A30": 165.0,
        "A10G": 70.0,
        "A10": 125.0,
        "L40S": 362.0,
        "L40": 181.0,
        "L4": 121.0,
        "RTX 4090": 165.0,
        "RTX 3090": 71.0,
    },
)
