from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aliquot.core.errors import UserError
from aliquot.tensor_io.bytemap import ByteMap, check_tensors, listed


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
