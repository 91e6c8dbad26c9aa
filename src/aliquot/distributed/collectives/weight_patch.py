"""Messages about updated weights: encode the changes of bf16 weights losslessly, in few bytes, with checksums.

In one optimizer step most weights keep their bits, and most changed weights change by one unit in the last place. The
patch of a changed block has a two-bit code per weight: the difference of the bit patterns is 0, 1, -1 or an escape. An
escaped difference follows as one byte; a difference that does not fit one byte follows as a marker byte and two bytes.
The patch of an unchanged block is empty. If a patch would be longer than the weights of its block, or the receiver does
not have the old weights, the message has the weights themselves, in any dtype. Every block has a checksum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aliquot.distributed.collectives.buffer_sizes import PATCH_BLOCK
from aliquot.distributed.collectives.wire import checksum, corruption_error

# One entry per block, at the start of a message.
_TABLE = np.dtype([("bytes", "<i4"), ("wide", "<i4"), ("checksum", "<u8")])
# The code of a weight is its difference plus one (0, 1, 2), or 3 for any other difference.
_ESCAPE, _WIDE = np.uint16(3), np.int8(-128)
_UNCHANGED = np.uint8(0b01010101)  # four codes of difference 0
# Factor that packs four codes into a byte: a uint64 of codes c0 to c3, 16 bits each, times _PACK has
# c0 | c1 << 2 | c2 << 4 | c3 << 6 as its seventh byte.
_PACK = np.uint64(1 << 48 | 1 << 34 | 1 << 20 | 1 << 6)
_LANES = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3  # the four codes in every byte

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.int16]
Places = npt.NDArray[np.intp]


def max_patch_bytes(numel: int, itemsize: int = 2) -> int:
    """Return the largest possible size of the message for `numel` weights."""
    return _TABLE.itemsize * -(-numel // PATCH_BLOCK) + itemsize * numel


class WeightPatches:
    """Encode and decode patches. An object is not thread-safe, because all calls share its scratch memory."""

    def __init__(self) -> None:
        self._shifted = np.empty(PATCH_BLOCK, np.uint16)
        self._codes = np.empty(PATCH_BLOCK, np.uint16)
        # An array instead of a scalar, because numpy's minimum with a scalar takes five times as long.
        self._escape = np.full(PATCH_BLOCK, _ESCAPE)
        self._packed = np.empty(PATCH_BLOCK // 4, np.uint8)
        self._pairs = np.empty(PATCH_BLOCK // 4, np.uint8)
        self._marks = np.empty(PATCH_BLOCK // 4, np.bool_)
        self._decoded = np.empty(PATCH_BLOCK // 4, np.int64)
        # Lookup tables, indexed by a byte of four codes: the four differences (int16) as one int64, and whether each
        # code is an escape (bool) as one uint32.
        self._differences = (_LANES - 1).astype(np.int16).view(np.int64).ravel()
        self._escaped = (_LANES == _ESCAPE).view(np.uint32).ravel()

    def encode(self, old: Tensor | None, new: Tensor, out: Tensor) -> int:
        """Write the message that turns flat `old` into `new` to `out`, uint8 [max_patch_bytes], and return its size.

        If `old` is None, the message has the weights themselves.
        """
        before, values, buffer = None if old is None else _bits(old), _bits(new), out.numpy()
        table = buffer[: _TABLE.itemsize * len(_blocks(new))].view(_TABLE)
        fields, end = [], table.nbytes
        for start, stop in _blocks(new):
            parts: list[Bytes] = [values[start:stop].view(np.uint8)]
            wide, block_start = -1, end
            if before is not None:
                patch, wide_of_patch = self._patch(before[start:stop], values[start:stop])
                if sum(part.nbytes for part in patch) < parts[0].nbytes:
                    parts, wide = patch, wide_of_patch
            for part in parts:
                buffer[end : end + part.nbytes] = part
                end += part.nbytes
            fields.append((end - block_start, wide, checksum(values[start:stop])))
        table[:] = fields
        return end

    def decode(self, message: Tensor, weights: Tensor, who: str) -> int:
        """Turn the old flat `weights` into the new weights, in place, by applying a message of `encode`.

        Returns the size of the message, which may be the beginning of a longer one. Raises SelfTestError, whose text
        starts with `who`, if the message or the result is corrupted.
        """
        data, values = message.numpy(), _bits(weights)
        table = data[: _TABLE.itemsize * len(_blocks(weights))].view(_TABLE)
        end = table.nbytes
        for (start, stop), (size, wide, expected) in zip(_blocks(weights), table.tolist(), strict=True):
            body, block = data[end : end + max(0, size)], values[start:stop]
            end += len(body)
            valid = len(body) == size
            if valid and wide < 0:
                valid = size == block.nbytes
                if valid:
                    block.view(np.uint8)[:] = body
            elif valid and size:
                valid = self._apply(body, wide, block)
            if not valid or checksum(block) != expected:
                raise corruption_error(who)
        return end

    def _patch(self, old: Bits, new: Bits) -> tuple[list[Bytes], int]:
        """Return the parts of a patch, and the number of differences that take two bytes."""
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
        """Apply the patch of one block. Return False if `body` is not a valid patch for this number of weights."""
        words = -(-len(weights) // 4)
        packed, narrow = body[:words], body[words : len(body) - 2 * wide].view(np.int8)
        if len(body) < words + 2 * wide:
            return False
        differences = self._differences.take(packed, out=self._decoded[:words], mode="clip")  # "raise" would buffer
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
        """Return the indices of bytes with an escape, and the indices of escapes among the codes of those bytes.

        If most bytes contain an escape, the first result is a slice of all bytes. The search has two steps, because
        numpy branches per element if fewer than one element in ten matches, and CPUs cannot predict these branches.
        """
        pairs, marks = self._pairs[: len(packed)], self._marks[: len(packed)]
        np.right_shift(packed, np.uint8(1), out=pairs)
        np.bitwise_and(pairs, packed, out=pairs)
        np.bitwise_and(pairs, _UNCHANGED, out=pairs)  # a bit stays set if both bits of its code are set
        np.not_equal(pairs, 0, out=marks)
        most = 2 * np.count_nonzero(marks) > len(marks)
        fours = slice(None) if most else np.flatnonzero(marks)
        return fours, np.flatnonzero(self._escaped.take(packed[fours], mode="clip").view(np.bool_))


def _bits(flat: Tensor) -> Bits:
    bits: Bits = flat.view(torch.int16).numpy()
    return bits


def _blocks(flat: Tensor) -> list[tuple[int, int]]:
    """Return the start and the end of every block of flat weights, in units of int16."""
    width = flat.element_size() // 2
    return [
        (start * width, min(start + PATCH_BLOCK, flat.numel()) * width) for start in range(0, flat.numel(), PATCH_BLOCK)
    ]
