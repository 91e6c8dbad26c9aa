"""Weights split into a bf16 copy and what it lacks, frugal moments, and the update in blocks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.optim import adamw
from aliquot.optim.adamw import BlockedAdamW, FlatShard
from aliquot.optim.master_weights import PairedWeights, SplitWeights, WholeWeights
from aliquot.optim.moments import Int8Moment, Noise, block_numel, moment
from aliquot.optim.sizes import low_bytes
from aliquot.optim.squared_norm import on_device, squared_norms
from tests.examples import examples


def floats_of(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


KINDS = pytest.mark.parametrize("kind", [SplitWeights, PairedWeights])


@KINDS
def test_a_split_master_holds_every_tie_and_its_neighbours(kind: type[SplitWeights]) -> None:
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
def test_the_shared_copy_is_the_master_rounded_ties_away_from_zero(kind: type[SplitWeights]) -> None:
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
def test_a_split_master_in_any_pieces(kind: type[SplitWeights], numel: int, edges: list[int], seed: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    memory = torch.zeros(low_bytes(numel), dtype=torch.uint8)
    weights = kind(torch.zeros(numel, dtype=torch.bfloat16), low=memory if seed % 2 else None)
    cuts = sorted({0, numel, *(edge for edge in edges if edge < numel)})
    for a, b in pairwise(cuts):
        weights.store(a, values[a:b].clone())
    assert torch.equal(weights.load(0, torch.empty(numel)), values)
    for a, b in pairwise(cuts):
        assert torch.equal(weights.load(a, torch.empty(b - a)), values[a:b])


@given(row=st.sampled_from([50, 64, 67, 768, 1000]), rows=st.integers(1, 5), seed=st.integers(0, 1000))
@settings(max_examples=examples(40))
def test_int8_moments_survive_a_checkpoint_bit_for_bit_in_any_pieces(row: int, rows: int, seed: int) -> None:
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


def test_blocks_divide_rows() -> None:
    assert [block_numel(n) for n in (1, 50, 256, 768, 11008, 14336, 67, 5003)] == [1, 50, 256, 256, 256, 256, 67, 5003]


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


def test_noise_belongs_to_the_place_in_the_whole_tensor() -> None:
    noise = Noise(1000)
    noise.draw(3)
    assert torch.equal(noise.at(65_000, 1000)[600:900], noise.at(65_600, 300))
    assert torch.equal(noise.at(65_536 * 5 + 7, 10), noise.at(7, 10))


@pytest.mark.parametrize("kind", ["whole", "split", "paired", pytest.param("compiled", marks=pytest.mark.long)])
def test_equals_torch_adamw_with_clipping(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(adamw, "BLOCK", 1 << 7)  # several blocks and a remainder
    start = torch.randn(1000).bfloat16().float()
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    gradient = torch.zeros(1000)
    if kind != "whole":
        split = SplitWeights if kind == "split" else PairedWeights
        weights: WholeWeights | SplitWeights = split(torch.zeros(1000, dtype=torch.bfloat16))
    else:
        weights = WholeWeights(torch.zeros(1000))
    weights.store(0, start)
    moments = [moment("fp32", 1000, 10, squared) for squared in (False, True)]
    shard = FlatShard(weights, *moments, gradient, True, 0)
    ours = BlockedAdamW((0.9, 0.95), 1e-8, 0.1, compiled=kind == "compiled")
    for step in range(5):
        gradient.copy_(torch.randn(1000, generator=torch.Generator().manual_seed(step)))
        theirs.grad = gradient.clone()
        norm = float(torch.nn.utils.clip_grad_norm_([theirs], 3.0))
        optimizer.step()
        for sums in (squared_norms, on_device):  # a GPU's way is tried on CPU tensors
            assert sums([gradient, torch.empty(0), gradient])[::2] == pytest.approx([norm**2] * 2, rel=2e-6)
        ours.step([shard], 1e-2, norm, 3.0)
    # The split master is exact, so both are torch's kernel on the same numbers, clipped by a factor rounded alike.
    torch.testing.assert_close(weights.load(0, torch.empty(1000)), theirs.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_frugal_states_do_not_depend_on_how_a_tensor_is_sharded(states: str) -> None:
    start, gradient = torch.randn(4, 512), torch.randn(4, 512)

    def run(edges: list[int]) -> torch.Tensor:
        shards = []
        for a, b in pairwise(edges):
            weights = WholeWeights(start.view(-1)[a * 512 : b * 512].clone())
            moments = [moment(states, (b - a) * 512, 512, squared) for squared in (False, True)]
            own = gradient.view(-1)[a * 512 : b * 512].bfloat16()
            shards.append(FlatShard(weights, *moments, own, True, a * 512))
        optimizer = BlockedAdamW((0.9, 0.999), 1e-8, 0.0, frugal=True)
        for _ in range(6):
            optimizer.step(shards, 1e-2, 1.0, None)
        return torch.cat([shard.weights.load(0, torch.empty(shard.weights.numel)) for shard in shards])

    assert torch.equal(run([0, 4]), run([0, 1, 3, 4]))


def test_bf16_moments_restore_as_they_were() -> None:
    stored = moment("bf16", 100, 10, squared=False)
    values = torch.randn(100).bfloat16().float()
    stored.store(0, values, None)
    assert torch.equal(stored.load(0, torch.empty(100)), values)
