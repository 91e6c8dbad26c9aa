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

from aliquot.collectives.message_checksums import checksum, not_as_sent

BLOCK = 1 << 16  # elements: what a block takes to encode stays in the second-level cache
_TABLE = np.dtype([("bytes", "<i4"), ("wide", "<i4"), ("checksum", "<u8")])  # of each block, before all of them
_ESCAPE, _WIDE = -2, -128
# Codes c0 .. c3, one a byte of a word, times this have c0 | c1 << 2 | c2 << 4 | c3 << 6 as the highest byte.
_PACK = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)
_CODES = np.uint32(0x03030303)
_ESCAPED = np.uint8(_ESCAPE & 3)

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.int16]


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
        self._difference = torch.empty(BLOCK, dtype=torch.int16)
        self._clamped = torch.empty(BLOCK, dtype=torch.int16)
        self._codes = torch.empty(BLOCK, dtype=torch.int8)
        self._words = np.empty(BLOCK // 4, np.uint32)
        self._places = torch.empty(BLOCK // 4, dtype=torch.int32)
        self._found = torch.empty(BLOCK // 4, dtype=torch.int64)
        self._marks = np.empty(BLOCK, np.bool_)
        # Of each byte of four codes their differences, int16, as one int64.
        codes = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3
        differences = np.array([0, 1, _ESCAPE, -1], np.int16)[codes]
        self._differences = torch.from_numpy(differences.view(np.int64).ravel())

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
        difference = self._difference[:padded]
        bits = difference.numpy()
        np.subtract(new, old, out=bits[:count])
        bits[count:] = 0
        torch.clamp(difference, -2, 2, out=self._clamped[:padded])
        codes = self._codes[:padded].copy_(self._clamped[:padded]).numpy().view(np.uint32)
        np.bitwise_and(codes, _CODES, out=codes)
        packed = np.multiply(codes, _PACK, out=self._words[: padded // 4]).view(np.uint8)[3::4]
        if not np.bitwise_or.reduce(codes):
            return [], 0
        escapes = np.compress(np.equal(codes.view(np.uint8), _ESCAPED, out=self._marks[:padded]), bits)
        narrow = escapes.astype(np.int8)
        is_wide = (narrow != escapes) | (narrow == _WIDE)
        narrow[is_wide] = _WIDE
        wide = escapes[is_wide]
        return [packed, narrow.view(np.uint8), wide.view(np.uint8)], len(wide)

    def _apply(self, body: Bytes, wide: int, weights: Bits) -> bool:
        """Whether the patch is one of as many weights."""
        words = -(-len(weights) // 4)
        narrow = body[words : len(body) - 2 * wide].view(np.int8)
        if len(body) < words + 2 * wide:
            return False
        places = self._places[:words].copy_(torch.from_numpy(body[:words]))
        torch.index_select(self._differences, 0, places, out=self._found[:words])
        differences = self._found[:words].numpy().view(np.int16)[: len(weights)]
        escapes = np.flatnonzero(np.equal(differences, np.int16(_ESCAPE), out=self._marks[: len(weights)]))
        followed = narrow.astype(np.int16)
        is_wide = followed == _WIDE
        if len(narrow) != len(escapes) or np.count_nonzero(is_wide) != wide:
            return False
        followed[is_wide] = np.frombuffer(body[len(body) - 2 * wide :].tobytes(), np.int16)
        differences[escapes] = followed
        np.add(weights, differences, out=weights)
        return True


def _bits(flat: Tensor) -> Bits:
    found: Bits = flat.view(torch.int16).numpy()
    return found


def _starts(flat: Tensor) -> list[tuple[int, int]]:
    """The blocks of flat weights, in int16."""
    each = flat.element_size() // 2
    return [(start * each, min(start + BLOCK, flat.numel()) * each) for start in range(0, flat.numel(), BLOCK)]
