"""What usually causes a first difference at a place. docs/parity.md shows the same table."""

from __future__ import annotations

CAUSES = {
    "phase records": "one run kept no phases, was cut short, or its disk was full",
    "samples": "damaged records, or another batch size, n, or filter of groups",
    "prompts": "other data files, another data seed, order or epoch of the loader, or another chat template",
    "responses": "another seed or random stream, other sampling settings, or an engine without the trainer's weights",
    "scores": "a reward function that depends on the clock, on chance or on its process, or other text for it",
    "rollout_log_probs": "an engine with other weights (stale after an update), another dtype, or a wrong cache",
    "old_log_probs": "packing or positions, dropout left on, another dtype, or weights that are not whole on a rank",
    "response_mask": "a mask that is off by one, or rollout correction that rejects other tokens",
    "ref_log_probs": "the reference model: another folder, dtype or packing, or weights not whole on a rank",
    "values": "the critic: dropout left on, another dtype or packing, values read one token off, another head",
    "rewards": "the KL in the reward: its coefficient, its estimator or the mask",
    "advantages": "the estimator: groups, mask, discount, or a mean that is taken per rank",
    "returns": "the estimator: groups, mask, discount, or a mean that is taken per rank",
    "optimizer steps": "another mini-batch size, number of epochs or critic warm-up",
    "mini-batch": "mini-batches that depend on the split: each has to be a fixed set of prompts",
    "denominators": "tokens or samples that are counted per rank, or with another mask",
    "statistics": "the loss: mask, denominators per rank or per micro-batch, dropout left on, dtype of one rank",
    "gradients": "the backward pass: a missing or doubled factor (sequence-parallel degree, world size, micro-batches)",
    "grad_norm": "a norm of a part of the model, or one taken after clipping",
    "skipped": "one run met a gradient that is not finite",
    "weights": "the optimizer: learning rate, decay, clipping, lost state, parameters stepped twice or never",
    "metrics": "the metric itself: averaged per rank, or with another denominator",
    "silently missing": "a phase that was left out, or a metric that only rank 0 or one branch reports",
    "metrics.jsonl": "a run that ended early, or a full disk",
}
