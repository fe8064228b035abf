"""Ascend NPU. What of this has met a real device, and what has not: docs/ascend.md."""

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
    averages=False,  # HCCL itself has sum, product, minimum and maximum
    plugin="torch_npu",
    dtypes=("float32", "bfloat16"),  # the fused kernels have no float64
    forks_after_import=False,  # torch_npu may touch the runtime when it is imported, and cannot start it in a fork
    allocator="PYTORCH_NPU_ALLOC_CONF",
    # Rows of many lengths fragment the default allocator.
    environment={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
    # Sums of the collectives, and of matrix products over k, in a fixed order.
    peaks={"910B": 354.0},
    deterministic={"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"},
)
