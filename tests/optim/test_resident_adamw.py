"""AdamW of a single GPU against torch.optim.AdamW, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from aliquot.optim.resident_adamw import ResidentAdamW, ResidentWeight

SIZES = (64, 257, 64)
DECAYS = (True, False, False)
RATIOS = (1.0, 1.0, 4.0)


def resident(dtype: torch.dtype) -> list[ResidentWeight]:
    torch.manual_seed(0)
    weights = []
    for size, decays, ratio in zip(SIZES, DECAYS, RATIOS, strict=True):
        master = torch.randn(size)
        compute = master if dtype == torch.float32 else master.to(dtype)
        weights.append(ResidentWeight(compute, master, torch.zeros(size), torch.zeros(size), decays, ratio))
    return weights


def gradients(dtype: torch.dtype, step: int) -> list[Tensor]:
    torch.manual_seed(step)
    return [torch.randn(size).to(dtype) for size in SIZES]


def state(weights: Sequence[ResidentWeight]) -> list[Tensor]:
    return [values.clone() for w in weights for values in (w.compute, w.master, w.exp_avg, w.exp_avg_sq)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_updates_equal_those_of_torch(dtype: torch.dtype, compiled: bool) -> None:
    weights = resident(dtype)
    expected = [torch.nn.Parameter(weight.master.clone()) for weight in weights]
    groups = [
        {"params": [p], "weight_decay": 0.1 if w.decays else 0.0, "lr": 1e-2 * w.rate_ratio}
        for p, w in zip(expected, weights, strict=True)
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    ours = ResidentAdamW(weights, (0.9, 0.95), 1e-8, 0.1, compiled)
    for step in range(4):
        for parameter, gradient in zip(expected, gradients(dtype, step), strict=True):
            parameter.grad = gradient.float()
        norm = torch.nn.utils.clip_grad_norm_(expected, 1.0)
        theirs.step()
        assert float(ours.step(gradients(dtype, step), 1e-2, 1.0)) == pytest.approx(float(norm), rel=1e-6)
    for parameter, weight in zip(expected, weights, strict=True):
        torch.testing.assert_close(weight.master, parameter.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weight.compute, weight.master.to(dtype))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gradient_that_is_not_finite_changes_nothing(compiled: bool) -> None:
    weights = resident(torch.bfloat16)
    before = state(weights)
    bad = gradients(torch.bfloat16, 0)
    bad[1][3] = torch.nan
    norm = ResidentAdamW(weights, (0.9, 0.95), 1e-8, 0.1, compiled).step(bad, 1e-2, 1.0)
    assert not torch.tensor(float(norm)).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, state(weights), strict=True))
