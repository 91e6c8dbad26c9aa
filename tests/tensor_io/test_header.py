"""Headers of safetensors files and manifests of checkpoints, good and damaged."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from aliquot.core.errors import DamagedCheckpoint, UserError
from aliquot.tensor_io.header import read_header
from aliquot.tensor_io.manifest import MANIFEST, checksum, manifest_bytes, read_manifest, verify
from tests.examples import examples

GOOD = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def file_of(path: Path, header: Any, data_bytes: int = 32, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD, name: {**GOOD[name], **fields}}


def test_agrees_with_the_library(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "half": torch.arange(6).half().reshape(2, 3),
        "ids": torch.arange(5),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors").entries
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert set(entries) == set(tensors)
    for name, tensor in tensors.items():
        entry = entries[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))
        assert raw[entry.offset : entry.offset + entry.numel * entry.itemsize] == tensor.numpy().tobytes()


HOSTILE: dict[str, tuple[Any, dict[str, Any]]] = {
    "longer than the file": (GOOD, {"length": 10_000}),
    "length 2^64 - 1": (GOOD, {"length": 2**64 - 1}),
    "length 0": (GOOD, {"length": 0}),
    "empty header": (b"", {}),
    "not JSON": (b"{'a': 1}", {}),
    "not UTF-8": (b'{"\xff": 1}', {}),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), {}),
    "a list": ([1, 2], {}),
    "deep nesting": (b'{"a":' + b"[" * 200_000, {}),
    "endless digits": (b'{"a":' + b"9" * 10_000 + b"}", {}),
    "duplicate name": (
        b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        {"data_bytes": 1},
    ),
    "duplicate field": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', {"data_bytes": 1}),
    "tensor is a number": ({**GOOD, "a": 3}, {}),
    "field missing": ({**GOOD, "a": {"dtype": "F32", "shape": [6]}}, {}),
    "field too many": (changed("a", more=1), {}),
    "unknown dtype": (changed("a", dtype="F31"), {}),
    "dtype is a list": (changed("a", dtype=["F32"]), {}),
    "wrong dtype size": (changed("a", dtype="F64"), {}),
    "wrong shape": (changed("a", shape=[2, 4]), {}),
    "negative shape": (changed("a", shape=[-2, -3]), {}),
    "bool shape": (changed("a", shape=[True, 6]), {}),
    "float shape": (changed("a", shape=[2.0, 3]), {}),
    "huge shape": (changed("a", shape=[2**62, 2**62]), {}),
    "overflowing shape": (changed("a", shape=[2**64, 1]), {}),
    "many dimensions": (changed("a", shape=[1] * 65), {}),
    "shape is a string": (changed("a", shape="23"), {}),
    "negative offset": (changed("a", data_offsets=[-24, 0]), {}),
    "misordered offsets": (changed("a", data_offsets=[24, 0]), {}),
    "bool offset": (changed("a", data_offsets=[False, 24]), {}),
    "three offsets": (changed("a", data_offsets=[0, 24, 24]), {}),
    "overlap": (changed("b", data_offsets=[20, 28]), {}),
    "same bytes": ({"a": GOOD["a"], "b": GOOD["a"]}, {"data_bytes": 24}),
    "gap": (changed("b", data_offsets=[26, 34]), {"data_bytes": 34}),
    "gap at the start": ({"b": GOOD["b"]}, {}),
    "truncated": (GOOD, {"data_bytes": 31}),
    "bytes after the end": (GOOD, {"data_bytes": 33}),
    "endless name": (b'{"' + b"a" * 100_000 + b'": 1}', {}),
    "lone surrogate": (b'{"\\ud800": 1}', {}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header(case: str, tmp_path: Path) -> None:
    header, how = HOSTILE[case]
    path = file_of(tmp_path / "x.safetensors", header, **how)
    with pytest.raises(UserError, match=r"x\.safetensors") as caught:
        read_header(path)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    str(caught.value).encode()


def test_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "short").write_bytes(b"1234567")
    for name in ("fifo", "loop", "short", "absent", "."):
        with pytest.raises(UserError):
            read_header(tmp_path / name)


def test_header_over_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((200_000_000).to_bytes(8, "little"))
    os.truncate(path, 300_000_000)  # sparse
    with pytest.raises(UserError, match="100000000"):
        read_header(path)


def test_good_header_with_padding(tmp_path: Path) -> None:
    header = read_header(file_of(tmp_path / "x.safetensors", json.dumps(GOOD).encode() + b"   "))
    assert list(header.entries) == ["a", "b"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=6,
)
tensors = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", "U8"]) | json_values},
    optional={
        "shape": st.lists(st.integers(0, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 32), min_size=2, max_size=2) | json_values,
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(300))
@given(st.dictionaries(st.text(max_size=3), tensors | json_values, max_size=4), st.integers(0, 40))
def test_fuzz_fields(tmp_path: Path, header: dict[str, Any], data_bytes: int) -> None:
    parse_or_refuse(file_of(tmp_path / "x.safetensors", header, data_bytes))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=6), st.integers(0, 300))
def test_fuzz_bytes(tmp_path: Path, flips: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(file_of(tmp_path / "x.safetensors", GOOD).read_bytes())
    for place, value in flips:
        data[place % len(data)] ^= value
    (tmp_path / "x.safetensors").write_bytes(data[: len(data) - cut % 3 * cut])
    parse_or_refuse(tmp_path / "x.safetensors")


def parse_or_refuse(path: Path) -> None:
    """Only a UserError escapes, and what is accepted lies inside the file without overlap."""
    try:
        header = read_header(path)
    except UserError:
        return
    end = header.header_bytes
    for entry in header.entries.values():
        assert entry.offset == end
        end += entry.numel * entry.itemsize
    assert end == path.stat().st_size


FILES = {"a.safetensors": bytes(range(200)), "state.json": b"{}", "empty": b""}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    records = {name: checksum(data) for name, data in FILES.items()}
    (tmp_path / MANIFEST).write_bytes(manifest_bytes(records, ["empty"]))
    return tmp_path


def rewrite(directory: Path, change: dict[str, Any]) -> None:
    """A manifest that lies consistently: its own checksum fits."""
    fields = json.loads((directory / MANIFEST).read_text())
    del fields["crc32"]
    fields |= change
    own = zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    (directory / MANIFEST).write_text(json.dumps({**fields, "crc32": own}))


def test_verify(directory: Path) -> None:
    manifest = verify(directory)
    assert set(manifest.files) == set(FILES)
    assert manifest.config_files == ["empty"]


@pytest.mark.long
def test_every_bit_of_the_manifest_counts(directory: Path) -> None:
    path = directory / MANIFEST
    good = path.read_bytes()
    for bit in range(0, 8 * len(good), 3):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            read_manifest(directory)
        except DamagedCheckpoint:
            continue
        assert json.loads(data) == json.loads(good), f"bit {bit} went unnoticed"


@pytest.mark.parametrize("name", FILES)
def test_missing_file(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name}: missing"):
        read_manifest(directory)


def test_wrong_size_and_damaged_block(directory: Path) -> None:
    with (directory / "a.safetensors").open("r+b") as file:
        file.write(b"x")
    read_manifest(directory)  # sizes only
    with pytest.raises(DamagedCheckpoint, match=r"a.safetensors: .*byte 0 "):
        verify(directory)
    (directory / "a.safetensors").write_bytes(b"short")
    with pytest.raises(DamagedCheckpoint, match="5 bytes instead of 200"):
        read_manifest(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../state.json": {"bytes": 2, "crc32": [1]}}},
        {"files": {"/etc/hostname": {"bytes": 2, "crc32": [1]}}},
        {"files": {"": {"bytes": 0, "crc32": []}}},
        {"files": {"state.json": {"bytes": 2, "crc32": []}}},
        {"files": {"state.json": {"bytes": 2, "crc32": [1, 2]}}},
        {"files": {"state.json": {"bytes": True, "crc32": [1]}}},
        {"files": {"state.json": {"bytes": -1, "crc32": [1]}}},
        {"files": {"state.json": {"bytes": 2**80, "crc32": [1]}}},
        {"files": {"state.json": {"bytes": 2.0, "crc32": [1]}}},
        {"files": {"state.json": {"bytes": 2, "crc32": [-1]}}},
        {"files": {"state.json": {"bytes": 2, "crc32": "1"}}},
        {"files": {"state.json": 3}},
        {"files": []},
        {"config_files": ["../secret"]},
        {"config_files": ["a", 1]},
        {"version": 2},
        {"format": "other"},
        {"block_bytes": 0},
        {"more": 1},
    ],
)
def test_manifests_that_lie(directory: Path, change: dict[str, Any]) -> None:
    rewrite(directory, change)
    with pytest.raises(DamagedCheckpoint) as caught:
        verify(directory)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_absent_manifest(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"no manifest\.json"):
        read_manifest(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200))
@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.text(), st.lists, max_leaves=4).map(lambda v: json.dumps(v).encode())
)
def test_fuzz(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(DamagedCheckpoint):
        read_manifest(tmp_path)
