from __future__ import annotations

import zlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from aliquot.tensor_io.checksums import BlockChecksums, combine_pieces, crc32_combine


@given(st.binary(max_size=2000), st.binary(max_size=2000))
def test_combined_crc_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_combined_crc_of_long_pieces() -> None:
    first, second = b"weights", bytes(range(256)) * (1 << 16)
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.data(), st.binary(min_size=1, max_size=300), st.integers(1, 64), st.integers(1, 4))
def test_blocks_from_pieces_of_several_ranks(data: st.DataObject, whole: bytes, block: int, ranks: int) -> None:
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=12))})
    checksums = [BlockChecksums(block) for _ in range(ranks)]
    for start, stop in pairwise(cuts):
        owner = data.draw(st.integers(0, ranks - 1))
        checksums[owner].add("file", start, memoryview(whole)[start:stop])
    pieces = data.draw(st.permutations([piece for one in checksums for piece in one.pieces()]))
    expected = [zlib.crc32(whole[i : i + block]) for i in range(0, len(whole), block)]
    assert combine_pieces(pieces, {"file": len(whole)}, block) == {"file": expected}


def test_bytes_left_out_or_given_twice_are_found() -> None:
    for spans in ([(0, 4)], [(0, 4), (3, 8)], [(4, 8)], [(0, 4), (5, 8)], [(0, 8), (0, 8)]):
        checksums = BlockChecksums()
        for start, stop in spans:
            checksums.add("file", start, memoryview(bytes(stop - start)))
        try:
            combine_pieces(checksums.pieces(), {"file": 8})
        except ValueError as error:
            assert "file" in str(error)
        else:
            raise AssertionError(spans)
