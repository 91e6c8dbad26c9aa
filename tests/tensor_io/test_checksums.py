"""Checksums of files, and maps of bytes."""

from __future__ import annotations

import json
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from aliquot.core.errors import UserError
from aliquot.tensor_io.bytemap import ByteMap, check_tensors, listed
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


def sharded(directory: Path, weight_map: Any) -> Path:
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, directory / "model-00001-of-00002.safetensors")
    save_file({"c": torch.zeros(4)}, directory / "model-00002-of-00002.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def test_shards(tmp_path: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}
    found = ByteMap.from_directory(sharded(tmp_path, names))
    assert {name: entry.file.name for name, entry in found.entries.items()} == names
    assert {path.name for path in found.header_bytes} == set(names.values())


def test_a_file_beside_shards_holds_the_same_weights_or_is_refused(tmp_path: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}
    single = sharded(tmp_path, names) / "model.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.zeros(2), "c": torch.zeros(4)}, single)
    assert {entry.file for entry in ByteMap.from_directory(tmp_path).entries.values()} == {single}
    for other in ({"a": torch.zeros(2), "c": torch.ones(4)}, {"a": torch.zeros(2)}, {"a": torch.zeros(2).half()}):
        save_file(other, single)
        with pytest.raises(UserError, match=r"model.safetensors and the shards of .*index.json are both here, and"):
            ByteMap.from_directory(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))  # an index of this very file
    assert set(ByteMap.from_directory(tmp_path).entries) == {"a"}
    index.write_text(json.dumps({"weight_map": {"b": "gone-00001-of-00001.safetensors"}}))
    assert set(ByteMap.from_directory(tmp_path).entries) == {"a"}


def test_stem(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "exp_avg.safetensors")
    assert set(ByteMap.from_directory(tmp_path, "exp_avg").entries) == {"a"}
    with pytest.raises(UserError, match=r"no exp_avg_sq\.safetensors"):
        ByteMap.from_directory(tmp_path, "exp_avg_sq")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "absent.safetensors"}, "cannot read: No such file"),
        ({"a": "../x.safetensors"}, "not the name"),
        ({"a": "/etc/x.safetensors"}, "not the name"),
        ({"a": "model\0.safetensors"}, "not the name"),
        ({"a": "model\n.safetensors"}, "not the name"),
        ({"a": "\ud800.safetensors"}, "not the name"),
        ({"a": "config.json"}, "not the name"),
        ({"a": 3}, "not the name"),
        ({"a": ["model-00001-of-00002.safetensors"]}, "not the name"),
        ({"a": "model-00002-of-00002.safetensors"}, "not in the files.*: a$"),
        ({f"t{i}": "model-00002-of-00002.safetensors" for i in range(9)}, "t0, t1, t2, t3, t4 and 4 more"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_hostile_index(tmp_path: Path, weight_map: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ByteMap.from_directory(sharded(tmp_path, weight_map))


def test_directory_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        ByteMap.from_directory(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"convert the \.bin"):
        ByteMap.from_directory(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        ByteMap.from_directory(tmp_path / "absent")


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.int32)}, tmp_path / "model.safetensors")
    entries = ByteMap.from_directory(tmp_path).entries
    with pytest.raises(UserError) as caught:
        check_tensors([("a", (1, 2)), ("b", (3,)), ("c", ())], entries, tmp_path, extra=["d"])
    for part in ("missing: c", "not of this model: d", "a is [2] instead of [1, 2]", "b is torch.int32"):
        assert part in str(caught.value)
    check_tensors([("a", (2,))], {"a": entries["a"]}, tmp_path)


def test_listed() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(list("abcdefg")) == "a, b, c, d, e and 2 more"
