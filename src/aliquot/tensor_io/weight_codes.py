"""Frozen weights in 8 or 4 bits, which are decoded for each use.

int8: each row of a matrix has one fp32 scale, the largest magnitude of the row divided by 127.

nf4 is the format of QLoRA (https://arxiv.org/abs/2305.14314). Each block of 64 elements has a scale, and each element
is one of 16 multiples of the scale. The scales are stored in 8 bits (double quantisation): their mean is subtracted,
and 256 scales share an fp32 scale. The decoded values are equal to those of bitsandbytes with compress_statistics, bit
by bit, if it takes the nearest scales, as on a GPU. Its kernel for CPUs stores about 0.15 % of scales one step off.

nf4_single: nf4 with fp32 scales, in which checkpoints of bitsandbytes keep their values.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from aliquot.tensor_io.code_sizes import NF4_BLOCK, SCALE_GROUP, BaseFormat, scale_count

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


def chunk_numel(values: Tensor) -> int:
    """Return the number of elements to encode or decode at a time on the device of `values`."""
    return _GPU_CHUNK if values.is_cuda else _CHUNK * torch.get_num_threads()


@cache
def _on(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device)


class Int8Codes:
    """A weight in int8, by row."""

    def __init__(self, memory: Tensor, shape: tuple[int, ...]) -> None:
        self.unit = shape[-1]  # elements that are encoded together
        numel = math.prod(shape)
        self._codes = memory[:numel].view(torch.int8)
        self._scales = memory[numel:].view(torch.float32)

    def encode(self, start: int, values: Tensor) -> Tensor:
        """Encode whole units of fp32 values from element `start` on, and return their scales, fp32."""
        rows = values.view(-1, self.unit)
        scales = rows.abs().amax(1) / 127
        self._codes[start : start + values.numel()].copy_((rows / scales.clamp(min=_TINY)[:, None]).round_().view(-1))
        return scales

    def set_scales(self, scales: Tensor) -> None:
        """Store the scales of the whole weight."""
        self._scales.copy_(scales)

    def decode(self, start: int, out: Tensor) -> None:
        """Decode whole units from element `start` on into flat `out`, which may have any float dtype."""
        chunk = max(1, chunk_numel(out) // self.unit) * self.unit
        for first in range(start, start + out.numel(), chunk):
            target = out[first - start :][:chunk]
            rows = self._codes[first : first + target.numel()].float().view(-1, self.unit)
            rows.mul_(self._scales[first // self.unit :][: len(rows), None])
            target.copy_(rows.view(-1))


class Nf4Codes:
    """A weight in nf4; its methods are those of `Int8Codes`."""

    unit = NF4_BLOCK

    def __init__(self, memory: Tensor, shape: tuple[int, ...]) -> None:
        self._pairs, scales = memory.tensor_split([math.prod(shape) // 2])
        self._place_scales(scales, scale_count("nf4", shape))

    def _place_scales(self, memory: Tensor, count: int) -> None:
        groups, mean, self._scale_codes = torch.split(memory, [4 * -(-count // SCALE_GROUP), 4, count])
        self._group_scales, self._mean = groups.view(torch.float32), mean.view(torch.float32)

    def encode(self, start: int, values: Tensor) -> Tensor:
        blocks = values.view(-1, NF4_BLOCK)
        scales = blocks.abs().amax(1)
        scaled = (blocks * (1 / scales.clamp(min=_TINY))[:, None]).clamp_(-1, 1).view(-1)
        cells = torch.add(_CELLS, scaled, alpha=_CELLS).int()
        codes = _LOWEST_CODES.index_select(0, cells) + (scaled > _NEXT_MIDPOINTS.index_select(0, cells))
        self._pairs[start // 2 : (start + values.numel()) // 2].copy_((codes[::2] << 4) | codes[1::2])
        return scales

    def set_scales(self, scales: Tensor) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the order of the sum must not depend on the number of threads
        self._mean.copy_(scales.mean())
        torch.set_num_threads(threads)
        centred = torch.zeros(SCALE_GROUP * len(self._group_scales))
        torch.sub(scales, self._mean, out=centred[: len(scales)])
        groups = centred.view(-1, SCALE_GROUP)
        self._group_scales.copy_(groups.abs().amax(1))
        scaled = (groups * (1 / self._group_scales)[:, None]).nan_to_num_(0.0)
        self._scale_codes.copy_(torch.bucketize(scaled, _midpoints(SCALE_VALUES)).view(-1)[: len(scales)])

    def decode(self, start: int, out: Tensor) -> None:
        scales, chunk = self._scales(start // NF4_BLOCK, (start + out.numel()) // NF4_BLOCK), chunk_numel(out)
        for at in range(0, out.numel(), chunk):
            target = out[at : at + chunk]
            pairs = self._pairs[(start + at) // 2 :][: target.numel() // 2]
            target.copy_(decode_pairs(pairs, scales[at // NF4_BLOCK :][: target.numel() // NF4_BLOCK]).view(-1))

    def _scales(self, first: int, last: int) -> Tensor:
        return decode_scales(self._scale_codes[first:last], first, self._group_scales, self._mean)


class Nf4SingleCodes(Nf4Codes):
    """A weight in nf4 with fp32 scales."""

    def _place_scales(self, memory: Tensor, count: int) -> None:
        self._fp32_scales = memory.view(torch.float32)

    def set_scales(self, scales: Tensor) -> None:
        self._fp32_scales.copy_(scales)

    def _scales(self, first: int, last: int) -> Tensor:
        return self._fp32_scales[first:last]


def decode_pairs(pairs: Tensor, scales: Tensor) -> Tensor:
    """Return the values of nf4 blocks, fp32 [B, 64], from two elements per byte, uint8 [32 B], and scales, fp32 [B]."""
    values = _on(_PAIRS, pairs.device).index_select(0, pairs.int()).view(torch.float32)
    return values.view(-1, NF4_BLOCK).mul_(scales[:, None])


def decode_scales(codes: Tensor, first: int, group_scales: Tensor, mean: Tensor) -> Tensor:
    """Return the scales of the blocks from number `first` on, fp32 [B], from their codes, uint8 [B]."""
    values = _on(SCALE_VALUES, codes.device).index_select(0, codes.int())
    groups = torch.arange(first, first + len(codes), dtype=torch.int32, device=codes.device) // SCALE_GROUP
    return values.mul_(group_scales.index_select(0, groups)).add_(mean)


Codes = Int8Codes | Nf4Codes
_FORMATS: dict[BaseFormat, type[Codes]] = {"int8": Int8Codes, "nf4": Nf4Codes, "nf4_single": Nf4SingleCodes}


def codes_in(memory: Tensor, name: BaseFormat, shape: tuple[int, ...]) -> Codes:
    """Return a compressed weight in `memory`, uint8 [code_bytes(name, shape)], at an address divisible by 4."""
    return _FORMATS[name](memory, shape)
