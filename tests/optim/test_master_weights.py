"""Masters split into a shared bf16 copy and private low halves."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.optim.master_weights import PairedWeights, SplitWeights
from aliquot.optim.sizes import low_bytes
from tests.examples import examples


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
