from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.tensor_io.checksums import BLOCK_BYTES, BlockChecksums, BlockShares


@given(st.data(), st.binary(min_size=1, max_size=300), st.integers(1, 64), st.integers(1, 4))
def test_blocks_from_pieces_of_several_ranks(data: st.DataObject, whole: bytes, block: int, ranks: int) -> None:
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=12))})
    checksums = [BlockChecksums(block) for _ in range(ranks)]
    for start, stop in data.draw(st.permutations(list(pairwise(cuts)))):
        owner = data.draw(st.integers(0, ranks - 1))
        checksums[owner].add("file", start, memoryview(whole)[start:stop])
    sizes = {"file": len(whole), "empty": 0}
    shares = BlockShares.empty(sizes, block)
    for one in data.draw(st.permutations(checksums)):
        shares = shares.plus(one.shares(sizes))
    expected = [zlib.crc32(whole[i : i + block]) for i in range(0, len(whole), block)]
    assert shares.blocks() == {"empty": [], "file": expected}


def test_long_pieces_and_several_files() -> None:
    files = {name: np.random.default_rng(seed).bytes(size) for seed, (name, size) in enumerate(SIZES.items())}
    checksums = BlockChecksums()
    for name, content in files.items():
        for start, stop in pairwise([0, 7, 7 << 18, len(content)]):
            checksums.add(name, start, memoryview(content)[start:stop])
    checksums.add("of another checkpoint", 0, memoryview(b"bytes"))
    assert checksums.shares(SIZES).blocks() == {
        name: [zlib.crc32(content[i : i + BLOCK_BYTES]) for i in range(0, len(content), BLOCK_BYTES)]
        for name, content in files.items()
    }


SIZES = {"b": BLOCK_BYTES + 12345, "a": 2 << 20}


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 4)],
        [(0, 1)] * 2 + [(3, 4)] * 2 + [(4, 8)],
        [(0, 4), (3, 8)],
        [(4, 8)],
        [(0, 4), (5, 8)],
        [(0, 8), (0, 8)],
        [(0, 4), (0, 4)],
        [(0, 8), (8, 9)],
    ],
)
def test_bytes_left_out_or_given_twice_are_found(spans: list[tuple[int, int]]) -> None:
    checksums = BlockChecksums()
    for start, stop in spans:
        checksums.add("file", start, memoryview(bytes(stop - start)))
    with pytest.raises(ValueError, match="file"):
        checksums.shares({"file": 8}).blocks()
