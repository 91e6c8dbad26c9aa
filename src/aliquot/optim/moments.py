"""Adam's moments on flat shards: fp32, or frugal as bf16 or int8.

Frugal moments are rounded stochastically, or small updates would be lost: with beta2 = 0.999 a step moves the second
moment by less than half the distance between two neighbouring bf16 values. The noise is a function of the step and of
an element's place in the whole tensor, so results do not depend on the world size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from aliquot.optim.sizes import States, block_numel, moment_bytes

_NOISE = 1 << 16  # elements after which the noise repeats


class Noise:
    """Uniform in [0, 1), another draw each step."""

    def __init__(self, longest: int) -> None:
        self._repeats = 1 + -(-longest // _NOISE)

    def draw(self, step: int) -> None:
        self._values = torch.rand(_NOISE, generator=torch.Generator().manual_seed(step)).repeat(self._repeats)

    def at(self, place: int, count: int) -> Tensor:
        """For elements [place, place + count) of a tensor."""
        return self._values[place % _NOISE :][:count]


class Moment(Protocol):
    """Flat values; `start` counts within the shard."""

    size_bytes: int

    def load(self, start: int, out: Tensor) -> Tensor:
        """Elements from `start` on, as many as fp32 `out` has room for: in `out`, or where they lie."""
        ...

    def store(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Set them. Without noise they round to nearest: what was loaded is stored as it was."""
        ...


def moment(states: States, numel: int, row_numel: int, squared: bool, memory: Tensor | None = None) -> Moment:
    """What is in `memory`, uint8 [moment_bytes(states, numel, row_numel)]; by default zeros.

    `row_numel`: elements of a row of the tensor; vectors stay fp32, they are few and sensitive.
    """
    if memory is None:
        memory = torch.zeros(moment_bytes(states, numel, row_numel), dtype=torch.uint8)
    if states == "fp32" or row_numel == 1:
        return ExactMoment(memory)
    return Bf16Moment(memory) if states == "bf16" else Int8Moment(memory, numel, row_numel, squared)


class ExactMoment:
    def __init__(self, memory: Tensor) -> None:
        self.values = memory.view(torch.float32)
        self.size_bytes = memory.nbytes

    def load(self, start: int, out: Tensor) -> Tensor:
        return self.values[start : start + out.numel()]

    def store(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        target = self.values[start : start + values.numel()]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)


class Bf16Moment:
    def __init__(self, memory: Tensor) -> None:
        self._values = memory.view(torch.bfloat16)
        self.size_bytes = memory.nbytes

    def load(self, start: int, out: Tensor) -> Tensor:
        return out.copy_(self._values[start : start + out.numel()])

    def store(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        if noise is not None:
            # Noise below the last kept bit, then the rest dropped: rounds up as often as the distance asks for.
            bits = values.view(torch.int32).add((noise * 0x10000).to(torch.int32)).bitwise_and_(-0x10000)
            values = bits.view(torch.float32)
        self._values[start : start + values.numel()].copy_(values)


class Int8Moment:
    """As in Int8Moment. Blocks divide the rows of the tensor: their edges are the same whatever the world size."""

    def __init__(self, memory: Tensor, numel: int, row_numel: int, squared: bool) -> None:
        self.block = block_numel(row_numel)
        self._squared = squared
        scales_bytes = 4 * (numel // self.block)
        self._scales = memory[:scales_bytes].view(torch.float32)
        self._codes = memory[scales_bytes:].view(torch.uint8 if squared else torch.int8)
        self._partial: dict[int, tuple[Tensor, int]] = {}  # blocks of which only a part has been stored so far
        self.size_bytes = memory.nbytes

    def load(self, start: int, out: Tensor) -> Tensor:
        first, last = start // self.block, -(-(start + out.numel()) // self.block)
        codes, scales = self._codes[first * self.block : last * self.block], self._scales[first:last]
        values = decoded(codes, scales, self.block, self._squared)
        skipped = start - first * self.block
        return out.copy_(values[skipped : skipped + out.numel()])

    def store(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Pieces that begin or end inside a block wait for the rest of it: each element must then come once."""
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
        codes, scales = encoded(values, self.block, self._squared, noise)
        self._codes[start : start + values.numel()].copy_(codes)
        self._scales[start // self.block : (start + values.numel()) // self.block].copy_(scales)


def decoded(codes: Tensor, scales: Tensor, block: int, squared: bool) -> Tensor:
    """codes int8 (or uint8 if `squared`) [n], scales fp32 [n / block] -> fp32 [n]."""
    values = codes.float().view(-1, block)
    if squared:
        values = values.div_(255).square_().square_().mul_(scales[:, None])
    else:
        values.div_(127)
        values = values.mul_(values.abs()).mul_(scales[:, None])
    return values.view(-1)


def encoded(values: Tensor, block: int, squared: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp32 [n] -> (codes, as fp32 [n], scales [n / block]). With `noise`, uniform in [0, 1), rounded at random."""
    blocks = values.view(-1, block)
    scales = blocks.abs().amax(1)
    # A block of zeros has scale 0 and codes 0.
    codes = blocks.abs().div_(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).sqrt_()
    codes = codes.sqrt_().mul_(255) if squared else codes.mul_(127)
    codes = codes.view(-1)
    codes.add_(0.5 if noise is None else noise[: values.numel()]).floor_()
    if squared:
        # A second moment that is not zero never becomes zero: the update divides by its root.
        codes.clamp_(max=255)
        codes.copy_(torch.where(values > 0, codes.clamp(min=1), codes))
    else:
        codes.clamp_(max=127).mul_(values.sign())
    return codes, scales
