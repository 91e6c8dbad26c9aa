"""Adam's moments on flat shards: exact in fp32, or compressed to bf16 or int8. Weights share the first two formats.

Compressed moments are rounded stochastically, because rounding to nearest would lose small updates. With beta2 = 0.999,
a step moves the second moment by less than half the distance between two neighbouring bf16 values. The noise depends
only on the step and on the index of an element in the whole tensor, so that results do not depend on the world size.

int8 moments have an 8-bit code per element and one fp32 scale per block, the largest magnitude in the block. The codes
are not linear, so that small values keep relative precision. A first moment is scale * (code / 127)^2 with the code's
sign, a second moment is scale * (code / 255)^4. Decoding and encoding again gives the same codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aliquot.optim.sizes import States, block_numel, moment_bytes

_NOISE = 1 << 16  # elements after which the noise repeats


class Noise:
    """Uniform noise in [0, 1) for stochastic rounding, drawn anew in each step."""

    def __init__(self, longest: int) -> None:
        self._repeats = 1 + -(-longest // _NOISE)

    def draw(self, step: int) -> None:
        self._values = torch.rand(_NOISE, generator=torch.Generator().manual_seed(step)).repeat(self._repeats)

    def at(self, place: int, count: int) -> Tensor:
        """Return the noise for elements [place, place + count) of a whole tensor."""
        return self._values[place % _NOISE :][:count]


def moment(states: States, numel: int, row_numel: int, squared: bool, memory: Tensor | None = None) -> Moment:
    """Return storage for the first or, if `squared`, second moment of `numel` elements, in the format `states`.

    The tensor has rows of `row_numel` elements. Moments of vectors stay fp32, because vectors are small and sensitive.
    `memory`: uint8 [moment_bytes(states, numel, row_numel)] with the values; None: new memory of zeros.
    """
    if memory is None:
        memory = torch.zeros(moment_bytes(states, numel, row_numel), dtype=torch.uint8)
    if states == "fp32" or row_numel == 1:
        return ExactValues(memory.view(torch.float32))
    return (
        Bf16Values(memory.view(torch.bfloat16)) if states == "bf16" else Int8Moment(memory, numel, row_numel, squared)
    )


class ExactValues:
    """fp32 values. `start` is an index in the shard.

    `replicas` are copies on other NUMA nodes. `store` also writes the replicas; a direct write to `values` does not.
    """

    def __init__(self, values: Tensor, replicas: Sequence[Tensor] = ()) -> None:
        self.values = values
        self.is_alone = not replicas
        self.numel, self.size_bytes = values.numel(), values.nbytes
        self._replicas = replicas

    def load(self, start: int, out: Tensor) -> Tensor:
        """Return `out.numel()` elements from `start` on, in fp32 `out` or as a view of the stored fp32 memory."""
        return self.values[start : start + out.numel()]

    def store(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Set elements from `start` on, rounded to nearest if `noise` is None, which keeps loaded values."""
        for copy in (self.values, *self._replicas):
            target = copy[start : start + values.numel()]
            if target.data_ptr() != values.data_ptr():
                target.copy_(values)


class Bf16Values:
    """bf16 values, and replicas on other NUMA nodes. Without noise, ties round to even."""

    def __init__(self, values: Tensor, replicas: Sequence[Tensor] = ()) -> None:
        self.numel, self.size_bytes = values.numel(), values.nbytes
        self._copies = (values, *replicas)

    def load(self, start: int, out: Tensor) -> Tensor:
        return out.copy_(self._copies[0][start : start + out.numel()])

    def store(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        if noise is not None:
            # Adding noise below the last stored bit, then dropping bits, rounds up with the right probability.
            bits = values.view(torch.int32).add((noise * 0x10000).to(torch.int32)).bitwise_and_(-0x10000)
            values = bits.view(torch.float32)
        for copy in self._copies:
            copy[start : start + values.numel()].copy_(values)


class Int8Moment:
    """An int8 moment. Each row of a tensor has a whole number of blocks, which do not depend on the world size."""

    def __init__(self, memory: Tensor, numel: int, row_numel: int, squared: bool) -> None:
        self.block = block_numel(row_numel)
        self._squared = squared
        scales_bytes = 4 * (numel // self.block)
        self._scales = memory[:scales_bytes].view(torch.float32)
        self._codes = memory[scales_bytes:].view(torch.uint8 if squared else torch.int8)
        self._partial: dict[int, tuple[Tensor, int]] = {}  # partly stored blocks: (values, stored elements)
        self.size_bytes = memory.nbytes

    def load(self, start: int, out: Tensor) -> Tensor:
        first, last = start // self.block, -(-(start + out.numel()) // self.block)
        codes, scales = self._codes[first * self.block : last * self.block], self._scales[first:last]
        values = decode_int8(codes, scales, self.block, self._squared)
        skipped = start - first * self.block
        return out.copy_(values[skipped : skipped + out.numel()])

    def store(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Set elements. A partly stored block is encoded when all its elements have been stored once."""
        stop = start + values.numel()
        inner, end = -(-start // self.block) * self.block, stop // self.block * self.block
        if inner < end:
            self._encode(inner, values[inner - start : end - start], None if noise is None else noise[inner - start :])
        if start < inner:
            self._store_partial(start, values[: inner - start])
        if inner <= end < stop:
            self._store_partial(end, values[end - start :])

    def _store_partial(self, start: int, values: Tensor) -> None:
        number = start // self.block
        whole, filled = self._partial.pop(number, (torch.zeros(self.block), 0))
        at = start - number * self.block
        whole[at : at + values.numel()] = values
        if filled + values.numel() < self.block:
            self._partial[number] = (whole, filled + values.numel())
        else:
            self._encode(number * self.block, whole, None)

    def _encode(self, start: int, values: Tensor, noise: Tensor | None) -> None:
        codes, scales = encode_int8(values, self.block, self._squared, noise)
        self._codes[start : start + values.numel()].copy_(codes)
        self._scales[start // self.block : (start + values.numel()) // self.block].copy_(scales)


Moment = ExactValues | Bf16Values | Int8Moment


def decode_int8(codes: Tensor, scales: Tensor, block: int, squared: bool) -> Tensor:
    """Decode codes int8 (or uint8 if `squared`) [n] with scales fp32 [n / block] to fp32 [n]."""
    values = codes.float().view(-1, block)
    if squared:
        values = values.div_(255).square_().square_().mul_(scales[:, None])
    else:
        values.div_(127)
        values = values.mul_(values.abs()).mul_(scales[:, None])
    return values.view(-1)


def encode_int8(values: Tensor, block: int, squared: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode fp32 values [n] to codes (as fp32 [n]) and scales [n / block]. Without `noise` codes round to nearest."""
    blocks = values.view(-1, block)
    scales = blocks.abs().amax(1)
    # A block of zeros has scale 0 and codes 0.
    codes = blocks.abs().div_(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).sqrt_()
    codes = codes.sqrt_().mul_(255) if squared else codes.mul_(127)
    codes = codes.view(-1)
    codes.add_(0.5 if noise is None else noise[: values.numel()]).floor_()
    if squared:
        # A positive second moment never becomes zero, because the update divides by its root.
        codes.clamp_(max=255)
        codes.copy_(torch.where(values > 0, codes.clamp(min=1), codes))
    else:
        codes.clamp_(max=127).mul_(values.sign())
    return codes, scales
