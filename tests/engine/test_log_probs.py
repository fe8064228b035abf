"""Log-probs and entropies against plain Python in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from corral.engine.log_probs import log_probs_and_entropy, sum_pi_squared


def plain(logits: list[float], target: int, temperature: float) -> tuple[float, float]:
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    total = top + math.log(sum(math.exp(x - top) for x in scaled))
    return scaled[target] - total, -sum(math.exp(x - total) * (x - total) for x in scaled)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_against_plain_python(temperature: float) -> None:
    logits = torch.randn(6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    targets = torch.tensor([0, 3, 10, 5, 5, 2])
    log_probs, entropy = log_probs_and_entropy(logits, targets, temperature, True)
    assert entropy is not None
    for row in range(6):
        expected = plain(logits[row].tolist(), int(targets[row]), temperature)
        assert float(log_probs[row]) == pytest.approx(expected[0], abs=1e-12)
        assert float(entropy[row]) == pytest.approx(expected[1], abs=1e-12)


def test_half_precision_logits_give_single_precision_results() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]], dtype=torch.bfloat16)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([1]), 1.0, True)
    assert entropy is not None
    assert (log_probs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert float(log_probs[0]) == pytest.approx(plain([2.0, -1.0, 0.5], 1, 1.0)[0], abs=1e-6)


def test_both_are_differentiable() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def both(x: torch.Tensor) -> torch.Tensor:
        log_probs, entropy = log_probs_and_entropy(x, torch.tensor([4, 0, 2]), 0.7, True)
        assert entropy is not None
        return log_probs + entropy

    assert torch.autograd.gradcheck(both, (logits,))


def test_no_tokens() -> None:
    log_probs, entropy = log_probs_and_entropy(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), 1.0, False)
    assert (log_probs.shape, entropy) == ((0,), None)


@pytest.mark.parametrize("rows", [1, 4, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_sum_of_squares_however_it_is_cut(rows: int, temperature: float) -> None:
    logits = torch.randn(6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    for row, squares in enumerate(sum_pi_squared(logits, temperature, rows=rows).tolist()):
        expected = sum(math.exp(plain(logits[row].tolist(), k, temperature)[0]) ** 2 for k in range(11))
        assert squares == pytest.approx(expected, abs=1e-12)


def test_sum_of_squares_at_its_ends() -> None:
    assert sum_pi_squared(torch.zeros(1, 8), 1.0).tolist() == pytest.approx([1 / 8])
    assert sum_pi_squared(torch.tensor([[300.0, 0.0]], dtype=torch.bfloat16), 1.0).tolist() == [1.0]
    assert sum_pi_squared(torch.zeros(0, 7), 1.0).shape == (0,)
