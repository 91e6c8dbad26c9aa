from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aliquot.core.errors import UserError
from aliquot.tensor_io.bytemap import ByteMap
from aliquot.tensor_io.file_layout import FilesLayout
from aliquot.tensor_io.range_io import BUFFER_BYTES, RangeReader, TargetFile
from aliquot.tensor_io.transfer import drain, fill
from tests.examples import examples
from tests.tensor_io.world import SMALL, FakeStore, Tensors, layout_of, value_of

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
models = st.lists(shapes, min_size=1, max_size=6).map(lambda found: [(f"t{i}", shape) for i, shape in enumerate(found)])


def written(directory: Path, tensors: Tensors, dtype: torch.dtype, limit: int, world_size: int) -> FilesLayout:
    """The weights of a FakeStore, written by `world_size` ranks one after the other."""
    layout = layout_of(tensors, dtype, limit, "model")
    layout.create_files(directory)
    for rank in range(world_size):
        store = FakeStore(tensors, rank, world_size)
        drain(store, {"weight": layout.byte_map(directory).entries})
    return layout


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


@settings(max_examples=examples(60))
@given(models, st.sampled_from(FLOATS), st.integers(1, 200), st.integers(1, 4), st.integers(1, 4))
def test_round_trip(tensors: Tensors, dtype: torch.dtype, limit: int, writers: int, readers: int) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
        layout = written(Path(one), tensors, dtype, limit, 1)
        written(Path(many), tensors, dtype, limit, writers)
        assert digests(Path(one)) == digests(Path(many))

        found = ByteMap.from_directory(Path(many))
        assert found == layout.byte_map(Path(many)), "what is on disk is what was laid out"
        loaded = {}
        for file in layout.files:
            loaded |= load_file(Path(many) / file.name)
        for part in FakeStore(tensors, kinds=["weight"]).parts():
            assert torch.equal(loaded[part.name].flatten(), value_of(part).to(dtype)), "rounded as torch rounds"

        read_bytes = 0
        for rank in range(readers):
            store = FakeStore(tensors, rank, readers, kinds=["weight"], zeros=True)
            read_bytes += fill(store, {"weight": found.entries})
            assert store.is_original(dtype)
        assert read_bytes == sum(entry.numel * entry.itemsize for entry in found.entries.values()), "once, all ranks"


def test_shards_as_transformers_writes_them(tmp_path: Path) -> None:
    layout = layout_of(SMALL, torch.float32, 400, "model")
    split = split_torch_state_dict_into_shards(
        {name: torch.zeros(shape) for name, shape in SMALL},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=400,
    )
    assert len(layout.files) > 1
    assert {file.name: [tensor.name for tensor in file.tensors] for file in layout.files} == split.filename_to_tensors
    layout.create_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*split.filename_to_tensors, "model.safetensors.index.json"}


@pytest.mark.few(8)
@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_any_dtype_to_any_other(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    numel = BUFFER_BYTES // 8 * 2 + 3  # more than one buffer of the widest
    values = torch.randn(numel).to(stored)
    values[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-30]).to(stored)
    save_file({"head": torch.zeros(3, dtype=stored), "x": values}, tmp_path / "model.safetensors")
    out = torch.empty(numel - 7, dtype=wanted)
    with RangeReader() as reader:
        reader.read(ByteMap.from_directory(tmp_path).entries["x"], 2, out)
    assert torch.equal(out[2:], values[4:-5].to(wanted)) and out[0] == values[2]


def test_bf16_ties_round_to_even(tmp_path: Path) -> None:
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=torch.int32).view(torch.float32)
    layout = layout_of([("x", (4,))], torch.bfloat16, 1 << 30, "model")
    layout.create_files(tmp_path)
    store = FakeStore([("x", (4,))], kinds=["weight"])
    store.values = dict.fromkeys(store.values, ties)
    drain(store, {"weight": layout.byte_map(tmp_path).entries})
    stored = load_file(tmp_path / "model.safetensors")["x"].view(torch.int16)
    assert stored.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


def test_values_of_one_byte(tmp_path: Path) -> None:
    values = torch.arange(5_000_000).remainder(100).to(torch.uint8).view(torch.float8_e5m2)  # all finite
    save_file({"x": values}, tmp_path / "model.safetensors")
    store = FakeStore([("x", (5_000_000,))], kinds=["weight"], zeros=True)
    fill(store, {"weight": ByteMap.from_directory(tmp_path).entries})
    (held,) = store.values.values()
    assert torch.equal(held, values.float())


def test_a_range_outside_the_tensor_is_refused(tmp_path: Path) -> None:
    written(tmp_path, SMALL, torch.float32, 1 << 30, 1)
    entry = ByteMap.from_directory(tmp_path).entries["lm_head.weight"]
    before = digests(tmp_path)
    for start in (-1, entry.numel - 1):
        with RangeReader() as reader, pytest.raises(ValueError, match="lm_head"):
            reader.read(entry, start, torch.empty(2))
        file = TargetFile(entry.file)
        with pytest.raises(ValueError, match="lm_head"):
            file.write(entry, start, torch.empty(2))
        file.sync_and_close()
    assert digests(tmp_path) == before


def test_a_file_that_changes_after_its_header_was_read(tmp_path: Path) -> None:
    written(tmp_path, SMALL, torch.float32, 1 << 30, 1)
    entry = ByteMap.from_directory(tmp_path).entries["lm_head.weight"]
    path = tmp_path / "model.safetensors"
    with RangeReader() as reader:
        reader.read(entry, 0, torch.empty(2))
        with path.open("r+b") as file:
            file.truncate(entry.offset + 8)
        with pytest.raises(UserError, match=r"model.safetensors: .*shorter"):
            reader.read(entry, 0, torch.empty(4))
    with RangeReader() as reader, pytest.raises(UserError, match="bytes where its header"):
        reader.read(entry, 0, torch.empty(2))
    path.unlink()
    with RangeReader() as reader, pytest.raises(UserError, match="No such file"):
        reader.read(entry, 0, torch.empty(2))
