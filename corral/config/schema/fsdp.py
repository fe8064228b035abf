"""*.fsdp_config.* and critic.fsdp.*: how a model is held by the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from corral.config.section import Section, key


@dataclass
class Fsdp(Section):
    """A model that only scores (the reference)."""

    param_offload: bool = key(False, "Keep the parameters in host memory between phases.")
    model_dtype: str = key("float32", "Type of the master weights: float32, float64, bfloat16.")
    dtype: str | None = key(None, "Type of forward and backward; null: float32 on cpu, bfloat16 on cuda and npu.")
    reshard_after_forward: bool = key(True, "Free gathered parameters after forward and gather them again in backward.")
    fsdp_size: int = key(-1, "Ranks a parameter is sharded over; only -1 (all of them) is available.", "ranks")
    use_torch_compile: bool = key(False, "Compile the log-prob and entropy computation with torch.compile.")
    seed: int = key(42, "Seed of newly initialised weights (the value head).")


@dataclass
class TrainedFsdp(Fsdp):
    """A model that is trained."""

    optimizer_offload: bool = key(False, "Keep the optimizer state in host memory between updates.")
