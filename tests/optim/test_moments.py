"""Moments of 16 and 8 bits: rounding, blocks, noise.

Masters split into a shared bf16 copy and private low halves.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.optim.master_weights import PairedWeights, SplitWeights
from aliquot.optim.moments import Int8Moment, Noise, moment
from aliquot.optim.sizes import low_bytes
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


def floats_of(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


KINDS = pytest.mark.parametrize("kind", [SplitWeights, PairedWeights])


@KINDS
def test_split_master_holds_ties_and_neighbours(kind: type[SplitWeights]) -> None:
    """All 65,536 bf16 values but those that are not finite, each with the ties above it and what lies beside them."""
    high = torch.arange(-0x8000, 0x8000, dtype=torch.int64) * 0x10000
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = floats_of(high + low)
        values = values[values.isfinite() & (values.abs() < 3.38e38)]  # rounding up the largest gives infinity
        weights = kind(torch.empty(len(values), dtype=torch.bfloat16))
        weights.store(0, values)
        loaded = weights.load(0, torch.empty(len(values)))
        assert torch.equal(loaded.view(torch.int32), values.view(torch.int32))


@KINDS
def test_shared_copy_rounds_ties_away_from_zero(kind: type[SplitWeights]) -> None:
    values = torch.randn(110_000)
    values = values[values.view(torch.int32) & 0xFFFF != 0x8000][:100_000]
    ties = floats_of((torch.arange(0x3F80, 0x4080) << 16) + 0x8000)
    values = torch.cat([values, ties, -ties])
    high, other = torch.empty(2, len(values), dtype=torch.bfloat16)
    kind(high, [other]).store(0, values)
    assert torch.equal(high[:100_000], values[:100_000].bfloat16())  # no tie: as torch rounds
    assert torch.equal(high[100_000:].float().abs(), floats_of(torch.arange(0x3F81, 0x4081) << 16).repeat(2))
    assert torch.equal(high, other)


@KINDS
@given(numel=st.integers(1, 9), edges=st.lists(st.integers(0, 9), max_size=4), seed=st.integers(0, 99))
@settings(max_examples=examples(60))
def test_split_master_is_exact_in_any_pieces(kind: type[SplitWeights], numel: int, edges: list[int], seed: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    memory = torch.zeros(low_bytes(numel), dtype=torch.uint8)
    weights = kind(torch.zeros(numel, dtype=torch.bfloat16), low=memory if seed % 2 else None)
    cuts = sorted({0, numel, *(edge for edge in edges if edge < numel)})
    for a, b in pairwise(cuts):
        weights.store(a, values[a:b].clone())
    assert torch.equal(weights.load(0, torch.empty(numel)), values)
    for a, b in pairwise(cuts):
        assert torch.equal(weights.load(a, torch.empty(b - a)), values[a:b])
