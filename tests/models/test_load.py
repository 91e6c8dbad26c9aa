"""Loading and exporting: each byte once over all ranks, by the account of the kernel, too, and bounded memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aliquot.core.errors import UserError, WeightsFileError
from aliquot.core.on_rank_0 import SingleRank
from aliquot.machine.memory import memory_use, peak_rss, reset_peak_rss
from aliquot.models.export import export
from aliquot.models.load import load_weights
from aliquot.tensor_io.parts import Part
from tests.tensor_io.world import FakeStore, MemoryStore, PipedRanks, Tensors, run_world, value_of

MODEL: Tensors = [
    ("model.embed_tokens.weight", (9, 4)),
    ("model.layers.0.q_proj.weight", (4, 4)),
    ("model.norm.weight", (4,)),
    ("model.scale", ()),
]
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def values(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    parts = FakeStore(MODEL, kinds=["weight"]).parts()
    return {part.name: value_of(part).reshape(part.shape).to(dtype) for part in parts}


def load(directory: Path, ranks: Any = None, dtype: torch.dtype = torch.float32) -> int:
    ranks = ranks or SingleRank()
    store = FakeStore(MODEL, ranks.rank, ranks.world_size, zeros=True)
    read_bytes = load_weights(store, directory, MODEL, TIED, ranks)
    for part, held in store.values.items():
        original = value_of(part)[part.start : part.stop].to(dtype).float()
        assert torch.equal(held, original if part.kind == "weight" else torch.zeros(part.numel))
    return read_bytes


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_rank_reads_a_byte(tmp_path: Path, dtype: torch.dtype, world: int) -> None:
    save_file(values(dtype), tmp_path / "model.safetensors")
    read_bytes = run_world(world, lambda ranks: load(tmp_path, ranks, dtype))
    assert sum(read_bytes) == (36 + 16 + 4 + 1) * dtype.itemsize


def test_shards_with_different_dtypes(tmp_path: Path) -> None:
    stored = values()
    first = {name: stored.pop(name).bfloat16() for name in ("model.norm.weight", "model.scale")}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(stored, tmp_path / "model-00002-of-00002.safetensors")
    index = {name: f"model-0000{1 + (name in stored)}-of-00002.safetensors" for name in (*first, *stored)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    store = FakeStore(MODEL, kinds=["weight"], zeros=True)
    load_weights(store, tmp_path, MODEL, TIED, SingleRank())
    for part, held in store.values.items():
        assert torch.equal(held, value_of(part).to(torch.bfloat16 if part.name in first else torch.float32).float())


@pytest.mark.parametrize("stored", [{"model.embed_tokens.weight"}, {"lm_head.weight"}, {*TIED, *TIED.values()}])
def test_tied_weights_under_either_name(tmp_path: Path, stored: set[str]) -> None:
    tensors = values()
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {name: embedding.clone() for name in stored}, tmp_path / "model.safetensors")
    load(tmp_path)


def test_names_of_the_base_model_and_computed_buffers(tmp_path: Path) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in values().items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    tensors["h.0.attn.bias"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)


def test_mismatched_tensors_are_named_on_every_rank(tmp_path: Path) -> None:
    tensors = values()
    del tensors["model.norm.weight"]
    tensors["model.scale"] = torch.zeros(2)
    tensors |= {f"model.vision.{i}": torch.zeros(1) for i in range(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    answers = run_world(2, lambda ranks: load(tmp_path, ranks))
    assert [type(answer) for answer in answers] == [WeightsFileError] * 2
    assert str(answers[0]) == (
        f"{tmp_path}: tensors do not fit the model; missing: model.norm.weight; not of this model: model.vision.0, "
        "model.vision.1, model.vision.2, model.vision.3, model.vision.4 and 2 more; of the wrong shape: model.scale is "
        "[2] instead of []"
    )


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        load(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"no model\.safetensors .*convert the \.bin"):
        load(tmp_path)
    save_file(values(), tmp_path / "model.safetensors")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(300)
    with pytest.raises(UserError, match=r"model\.safetensors: truncated"):
        load(tmp_path)


def test_error_of_one_rank_reaches_all(tmp_path: Path) -> None:
    save_file(values(), tmp_path / "model.safetensors")

    def work(ranks: PipedRanks) -> int:
        directory = tmp_path if ranks.rank == 0 else tmp_path / "not mounted here"
        return load_weights(FakeStore(MODEL, ranks.rank, 2), directory, MODEL, TIED, ranks)

    answers = run_world(2, work)
    assert [type(answer) for answer in answers] == [WeightsFileError] * 2
    assert {str(a) for a in answers} == {f"rank 1: {tmp_path / 'not mounted here'}: no such directory"}


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_weight_is_named(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    stored = values(dtype)
    stored["model.layers.0.q_proj.weight"][2, 3] = value
    save_file(stored, tmp_path / "model.safetensors")
    expected = rf"model.safetensors: the weight model.layers.0.q_proj.weight is {value} at \[2, 3\]: no setting can"
    assert run_world(2, lambda ranks: _message(tmp_path, ranks, expected)) == [True, True]


def _message(directory: Path, ranks: Any, expected: str) -> bool:
    with pytest.raises(WeightsFileError, match=expected):
        load(directory, ranks)
    return True


def test_weights_whose_sum_is_infinite_are_finite(tmp_path: Path) -> None:
    stored = values()
    stored["model.embed_tokens.weight"].fill_(3e38)
    save_file(stored, tmp_path / "model.safetensors")
    load_weights(FakeStore(MODEL, kinds=["weight"], zeros=True), tmp_path, MODEL, TIED, SingleRank())


BOUNDED: Tensors = [
    ("model.embed_tokens.weight", (15_001, 1024)),  # 31 MB in bf16
    *((f"model.layers.{i}.weight", (4096, 1021)) for i in range(12)),  # 100 MB
    ("model.norm.weight", (4096,)),
]
STORED_BYTES = 2 * (15_001 * 1024 + 12 * 4096 * 1021 + 4096)
EXCESS_BYTES = 64 << 20
SMALL_BYTES = 128 << 10  # headers, and what the ranks tell each other


class Rows(MemoryStore):
    """This rank's rows in memory that nothing has touched yet."""

    def __init__(self, ranks: PipedRanks, dtype: torch.dtype) -> None:
        parts = FakeStore(BOUNDED, ranks.rank, ranks.world_size, kinds=["weight"], zeros=True).parts()
        super().__init__({part: torch.empty(part.numel, dtype=dtype) for part in parts})

    @property
    def held_bytes(self) -> int:
        return sum(values.numel() * values.element_size() for values in self.values.values())


class Direct(Rows):
    def view(self, part: Part) -> torch.Tensor:
        return self.values[part]


def account(name: str) -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines[name])


def measured(counter: str, work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that `work` asked the kernel for, and how far private memory rose."""
    if not reset_peak_rss():
        raise OSError("the kernel does not reset the peak")
    rss_bytes, counted = memory_use().rss_bytes, account(counter)
    work()
    return account(counter) - counted, peak_rss() - rss_bytes


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stored")
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in BOUNDED}, directory / "model.safetensors"
    )
    return directory


@pytest.mark.few(3)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("kind", "dtype"), [(Direct, torch.bfloat16), (Direct, torch.float32), (Rows, torch.float32)])
def test_load(stored: Path, world_size: int, kind: type[Rows], dtype: torch.dtype) -> None:
    def work(ranks: PipedRanks) -> tuple[int, int, int, int]:
        store = kind(ranks, dtype)
        read, risen = measured("rchar", lambda: load_weights(store, stored, BOUNDED, {}, ranks))
        return read, risen, store.held_bytes, memory_use().private_bytes

    ranks = run_world(world_size, work)
    assert STORED_BYTES <= sum(read for read, *_ in ranks) <= STORED_BYTES + world_size * SMALL_BYTES
    for read, risen, held, private in ranks:
        assert read <= STORED_BYTES // world_size + (5 << 20), (
            "of each tensor its own rows, an even share but for a row"
        )
        assert risen <= held + EXCESS_BYTES
        assert private >= held, "it is all there: nothing is left to be read later"


@pytest.mark.few(2)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", [Rows, Direct])
def test_export(tmp_path: Path, world_size: int, kind: type[Rows]) -> None:
    def work(ranks: PipedRanks) -> tuple[int, int]:
        store = kind(ranks, torch.float32)
        for part in store.parts():
            store.write(part, part.start, torch.ones(part.numel))
        files = {"config.json": b"{}"}
        return measured("wchar", lambda: export(store, BOUNDED, tmp_path / "out", torch.bfloat16, files, ranks))

    ranks = run_world(world_size, work)
    assert STORED_BYTES <= sum(written for written, _ in ranks) <= STORED_BYTES + world_size * SMALL_BYTES
    assert all(risen <= EXCESS_BYTES for _, risen in ranks)
