"""Frugal moments are stored as they are kept: a fraction of the bytes, and nothing lost at any world size."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from aliquot.checkpoint.checkpoint_files import SCALES, CheckpointSpec
from aliquot.checkpoint.restore import restore
from aliquot.core.errors import DamagedCheckpoint, ResumeError
from aliquot.core.on_rank_0 import SingleRank
from aliquot.optim.moments import decode_int8, encode_int8
from aliquot.optim.sizes import block_numel
from aliquot.tensor_io.manifest import verify
from aliquot.tensor_io.parts import Part
from tests.checkpoint.saving import PROGRESS, save
from tests.checkpoint.test_checkpoint import digests
from tests.examples import examples
from tests.tensor_io.world import SMALL, FakeStore, Tensors, run_world

LARGE: Tensors = [("embedding", (600, 4096)), ("norm", (4096,)), ("odd", (67, 515)), ("prime", (7, 5003))]


class FrugalStore(FakeStore):
    """Of moments that an engine has kept as `states`."""

    def __init__(self, states: str, tensors: Tensors, rank: int = 0, world_size: int = 1, zeros: bool = False) -> None:
        super().__init__(tensors, rank, world_size, zeros=zeros)
        if not zeros:
            self.values = {part: kept(states, part, values) for part, values in self.values.items()}


def kept(states: str, part: Part, values: torch.Tensor) -> torch.Tensor:
    row_numel, squared = math.prod(part.shape[1:]), part.kind == "exp_avg_sq"
    values = values.abs() if squared else values
    if part.kind == "weight" or states == "fp32" or row_numel == 1:
        return values
    if states == "bf16":
        return values.bfloat16().float()
    block = block_numel(row_numel)
    codes, scales = encode_int8(values, block, squared)
    return decode_int8(codes, scales, block, squared)


def saved(root: Path, states: Any, tensors: Tensors, ranks: Any) -> Path:
    store = FrugalStore(states, tensors, ranks.rank, ranks.world_size)
    return save(root, 7, store, CheckpointSpec(tensors, moment_format=states), {"step": 7}, ranks, 9)


def restores(directory: Path, states: str, tensors: Tensors, ranks: Any) -> bool:
    store = FrugalStore(states, tensors, ranks.rank, ranks.world_size, zeros=True)
    assert restore(directory, store, CheckpointSpec(tensors), ranks) == PROGRESS | {"step": 7}
    expected = FrugalStore(states, tensors, ranks.rank, ranks.world_size)
    return all(torch.equal(store.values[part], expected.values[part]) for part in expected.parts())


@pytest.mark.few(3)
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("tensors", [SMALL, LARGE])
def test_files_are_the_same_and_restored_at_any_world_size(tmp_path: Path, states: str, tensors: Tensors) -> None:
    found = {}
    for world in (1, 2, 3):
        run_world(world, lambda ranks, world=world: saved(tmp_path / str(world), states, tensors, ranks))
        directory = tmp_path / str(world) / "step-00000007"
        found[world] = digests(directory)
        verify(directory)
    assert found[1] == found[2] == found[3]
    for world in (1, 2, 4):
        assert run_world(world, lambda ranks: restores(directory, states, tensors, ranks)) == [True] * world


def test_checkpoint_files_have_known_sizes_and_are_readable(tmp_path: Path) -> None:
    numel = sum(math.prod(shape) for _, shape in LARGE)
    sizes = {}
    for states in ("fp32", "bf16", "int8"):
        directory = saved(tmp_path / states, states, LARGE, SingleRank())
        sizes[states] = sum(file.stat().st_size for file in directory.iterdir()) / numel
    assert 12 <= sizes["fp32"] < 12.1 and 8 <= sizes["bf16"] < 8.1 and 6 <= sizes["int8"] < 6.1
    stored = load_file(directory / "exp_avg_sq.safetensors")
    assert (stored["embedding"].dtype, stored["norm"].dtype) == (torch.uint8, torch.float32)
    expected = FrugalStore("int8", LARGE).values[Part("embedding", (600, 4096), "exp_avg_sq", 0, 600 * 4096)]
    codes, scales = stored["embedding"].flatten(), stored["embedding" + SCALES]
    assert torch.equal(decode_int8(codes, scales, 256, squared=True), expected)


def test_exact_states_load_from_frugal_checkpoint(tmp_path: Path) -> None:
    """And one that keeps less takes the exact values of old."""
    directory = saved(tmp_path, "int8", SMALL, SingleRank())
    assert restores(directory, "int8", SMALL, SingleRank())
    exact = save(tmp_path, 8, FrugalStore("int8", SMALL), CheckpointSpec(SMALL), {"step": 7}, SingleRank(), 9)
    assert restores(exact, "int8", SMALL, SingleRank())


def test_parts_that_cut_an_int8_block_are_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path, "int8", SMALL, SingleRank())
    store = FrugalStore("int8", SMALL, zeros=True)
    cut = Part("lm_head.weight", (13, 6), "exp_avg", 0, 7)
    whole = next(part for part in store.values if (part.name, part.kind) == (cut.name, cut.kind))
    store.values[cut] = store.values.pop(whole)
    with pytest.raises(ResumeError, match=r"lm_head\.weight: this checkpoint has compressed moments"):
        restore(directory, store, CheckpointSpec(SMALL), SingleRank())


@pytest.mark.parametrize(("name", "shape"), [("odd" + SCALES, [68]), ("odd" + SCALES, [0]), ("odd", [67, 514])])
def test_scales_of_other_codes_are_damage(tmp_path: Path, name: str, shape: list[int]) -> None:
    directory = saved(tmp_path, "int8", LARGE, SingleRank())
    file = directory / "exp_avg.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + length])
    fields[name]["shape"] = shape
    at = fields[name]["data_offsets"][0]
    tail, end = data[8 + length :], at + math.prod(shape) * (4 if name.endswith(SCALES) else 1)
    moved = end - fields[name]["data_offsets"][1]
    for field in fields.values():
        if "data_offsets" in field and field["data_offsets"][0] > at:
            field["data_offsets"] = [offset + moved for offset in field["data_offsets"]]
    fields[name]["data_offsets"][1] = end
    text = json.dumps(fields).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + tail[:at] + bytes(len(tail) - at + moved))
    store = FrugalStore("int8", LARGE, zeros=True)
    with pytest.raises(DamagedCheckpoint):
        restore(directory, store, CheckpointSpec(LARGE), SingleRank())


@given(rows=st.integers(1, 9), row=st.integers(2, 600), seed=st.integers(0, 99))
@settings(max_examples=examples(30), deadline=None)
def test_decoded_states_encode_to_the_same_bytes(rows: int, row: int, seed: int) -> None:
    block = block_numel(row)
    values = torch.randn(rows * row, generator=torch.Generator().manual_seed(seed)) ** 9
    for squared in (False, True):
        codes, scales = encode_int8(values.abs() if squared else values, block, squared)
        again = encode_int8(decode_int8(codes.clone(), scales, block, squared), block, squared)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
