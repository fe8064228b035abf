"""*.optim.*: AdamW and its learning-rate schedule."""

# ruff: noqa: RUF009 (key and section build dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from corral.config.section import Section, key


@dataclass
class Optim(Section):
    lr: float = key(1e-6, "Peak learning rate.")
    betas: list[float] = key([0.9, 0.999], "Decay of the two running averages of AdamW.")
    weight_decay: float = key(0.01, "Decoupled weight decay.")
    clip_grad: float = key(1.0, "Largest norm of the whole gradient.")
    lr_warmup_steps: int = key(-1, "Iterations of linear warm-up; -1: use lr_warmup_steps_ratio.", "steps")
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up as a share of all iterations.")
    lr_scheduler_type: str = key("constant", "Shape after the warm-up: constant, linear, cosine.")
    min_lr_ratio: float = key(0.0, "Lowest learning rate of a decaying schedule, as a share of lr.")
    num_cycles: float = key(0.5, "Waves of the cosine until the horizon; 0.5 ends at the lowest learning rate.")
