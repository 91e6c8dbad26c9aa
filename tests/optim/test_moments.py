"""Moments of 16 and 8 bits: rounding, blocks, noise."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.optim.moments import Int8Moment, Noise, moment
from tests.examples import examples


@given(row=st.sampled_from([50, 64, 67, 768, 1000]), rows=st.integers(1, 5), seed=st.integers(0, 1000))
@settings(max_examples=examples(40))
def test_int8_moments_survive_a_checkpoint_in_any_pieces(row: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for squared in (False, True):
        values = torch.randn(row * rows, generator=generator) ** (4 if squared else 1)
        values[torch.rand(row * rows, generator=generator) < 0.1] = 0
        first, second = (moment("int8", row * rows, row, squared) for _ in range(2))
        assert isinstance(first, Int8Moment)
        first.store(0, values, None)
        loaded = first.load(0, torch.empty(row * rows)).clone()
        edges = sorted({0, row * rows, *torch.randint(row * rows, (4,), generator=generator).tolist()})
        pieces = list(pairwise(edges))
        for index in torch.randperm(len(pieces), generator=generator).tolist():
            a, b = pieces[index]
            second.store(a, loaded[a:b], None)
        assert torch.equal(second.load(0, torch.empty(row * rows)), loaded)
        a, b = pieces[len(pieces) // 2]
        assert torch.equal(second.load(a, torch.empty(b - a)), loaded[a:b])
        # A code is off by half a step at most: relative to a block's largest value.
        scale = values.view(-1, first.block).abs().amax(1, keepdim=True)
        error = (loaded - values).view(-1, first.block).abs() / scale.clamp(min=1e-30)
        assert error.max() <= 1.01 / (127 if not squared else 64)
        assert not ((loaded == 0) & (values > 0)).any() or not squared


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_frugal_moments_round_without_bias(kind: str) -> None:
    """A decay too small to show in one rounding shows on the average of many."""
    numel = 1 << 15
    stored = moment("bf16" if kind == "bf16" else "int8", numel, 256, squared=True)
    noise = Noise(numel)
    values = 0.5 + 0.5 * torch.rand(numel, generator=torch.Generator().manual_seed(0))
    values.view(-1, 256)[:, 0] = 1.0
    stored.store(0, values, None)
    before = stored.load(0, torch.empty(numel)).clone()
    for step in range(20):
        noise.draw(step)
        stored.store(0, stored.load(0, torch.empty(numel)) * 0.999, noise.at(0, numel))
    after = stored.load(0, torch.empty(numel))
    assert float(after.double().mean() / before.double().mean()) == pytest.approx(0.999**20, rel=1e-3)


def test_noise_depends_on_the_place_in_the_whole_tensor() -> None:
    noise = Noise(1000)
    noise.draw(3)
    assert torch.equal(noise.at(65_000, 1000)[600:900], noise.at(65_600, 300))
    assert torch.equal(noise.at(65_536 * 5 + 7, 10), noise.at(7, 10))


def test_bf16_moments_restore_as_they_were() -> None:
    stored = moment("bf16", 100, 10, squared=False)
    values = torch.randn(100).bfloat16().float()
    stored.store(0, values, None)
    assert torch.equal(stored.load(0, torch.empty(100)), values)
