from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from aliquot.core.errors import UserError
from aliquot.tensor_io.header import read_header
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
