"""How much faster the vectorised algorithms are than straightforward loops over samples and tokens.

python benchmarks/algorithms.py [--threads N] [--rounds N]

Each pair runs on the same inputs, alternating, and has to give the same result before it is timed. Sizes are samples ×
longest response; lengths are uniform between half of the longest and the longest, prompts have 8 samples, and in the
"tools" lines the policy did not write one token in ten. The loops are what one would write without tensors: passes over
plain lists, taken from the tensors and put back. Ends with 1 when GAE at the larger size is not 20 times as fast as its
loop.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from corral.algorithms.advantages import ESTIMATORS, AdvantageInput
from corral.algorithms.masked import whiten
from corral.batch import Batch
from corral.config.plan import MicroBatches
from corral.engine.packed import pack
from corral.engine.packing import balance, split, workload

SIZES = ((64, 256), (512, 4096))
RANKS = (8, 64)
PROMISED = 20.0


@dataclass(frozen=True)
class Pair:
    """One claim: two ways to the same result. `rounded` results may differ by rounding, others not at all."""

    name: str
    ours: Callable[[], object]
    loop: Callable[[], object]
    rounded: bool = True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {processor()}, {options.rounds} alternating rounds")
    print(f"{'':26} {'size':>10} {'corral, ms':>26} {'loop, ms':>30} {'loop / corral':>14}")
    slowdown = {}
    for samples, longest in SIZES:
        for pair in pairs(samples, longest):
            check(pair)
            ours, loop = measure(pair, options.rounds)
            ratio = statistics.median(loop) / statistics.median(ours)
            slowdown[pair.name, samples] = ratio
            print(f"{pair.name:26} {samples:>4} × {longest:<4} {spread(ours):>25} {spread(loop):>30} {ratio:>13.1f}×")
    return 0 if slowdown["gae", SIZES[-1][0]] >= PROMISED else 1


def measure(pair: Pair, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of both, A B A B ..., so that a busy machine slows both."""
    ours, loop = [], []
    for _ in range(rounds):
        for function, times in ((pair.ours, ours), (pair.loop, loop)):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return ours, loop


def check(pair: Pair) -> None:
    """Both give the same; also the warm-up of both."""
    ours, loop = pair.ours(), pair.loop()
    if pair.rounded:
        torch.testing.assert_close(ours, loop, rtol=1e-4, atol=1e-4)
    elif ours != loop:
        raise AssertionError(f"{pair.name}: the two results differ")


def spread(seconds: list[float]) -> str:
    milliseconds = [1000 * s for s in seconds]
    return f"{statistics.median(milliseconds):.2f} ({min(milliseconds):.2f} – {max(milliseconds):.2f})"


def processor() -> str:
    facts = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in facts.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def pairs(samples: int, longest: int) -> list[Pair]:
    batch = batch_of(samples, longest)
    given = AdvantageInput(
        rewards=batch.rewards,
        values=batch.values,
        mask=batch.response_mask,
        offsets=batch.response_offsets,
        group=batch.group,
        gamma=1.0,
        lam=0.95,
    )
    work = [workload(length) for length in batch.lengths]
    cut = split(batch.lengths, 1, MicroBatches(token_budget=16384, samples=None)).shares[0]
    plain = replace(given, mask=torch.ones_like(given.mask))
    return [
        Pair("gae", lambda: ESTIMATORS["gae"](plain), lambda: gae_loop(plain)),
        Pair("gae, tools", lambda: ESTIMATORS["gae"](given), lambda: gae_loop(given)),
        Pair("grpo, tools", lambda: ESTIMATORS["grpo"](given)[0], lambda: group_loop(given, grpo_rule)),
        Pair("rloo, tools", lambda: ESTIMATORS["rloo"](given)[0], lambda: group_loop(given, rloo_rule)),
        Pair("whitening", lambda: whiten(given.rewards, given.mask), lambda: whiten_loop(given.rewards, given.mask)),
        *(balancing(work, ranks) for ranks in RANKS),
        Pair("packing", lambda: packed(batch, cut), lambda: [pack_loop(batch, micro) for micro in cut]),
    ]


def balancing(work: list[int], ranks: int) -> Pair:
    def sums(parts: list[list[int]]) -> list[int]:
        return sorted(sum(work[i] for i in part) for part in parts)

    return Pair(
        f"balancing, {ranks} ranks",
        lambda: sums(balance(work, ranks)),
        lambda: sums(differencing_loop(work, ranks)),
        rounded=False,
    )


def batch_of(samples: int, longest: int) -> Batch:
    generator = torch.Generator().manual_seed(samples)
    lengths = torch.randint(longest // 2, longest + 1, (samples,), generator=generator)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    tokens = int(offsets[-1])
    mask = torch.rand(tokens, generator=generator) > 0.1
    rewards = 0.01 * torch.randn(tokens, generator=generator) * mask  # as with a KL in the reward
    rewards[offsets[1:] - 1] += torch.randint(0, 2, (samples,), generator=generator)
    prompts = torch.arange(samples + 1) * 64
    zeros = torch.zeros(samples, dtype=torch.int64)
    return Batch(
        prompt_ids=torch.randint(0, 1000, (int(prompts[-1]),), generator=generator),
        prompt_offsets=prompts,
        response_ids=torch.randint(0, 1000, (tokens,), generator=generator),
        response_offsets=offsets,
        response_mask=mask,
        row=zeros,
        sample_index=torch.arange(samples) % 8,
        group=torch.arange(samples) // 8,
        finish=zeros,
        is_padding=zeros.bool(),
        values=torch.randn(tokens, generator=generator),
        rewards=rewards,
    )


def gae_loop(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    rewards, values, mask = batch.rewards.tolist(), batch.values.tolist(), batch.mask.tolist()
    offsets, gamma, decay = batch.offsets.tolist(), batch.gamma, batch.gamma * batch.lam
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for start, end in pairwise(offsets):
        next_value = advantage = waiting = 0.0
        for t in range(end - 1, start - 1, -1):
            if not mask[t]:
                waiting += rewards[t]
                continue
            value = values[t]
            advantage = rewards[t] + waiting + gamma * next_value - value + decay * advantage
            advantages[t] = advantage
            returns[t] = advantage + value
            next_value, waiting = value, 0.0
    return whitened(advantages, mask), torch.tensor(returns)


def whiten_loop(x: Tensor, mask: Tensor) -> Tensor:
    return whitened(x.tolist(), mask.tolist())


def whitened(xs: list[float], mask: list[bool]) -> Tensor:
    total, count = 0.0, 0
    for x, keep in zip(xs, mask, strict=True):
        if keep:
            total += x
            count += 1
    mean, squares = total / count, 0.0
    for x, keep in zip(xs, mask, strict=True):
        if keep:
            squares += (x - mean) ** 2
    scale = (squares / (count - 1) + 1e-8) ** -0.5
    return torch.tensor([(x - mean) * scale if keep else 0.0 for x, keep in zip(xs, mask, strict=True)])


def grpo_rule(score: float, scores: list[float]) -> float:
    return (score - statistics.fmean(scores)) / (statistics.stdev(scores) + 1e-6)


def rloo_rule(score: float, scores: list[float]) -> float:
    return score - (sum(scores) - score) / (len(scores) - 1)


def group_loop(batch: AdvantageInput, rule: Callable[[float, list[float]], float]) -> Tensor:
    rewards, mask, offsets = batch.rewards.tolist(), batch.mask.tolist(), batch.offsets.tolist()
    groups: dict[int, list[float]] = {}
    scores = []
    for group, start, end in zip(batch.group.tolist(), offsets[:-1], offsets[1:], strict=True):
        score, acted = 0.0, False
        for t in range(start, end):
            acted = acted or mask[t]
            if acted:
                score += rewards[t]
        scores.append(score)
        groups.setdefault(group, []).append(score)
    advantages = []
    for group, score, start, end in zip(batch.group.tolist(), scores, offsets[:-1], offsets[1:], strict=True):
        advantage = rule(score, groups[group])
        for t in range(start, end):
            advantages.append(advantage if mask[t] else 0.0)
    return torch.tensor(advantages)


def differencing_loop(work: list[int], ranks: int) -> list[list[int]]:
    """Karmarkar and Karp's rule by the book: look through all partial solutions for the two of largest spread."""
    order = sorted(range(len(work)), key=lambda i: -work[i])
    partial = [[(work[i], [i])] + [(0, []) for _ in range(ranks - 1)] for i in order]
    while len(partial) > 1:
        first, second = (partial.pop(widest(partial)) for _ in range(2))
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        partial.append(sorted(merged, key=lambda part: -part[0]))
    return [items for _, items in partial[0]]


def widest(partial: list[list[tuple[int, list[int]]]]) -> int:
    return max(range(len(partial)), key=lambda k: partial[k][0][0] - partial[k][-1][0])


def packed(batch: Batch, cut: list[list[int]]) -> list[list[Tensor]]:
    rows = [pack(batch, micro) for micro in cut]
    return [[r.input_ids[0], r.position_ids[0], r.predict_at, r.token_at, r.targets] for r in rows]


def pack_loop(batch: Batch, micro: list[int]) -> list[Tensor]:
    ids, positions, predict_at, token_at, targets = [], [], [], [], []
    for sample in micro:
        prompt, response = batch.prompt(sample).tolist(), batch.response(sample).tolist()
        start, first = len(ids), int(batch.response_offsets[sample])
        for at, token in enumerate(prompt + response):
            ids.append(token)
            positions.append(at)
        for j, token in enumerate(response):
            predict_at.append(start + len(prompt) - 1 + j)
            token_at.append(first + j)
            targets.append(token)
    return [torch.tensor(x) for x in (ids, positions, predict_at, token_at, targets)]


if __name__ == "__main__":
    sys.exit(main())
