"""Weights in 4 and 8 bits: the values of bitsandbytes bit by bit, at any division into ranges."""

from __future__ import annotations

import pytest
import torch

from aliquot.tensor_io.code_sizes import CompressedFormat, code_bytes, is_compressible, scale_count
from aliquot.tensor_io.weight_codes import NF4_VALUES, SCALE_VALUES, Codes, CompressedRange, codes_in
from tests.plain import decoded


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    values.view(-1)[64:192] = 0  # blocks without a scale
    return values.to(dtype)


@pytest.mark.parametrize("shape", [(3, 64), (512, 704), (3, 40, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nf4_has_the_values_of_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").functional
    assert torch.equal(functional.create_dynamic_map(), SCALE_VALUES)
    values = weight(*shape, dtype=dtype)
    codes, state = functional.quantize_4bit(values, quant_type="nf4")
    # Of fp64, bitsandbytes takes the nearest scales, as on a GPU. Its kernel for CPUs first rounds fp32 to 16 bits.
    state.offset, scales = state.absmax.mean(), state.absmax
    code = functional.create_dynamic_map()
    state.absmax, groups = torch.ops.bitsandbytes.quantize_blockwise((scales - state.offset).double(), code, 256)
    state.state2 = functional.QuantState(groups, blocksize=256, code=code, dtype=torch.float32)
    state.nested, state.dtype = True, torch.float32
    assert torch.equal(decoded(values.float(), "nf4"), functional.dequantize_4bit(codes, state))


def test_nf4_by_its_definition() -> None:
    """Without bitsandbytes: the nearest of 16 multiples of a scale, which is off by less than a step of 8 bits."""
    values = weight(32, 512, dtype=torch.float32)
    blocks, found = values.view(-1, 64), decoded(values, "nf4").view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = NF4_VALUES[(blocks[..., None] - scales[..., None] * NF4_VALUES).abs().argmin(-1)]
    used = scales[:, 0] > 0
    spread = (scales - scales.mean()).abs().max()
    assert ((found / nearest)[nearest != 0] - scales.expand_as(found)[nearest != 0]).abs().max() < spread / 60
    assert used.sum() == len(blocks) - 2 and not found[~used].any()


def test_int8_by_its_definition() -> None:
    values = weight(6, 64)
    scales = values.float().abs().amax(1, keepdim=True) / 127
    expected = (values.float() / scales.clamp(min=1e-38)).round() * scales
    assert torch.equal(decoded(values.float(), "int8"), expected)


@pytest.mark.parametrize("base", ["nf4", "int8"])
@pytest.mark.parametrize("pieces", [7, 64, 1000])
def test_a_range_is_stored_and_loaded_in_pieces_of_any_size(base: CompressedFormat, pieces: int) -> None:
    """Two ranks store their rows piece by piece; what they decode is as if one had stored the whole."""
    values = weight(9, 2, 128, dtype=torch.float32)
    memory, scales = (
        torch.zeros(code_bytes(base, values.shape), dtype=torch.uint8),
        torch.zeros(scale_count(base, values.shape)),
    )
    codes: Codes = codes_in(memory, base, values.shape)
    ranges = [(0, 5 * 256), (5 * 256, 9 * 256)]
    ranks = [CompressedRange([codes], scales, start) for start, _ in ranges]
    for rank, (start, stop) in zip(ranks, ranges, strict=True):
        for at in range(0, stop - start, pieces):
            rank.store(at, values.view(-1)[start:stop][at : at + pieces])
    codes.set_scales(scales)
    expected = decoded(values, base).view(-1)
    assert torch.equal(ranks[1].load(70, torch.empty(333)), expected[5 * 256 + 70 :][:333])
    whole = torch.empty(values.numel(), dtype=torch.bfloat16)
    codes.decode(0, whole)
    assert torch.equal(whole, expected.bfloat16())


@pytest.mark.parametrize("base", ["nf4", "int8", "nf4_single"])
@pytest.mark.parametrize("shards", [1, 2, 4, 11])
def test_shards_have_the_values_of_the_whole(base: CompressedFormat, shards: int) -> None:
    """Shards end within a group of scales, and the last of them have fewer rows or none."""
    values = weight(9, 3, 2048, dtype=torch.float32)
    memory = [torch.zeros(code_bytes(base, values.shape, shards), dtype=torch.uint8) for _ in range(shards)]
    codes = [codes_in(part, base, values.shape, shards, shard) for shard, part in enumerate(memory)]
    rows = -(-9 // shards)
    parts = [values[shard * rows : (shard + 1) * rows].reshape(-1) for shard in range(shards)]
    scales = torch.cat([shard.encode(0, part) for shard, part in zip(codes, parts, strict=True)])
    for shard, part, start in zip(codes, parts, range(0, shards * rows, rows), strict=True):
        shard.set_scales(scales)
        result = torch.empty_like(part)
        shard.decode(0, result)
        assert torch.equal(result.view(-1, 3, 2048), decoded(values, base)[start : start + rows])


def test_sizes_are_those_of_qlora() -> None:
    assert code_bytes("nf4", (4096, 4096)) * 8 / 4096**2 == pytest.approx(4.127, abs=1e-3)
    assert code_bytes("int8", (4096, 4096)) * 8 / 4096**2 == pytest.approx(8.008, abs=1e-3)
    assert [is_compressible(shape) for shape in ((4096,), (8, 96), (8, 3, 64))] == [False, False, True]
