"""CPU: every process is one logical device."""

from corral.platform.facts import Platform

CPU = Platform(
    device="cpu",
    ray_resource="CPU",
    backend="gloo",
    visible_devices=None,
    compute_dtype="float32",
    device_files=None,
    probe=0.25,
    fast_enough=20.0,
    of_no_use=4.0,
)
