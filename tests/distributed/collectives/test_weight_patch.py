"""Patches of weights: exact whatever changed, short where little did, and never taken for what they are not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives import weight_patch
from aliquot.distributed.collectives.weight_patch import WeightPatches, max_patch_bytes

PATCHES = WeightPatches()


def bits(weights: Tensor) -> Tensor:
    return weights.view(torch.int16)


def weights(numel: int, seed: int = 0) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def message(old: Tensor, new: Tensor) -> Tensor:
    room = torch.zeros(max_patch_bytes(new.numel()), dtype=torch.uint8)
    return room[: PATCHES.encode(old, new, room)]


def changed(old: Tensor, part: float, most: int, seed: int) -> Tensor:
    """`part` of the weights moved by up to `most` units in the last place, on through zero, infinity and nan."""
    draw = torch.Generator().manual_seed(seed)
    moves = torch.rand(old.numel(), generator=draw) < part
    by = torch.randint(-most, most + 1, (old.numel(),), generator=draw)
    return (bits(old) + (moves * by).to(torch.int16)).view(torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(
    numel=st.sampled_from([1, 2, 3, 4, 5, 7, 63, 64, 65, 128, 200]),
    part=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    most=st.sampled_from([1, 2, 3, 127, 128, 129, 40_000]),
    seed=st.integers(0, 1000),
)
def test_patch_round_trip_is_exact(numel: int, part: float, most: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_patch, "PATCH_BLOCK", 64)  # several blocks, and a rest
        old = weights(numel, seed)
        new = changed(old, part, most, seed)
        told = message(old, new)
        assert len(told) <= max_patch_bytes(numel)
        PATCHES.decode(told, old, "weights")
    assert torch.equal(bits(old), bits(new))


@pytest.mark.parametrize(("part", "most", "bits_a_weight"), [(0.0, 1, 0.01), (0.2, 1, 2.01), (0.2, 2, 2.64)])
def test_patch_takes_two_bits_per_weight_and_a_byte_per_escape(part: float, most: int, bits_a_weight: float) -> None:
    old = weights(1 << 18)
    told = message(old, changed(old, part, most, 1))
    assert 8 * len(told) / old.numel() == pytest.approx(bits_a_weight, abs=0.01)


def test_incompressible_block_is_sent_unencoded() -> None:
    old, new = weights(100_000), weights(100_000, seed=1)
    told = message(old, new)
    assert len(told) < max_patch_bytes(100_000) + 1
    PATCHES.decode(told, old, "weights")
    assert torch.equal(bits(old), bits(new))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_weights_follow_each_other_in_a_message(dtype: torch.dtype) -> None:
    """At any offset: the first message has an odd number of bf16 weights."""
    sent = [weights(70_001).to(dtype), weights(300_000, seed=1).to(dtype)]
    room = torch.empty(sum(max_patch_bytes(new.numel(), dtype.itemsize) for new in sent), dtype=torch.uint8)
    size = PATCHES.encode(None, sent[0], room)
    assert size + PATCHES.encode(None, sent[1], room[size:]) == len(room)
    arrived = [torch.zeros_like(new) for new in sent]
    assert PATCHES.decode(room, arrived[0], "weights") == size
    PATCHES.decode(room[size:], arrived[1], "weights")
    assert all(torch.equal(bits(new), bits(old)) for new, old in zip(sent, arrived, strict=True))
    room[-3] ^= 4
    with pytest.raises(SelfTestError, match="weights of layer 3 differ from the values that were sent"):
        PATCHES.decode(room[size:], arrived[1], "weights of layer 3")


@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(at: float, bit: int) -> None:
    """Wherever it is: in the table, in a code, in a difference, in what no byte holds."""
    old = weights(1000)
    new = changed(changed(old, 0.3, 3, 1), 0.02, 3000, 2)
    told = message(old, new)
    told[int(at * len(told))] ^= 1 << bit
    with pytest.raises(SelfTestError, match="weights of layer 3 differ from the values that were sent"):
        PATCHES.decode(told, old, "weights of layer 3")


def test_patch_applied_to_wrong_weights_is_an_error() -> None:
    old = weights(1000)
    told = message(old, changed(old, 0.3, 3, 1))
    bits(old)[700] += 1
    with pytest.raises(SelfTestError):
        PATCHES.decode(told, old, "weights")
