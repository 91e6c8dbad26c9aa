"""Frozen weights in 8 or 4 bits, which are decoded for each use.

int8: each row of a matrix has one fp32 scale, the largest magnitude of the row divided by 127.

nf4 is the format of QLoRA (https://arxiv.org/abs/2305.14314). Each block of 64 elements has a scale, and each element
is one of 16 multiples of the scale. The scales are stored in 8 bits (double quantisation): their mean is subtracted,
and 256 scales share an fp32 scale. The decoded values are equal to those of bitsandbytes with compress_statistics, bit
by bit, if it takes the nearest scales, as on a GPU. Its kernel for CPUs stores about 0.15 % of scales one step off.

nf4_single: nf4 with fp32 scales, in which checkpoints of bitsandbytes keep their values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from aliquot.tensor_io.code_sizes import NF4_BLOCK, SCALE_GROUP, CompressedFormat, code_fields, scale_count, scale_unit

_CHUNK = 1 << 17  # elements that a thread encodes or decodes at a time: its fp32 values stay in the cache of a core
_GPU_CHUNK = 1 << 23  # elements that a GPU decodes at a time, so that their fp32 values take little memory
_TINY = 1e-38  # the least scale by which bitsandbytes divides

# The quantiles of a normal distribution from which QLoRA's paper builds nf4, as bitsandbytes rounds them.
NF4_VALUES = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def _dynamic_values() -> Tensor:
    """Return bitsandbytes' 256 values for scales: 1, 2, 4, ... 64 values of each sign in each of seven decades."""
    positive: list[float] = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        positive += (10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return torch.tensor(sorted([0.0, 1.0, *positive, *(-value for value in positive)]))


def _midpoints(values: Tensor) -> Tensor:
    return (values[:-1] + values[1:]) / 2


SCALE_VALUES = _dynamic_values()
# The two fp32 values of each byte of codes, as one int64; the first element is in the high half of the byte.
_PAIRS = torch.stack([NF4_VALUES.repeat_interleave(16), NF4_VALUES.repeat(16)], 1).view(torch.int64).flatten()


# Cells of [-1, 1] that are narrower than the distance of two midpoints: the code of a cell's lower edge, and the next
# midpoint, above which an element has the next code. A binary search takes ten times as long.
_CELLS = 32  # per unit
_LOWEST_CODES = torch.bucketize(torch.arange(-_CELLS, _CELLS + 1) / _CELLS, _midpoints(NF4_VALUES)).to(torch.uint8)
_NEXT_MIDPOINTS = torch.cat([_midpoints(NF4_VALUES), torch.tensor([torch.inf])])[_LOWEST_CODES.int()]


def _chunk(values: Tensor) -> int:
    return _GPU_CHUNK if values.is_cuda else _CHUNK * torch.get_num_threads()


@cache
def _on(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device)


class Codes(ABC):
    """A shard of a compressed weight, with an fp32 scale for each unit of elements."""

    def __init__(self, fields: Sequence[Tensor], unit: int, first: int) -> None:
        """`fields`: see `code_fields`. `unit`: elements that have one scale. `first`: number of the first scale."""
        self.unit, self._first = unit, first
        self._codes, self._shared, self._scale_memory = fields

    @abstractmethod
    def encode(self, start: int, values: Tensor) -> Tensor:
        """Encode whole units of fp32 values from element `start` on, and return their scales, fp32."""

    @abstractmethod
    def _values(self, start: int, numel: int, scales: Tensor) -> Tensor:
        """Return the fp32 values of whole units, which have these scales."""

    def set_scales(self, scales: Tensor) -> None:
        """Store the shard's part of `scales`, which are those of the whole weight. The last shards may have fewer."""
        memory = self._scale_memory.view(scales.dtype)
        values = scales[self._first :][: len(memory)]
        memory[: len(values)].copy_(values)

    def _scales(self, first: int, last: int) -> Tensor:
        return self._scale_memory.view(torch.float32)[first:last]

    def decode(self, start: int, out: Tensor) -> None:
        """Decode whole units from element `start` on into flat `out`, which may have any float dtype."""
        units = max(1, _chunk(out) // self.unit)
        scales = self._scales(start // self.unit, (start + out.numel()) // self.unit)
        chunks = zip(torch.split(out, units * self.unit), torch.split(scales, units), strict=True)
        for number, (target, own_scales) in enumerate(chunks):
            values = self._values(start + number * units * self.unit, target.numel(), own_scales)
            target.copy_(values.view(-1))


class Int8Codes(Codes):
    """A weight in int8, by row."""

    def encode(self, start: int, values: Tensor) -> Tensor:
        rows = values.view(-1, self.unit)
        scales = rows.abs().amax(1) / 127
        codes = (rows / scales.clamp(min=_TINY)[:, None]).round_().view(-1)
        self._codes.view(torch.int8)[start : start + values.numel()].copy_(codes)
        return scales

    def _values(self, start: int, numel: int, scales: Tensor) -> Tensor:
        return self._codes.view(torch.int8)[start:][:numel].float().view(-1, self.unit).mul_(scales[:, None])


class Nf4SingleCodes(Codes):
    """A weight in nf4 with fp32 scales. Two elements are in one byte."""

    def encode(self, start: int, values: Tensor) -> Tensor:
        blocks = values.view(-1, NF4_BLOCK)
        scales = blocks.abs().amax(1)
        scaled = (blocks * (1 / scales.clamp(min=_TINY))[:, None]).clamp_(-1, 1).view(-1)
        cells = torch.add(_CELLS, scaled, alpha=_CELLS).int()
        codes = _LOWEST_CODES.index_select(0, cells) + (scaled > _NEXT_MIDPOINTS.index_select(0, cells))
        self._codes[start // 2 : (start + values.numel()) // 2].copy_((codes[::2] << 4) | codes[1::2])
        return scales

    def _values(self, start: int, numel: int, scales: Tensor) -> Tensor:
        return decode_pairs(self._codes[start // 2 :][: numel // 2], scales)


class Nf4Codes(Nf4SingleCodes):
    """A weight in nf4 with scales of 8 bits."""

    def set_scales(self, scales: Tensor) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the order of the sum must not depend on the number of threads
        mean = scales.mean()
        torch.set_num_threads(threads)
        groups = torch.constant_pad_nd(scales - mean, (0, -len(scales) % SCALE_GROUP)).view(-1, SCALE_GROUP)
        group_scales = groups.abs().amax(1)
        self._shared.view(torch.float32).copy_(torch.cat([group_scales, mean[None]]))
        scaled = (groups * (1 / group_scales)[:, None]).nan_to_num_(0.0)
        super().set_scales(torch.bucketize(scaled, _midpoints(SCALE_VALUES)).to(torch.uint8).view(-1))

    def _scales(self, first: int, last: int) -> Tensor:
        group_scales, mean = self._shared.view(torch.float32).tensor_split([-1])
        return decode_scales(self._scale_memory[first:last], self._first + first, group_scales, mean)


def decode_pairs(pairs: Tensor, scales: Tensor) -> Tensor:
    """Return the values of nf4 blocks, fp32 [B, 64], from two elements per byte, uint8 [32 B], and scales, fp32 [B]."""
    values = _on(_PAIRS, pairs.device).index_select(0, pairs.int()).view(torch.float32)
    return values.view(-1, NF4_BLOCK).mul_(scales[:, None])


def decode_scales(codes: Tensor, first: int, group_scales: Tensor, mean: Tensor) -> Tensor:
    """Return the scales of the blocks from number `first` on, fp32 [B], from their codes, uint8 [B]."""
    values = _on(SCALE_VALUES, codes.device).index_select(0, codes.int())
    groups = torch.arange(first, first + len(codes), dtype=torch.int32, device=codes.device) // SCALE_GROUP
    return values.mul_(group_scales.index_select(0, groups)).add_(mean)


_FORMATS: dict[CompressedFormat, type[Codes]] = {"int8": Int8Codes, "nf4": Nf4Codes, "nf4_single": Nf4SingleCodes}


def codes_in(memory: Tensor, name: CompressedFormat, shape: tuple[int, ...], shards: int = 1, shard: int = 0) -> Codes:
    """Return the whole weight of `shape`, or shard number `shard`, in `memory`, at an address divisible by 4.

    `memory`: uint8 [code_bytes(name, shape, shards)].
    """
    fields, unit = torch.split(memory, code_fields(name, shape, shards)), scale_unit(name, shape)
    return _FORMATS[name](fields, unit, shard * scale_count(name, shape, shards))


class CompressedRange:
    """This rank's range of a compressed weight, loaded and stored as fp32. Elements must be stored in their order."""

    def __init__(self, copies: Sequence[Codes], scales: Tensor, start: int) -> None:
        """`copies`: the weight on each NUMA node. `scales`: fp32 scales of the copies, which `store` fills."""
        self._copies = copies
        self.scales = scales
        self._start = start
        self._unit = copies[0].unit
        self._rest = torch.empty(0)  # stored elements of an incomplete unit

    def load(self, start: int, out: Tensor) -> Tensor:
        begin = self._start + start
        first = begin // self._unit * self._unit
        values = torch.empty(-(-(begin + out.numel() - first) // self._unit) * self._unit)
        self._copies[0].decode(first, values)
        return out.copy_(values[begin - first :][: out.numel()])

    def store(self, start: int, values: Tensor) -> None:
        first = self._start + start - self._rest.numel()
        # Small pieces stay in the cache of a core, and glibc cannot reuse all memory of large temporary tensors.
        for piece in torch.split(values, _chunk(values)):
            whole_and_rest = torch.cat([self._rest, piece])
            whole = whole_and_rest.numel() // self._unit * self._unit
            self._rest = whole_and_rest[whole:].clone()
            for codes in self._copies:
                scales = codes.encode(first, whole_and_rest[:whole])
            self.scales[first // self._unit :][: len(scales)].copy_(scales)
            first += whole
