"""Load weights that files store in 4 bits, as the values that they encode.

MXFP4: gpt-oss publishes a weight [E, in, out] as W_blocks, uint8 [E, out, in / 32, 16] with two elements per byte, the
first one in the low half, and W_scales, uint8 [E, out, in / 32]. A scale s multiplies 32 elements by 2 ** (s - 127).
See https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.

nf4: bitsandbytes stores a weight W of N elements as uint8 [N / 2, 1], and its scales as W.absmax (tensor_io/
weight_codes.py). With double quantisation, W.absmax holds codes, and W.nested_absmax their scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aliquot.core.decode import parse_json
from aliquot.core.errors import WeightsFileError
from aliquot.tensor_io.bytemap import Shape
from aliquot.tensor_io.code_sizes import NF4_BLOCK, SCALE_GROUP
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.parts import PartStore
from aliquot.tensor_io.range_io import RangeReader
from aliquot.tensor_io.weight_codes import decode_pairs, decode_scales

_BLOCK = 32  # elements of MXFP4 with a common scale
_POSITIVE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_POSITIVE, -_POSITIVE])
_NF4_STATE = ".quant_state.bitsandbytes__nf4"
_NF4_CHUNK = 1 << 18  # elements that are decoded at a time, so that their fp32 values stay in the cache of a core
_LARGEST_STATE = 1 << 16  # bytes


@dataclass(frozen=True)
class Mxfp4Weight:
    """The location of a weight in MXFP4."""

    entries: tuple[TensorEntry, TensorEntry]  # blocks and scales

    def read(self, start: int, stop: int, reader: RangeReader) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, fp32 values) of pieces of the elements [start, stop): of one expert after another."""
        numel = self.entries[0].numel * 2 // self.entries[0].shape[0]
        for number in range(start // numel, -(-stop // numel)):
            first, last = max(start, number * numel), min(stop, (number + 1) * numel)
            yield first, self._expert(number, reader).reshape(-1)[first - number * numel : last - number * numel]

    def _expert(self, number: int, reader: RangeReader) -> Tensor:
        """Return the weight of an expert, fp32 [in, out]."""
        _, rows, blocks = self.entries[1].shape
        numel = rows * blocks
        pairs = _read(self.entries[0], number * numel * _BLOCK // 2, numel * _BLOCK // 2, reader).view(numel, -1)
        scales = _read(self.entries[1], number * numel, numel, reader)
        values = _VALUES[torch.stack([pairs & 15, pairs >> 4], 2).int()].view(-1, _BLOCK)
        return torch.ldexp(values, scales[:, None].int() - 127).view(rows, -1).t()


@dataclass(frozen=True)
class Nf4Weight:
    """The location of a weight in nf4."""

    entries: tuple[TensorEntry, ...]  # two elements per byte, and all tensors that describe them
    scales: TensorEntry  # fp32, or codes of `group_scales`
    group_scales: TensorEntry | None
    mean: float  # of the scales, if these are codes

    def read(self, start: int, stop: int, reader: RangeReader) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, fp32 values) of pieces of the elements [start, stop)."""
        for first in range(start, stop, _NF4_CHUNK):
            last = min(stop, first + _NF4_CHUNK)
            begin, end = first // NF4_BLOCK, -(-last // NF4_BLOCK)  # blocks
            scales = _read(self.scales, begin, end - begin, reader)
            if self.group_scales is not None:
                groups = _read(self.group_scales, 0, self.group_scales.numel, reader)
                scales = decode_scales(scales, begin, groups, torch.tensor(self.mean))
            pairs = _read(self.entries[0], begin * NF4_BLOCK // 2, (end - begin) * NF4_BLOCK // 2, reader)
            yield first, decode_pairs(pairs, scales).view(-1)[first - begin * NF4_BLOCK : last - begin * NF4_BLOCK]


PackedWeight = Mxfp4Weight | Nf4Weight


def _read(entry: TensorEntry, start: int, numel: int, reader: RangeReader) -> Tensor:
    out = torch.empty(numel, dtype=entry.dtype)
    reader.read(entry, start, out)
    return out


def is_packed(name: str, stored: Mapping[str, TensorEntry]) -> bool:
    """Return whether the stored tensor `name` has the elements of a weight in 4 bits."""
    if name.endswith("_blocks"):
        return name in stored and f"{name.removesuffix('_blocks')}_scales" in stored
    return f"{name}{_NF4_STATE}" in stored


def packed_weights(
    stored: Mapping[str, TensorEntry], named: Mapping[str, TensorEntry], shapes: Mapping[str, Shape], directory: Path
) -> dict[str, PackedWeight]:
    """Return the weights of `shapes` that the files store in 4 bits. Raises WeightsFileError for a wrong shape.

    `named`: the stored tensors with the names of weights.
    """
    weights: dict[str, PackedWeight] = {}
    for name, shape in shapes.items():
        if is_packed(f"{name}_blocks", stored):
            weights[name] = _mxfp4(name, stored, shape, directory)
        elif name in named and is_packed(named[name].name, stored):
            weights[name] = _nf4(named[name], stored, shape)
    return weights


def _mxfp4(name: str, stored: Mapping[str, TensorEntry], shape: Shape, directory: Path) -> Mxfp4Weight:
    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    experts, columns, rows = (*shape, 0, 0)[:3]
    expected = (experts, rows, columns // _BLOCK)
    has_dtype = blocks.dtype == scales.dtype == torch.uint8
    if not has_dtype or scales.shape != expected or blocks.shape != (*expected, _BLOCK // 2):
        raise WeightsFileError(
            f"{name}_blocks is {blocks.dtype} {list(blocks.shape)}, which is not MXFP4 for {list(shape)}", directory
        )
    return Mxfp4Weight((blocks, scales))


def _nf4(pairs: TensorEntry, stored: Mapping[str, TensorEntry], shape: Shape) -> Nf4Weight:
    name, blocks = pairs.name, math.prod(shape) // NF4_BLOCK
    state = _nf4_state(stored[f"{name}{_NF4_STATE}"])
    scales, group_scales = stored.get(f"{name}.absmax"), stored.get(f"{name}.nested_absmax")
    facts = [(entry.dtype, entry.numel) for entry in (pairs, scales, group_scales) if entry is not None]
    expected = [(torch.uint8, NF4_BLOCK // 2 * blocks), (torch.float32, blocks)]
    if group_scales is not None:
        expected[1:] = [(torch.uint8, blocks), (torch.float32, -(-blocks // SCALE_GROUP))]
    sizes, mean = (state.get("blocksize"), state.get("nested_blocksize", SCALE_GROUP)), state.get("nested_offset", 0.0)
    if scales is None or facts != expected or sizes != (NF4_BLOCK, SCALE_GROUP) or not isinstance(mean, float):
        raise WeightsFileError(
            f"{name} is {pairs.dtype} {list(pairs.shape)}, which is not nf4 in blocks of {NF4_BLOCK} for {list(shape)}",
            pairs.file,
        )
    described = tuple(entry for stored_name, entry in stored.items() if stored_name.startswith(f"{name}."))
    return Nf4Weight((pairs, *described), scales, group_scales, mean)


def _nf4_state(entry: TensorEntry) -> dict[str, Any]:
    """Return bitsandbytes' description of a weight, a JSON object in a tensor of bytes."""
    if entry.dtype != torch.uint8 or entry.numel > _LARGEST_STATE:
        raise WeightsFileError(f"{entry.name} is {entry.dtype} {list(entry.shape)}, and no JSON", entry.file)
    with RangeReader() as reader:
        text = bytes(_read(entry, 0, entry.numel, reader).tolist())
    return parse_json(text, f"{entry.file}: {entry.name}")


def fill_packed(
    store: PartStore,
    weights: Mapping[str, PackedWeight],
    check: Callable[[TensorEntry, int, Tensor], None],
) -> int:
    """Write the values of this rank's parts of `weights` to `store`, and return the number of bytes of their codes.

    `check` receives each range of values, as `tensor_io.transfer.fill` gives it. Raises UserError.
    """
    read_bytes = 0
    with RangeReader() as reader:
        for part in store.parts():
            if part.kind != "weight" or part.name not in weights:
                continue
            packed = weights[part.name]
            for first, values in packed.read(part.start, part.stop, reader):
                check(replace(packed.entries[0], shape=part.shape), first, values)
                store.write(part, first, values)
                read_bytes += values.numel() // 2
    return read_bytes
