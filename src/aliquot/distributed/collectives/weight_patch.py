"""What a step has changed in bf16 weights, as few bytes: exact, told block by block, each with a checksum.

Between two steps most weights keep their bits and most others move by one unit in the last place. A block says two bits
a weight: the difference of the bit patterns, 0, 1 or -1, or that it follows in a byte, and of those the few that no
byte holds in two; a block in which nothing has changed says nothing. Where that would be longer than the weights
themselves they are sent as they are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aliquot.distributed.collectives.buffer_sizes import BLOCK
from aliquot.distributed.collectives.messages import checksum, not_as_sent

_TABLE = np.dtype([("bytes", "<i4"), ("wide", "<i4"), ("checksum", "<u8")])  # of each block, before all of them
# A weight's code is its difference plus one: 0, 1, 2, or 3 for all that are not -1, 0, 1.
_ESCAPE, _WIDE = np.uint16(3), np.int8(-128)
_UNCHANGED = np.uint8(0b01010101)  # four codes of a difference of 0
# Codes c0 .. c3, one in 16 bits of a word, times this have c0 | c1 << 2 | c2 << 4 | c3 << 6 as the seventh byte.
_PACK = np.uint64(1 << 48 | 1 << 34 | 1 << 20 | 1 << 6)
_LANES = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3  # of each byte its four codes

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.int16]
Places = npt.NDArray[np.intp]


def most_bytes(numel: int) -> int:
    """Of the message about so many weights."""
    return _TABLE.itemsize * -(-numel // BLOCK) + 2 * numel


def checksums(weights: Tensor) -> Tensor:
    """int64, of each block of flat weights of any dtype that are sent as they are."""
    values = _bits(weights)
    found = [checksum(values[start:stop]) for start, stop in _starts(weights)]
    return torch.from_numpy(np.array(found, np.uint64).view(np.int64))


def check(weights: Tensor, expected: Tensor, who: str) -> None:
    """Raises SelfTestError, beginning with `who`, where these are not the weights of those checksums."""
    if not torch.equal(checksums(weights), expected):
        raise not_as_sent(who)


class WeightPatches:
    """Encodes and decodes; its scratch memory is used by one thread."""

    def __init__(self) -> None:
        self._shifted = np.empty(BLOCK, np.uint16)
        self._codes = np.empty(BLOCK, np.uint16)
        self._escape = np.full(BLOCK, _ESCAPE)  # the minimum with a scalar takes five times as long
        self._packed = np.empty(BLOCK // 4, np.uint8)
        self._pairs = np.empty(BLOCK // 4, np.uint8)
        self._marks = np.empty(BLOCK // 4, np.bool_)
        self._found = np.empty(BLOCK // 4, np.int64)
        # Of each byte of four codes: their differences, int16, as one int64; where escapes are, four bools as uint32.
        self._differences = (_LANES - 1).astype(np.int16).view(np.int64).ravel()
        self._escaped = (_LANES == _ESCAPE).view(np.uint32).ravel()

    def encode(self, old: Tensor, new: Tensor, out: Tensor) -> int:
        """Write into `out`, uint8 [most_bytes], how flat `new` follows from flat `old`. Returns the bytes written."""
        before, values, room = _bits(old), _bits(new), out.numpy()
        table = room[: _TABLE.itemsize * len(_starts(new))].view(_TABLE)
        fields, end = [], table.nbytes
        for start, stop in _starts(new):
            parts: list[Bytes] = [values[start:stop].view(np.uint8)]
            wide, begun = -1, end
            patch, wide_of_patch = self._patch(before[start:stop], values[start:stop])
            if sum(part.nbytes for part in patch) < parts[0].nbytes:
                parts, wide = patch, wide_of_patch
            for part in parts:
                room[end : end + part.nbytes] = part
                end += part.nbytes
            fields.append((end - begun, wide, checksum(values[start:stop])))
        table[:] = fields
        return end

    def decode(self, message: Tensor, weights: Tensor, who: str) -> None:
        """Make flat `weights` what they were encoded from; they are what they were encoded after.

        Raises SelfTestError, beginning with `who`, where the result or the message is not what was sent.
        """
        data, values = message.numpy(), _bits(weights)
        table = data[: _TABLE.itemsize * len(_starts(weights))].view(_TABLE)
        end = table.nbytes
        for (start, stop), (size, wide, expected) in zip(_starts(weights), table.tolist(), strict=True):
            body, block = data[end : end + max(0, size)], values[start:stop]
            end += len(body)
            sound = len(body) == size
            if sound and wide < 0:
                sound = size == block.nbytes
                if sound:
                    block.view(np.uint8)[:] = body
            elif sound and size:
                sound = self._apply(body, wide, block)
            if not sound or checksum(block) != expected:
                raise not_as_sent(who)

    def _patch(self, old: Bits, new: Bits) -> tuple[list[Bytes], int]:
        """The parts of a patch, and how many of its differences no byte holds."""
        count = len(new)
        padded = -(-count // 4) * 4
        shifted, codes = self._shifted[:padded], self._codes[:padded]
        np.subtract(new, old, out=shifted.view(np.int16)[:count])
        shifted[count:] = 0
        np.add(shifted, np.uint16(1), out=shifted)
        words = np.minimum(shifted, self._escape[:padded], out=codes).view(np.uint64)
        packed = self._packed[: padded // 4]
        packed[:] = np.multiply(words, _PACK, out=words).view(np.uint8)[6::8]
        if not np.not_equal(packed, _UNCHANGED, out=self._marks[: len(packed)]).any():
            return [], 0
        fours, lanes = self._escapes(packed)
        escapes = (shifted.view(np.uint64)[fours].view(np.uint16)[lanes] - np.uint16(1)).view(np.int16)
        narrow = escapes.astype(np.int8)
        is_wide = (narrow != escapes) | (narrow == _WIDE)
        narrow[is_wide] = _WIDE
        wide = escapes[is_wide]
        return [packed, narrow.view(np.uint8), wide.view(np.uint8)], len(wide)

    def _apply(self, body: Bytes, wide: int, weights: Bits) -> bool:
        """Whether the patch is one of as many weights."""
        words = -(-len(weights) // 4)
        packed, narrow = body[:words], body[words : len(body) - 2 * wide].view(np.int8)
        if len(body) < words + 2 * wide:
            return False
        differences = self._differences.take(packed, out=self._found[:words], mode="clip")  # unbuffered
        fours, lanes = self._escapes(packed)
        followed = narrow.astype(np.int16)
        is_wide = followed == _WIDE
        if len(narrow) != len(lanes) or np.count_nonzero(is_wide) != wide:
            return False
        followed[is_wide] = np.frombuffer(body[len(body) - 2 * wide :].tobytes(), np.int16)
        escaped = differences[fours]
        escaped.view(np.int16)[lanes] = followed
        differences[fours] = escaped
        np.add(weights, differences.view(np.int16)[: len(weights)], out=weights)
        return True

    def _escapes(self, packed: Bytes) -> tuple[Places | slice, Places]:
        """Which bytes of four codes have an escape (all, if most do), and where it is among the codes of these bytes.

        In two steps: numpy finds what is rarer than one in ten by a branch for each, and processors foresee none.
        """
        pairs, marks = self._pairs[: len(packed)], self._marks[: len(packed)]
        np.right_shift(packed, np.uint8(1), out=pairs)
        np.bitwise_and(pairs, packed, out=pairs)
        np.bitwise_and(pairs, _UNCHANGED, out=pairs)  # both bits of a code are set
        np.not_equal(pairs, 0, out=marks)
        most = 2 * np.count_nonzero(marks) > len(marks)
        fours = slice(None) if most else np.flatnonzero(marks)
        return fours, np.flatnonzero(self._escaped.take(packed[fours], mode="clip").view(np.bool_))


def _bits(flat: Tensor) -> Bits:
    found: Bits = flat.view(torch.int16).numpy()
    return found


def _starts(flat: Tensor) -> list[tuple[int, int]]:
    """The blocks of flat weights, in int16."""
    each = flat.element_size() // 2
    return [(start * each, min(start + BLOCK, flat.numel()) * each) for start in range(0, flat.numel(), BLOCK)]
