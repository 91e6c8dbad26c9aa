"""The kernel's own account of a load and an export: each byte once over all ranks, and bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aliquot.machine.memory import memory_use, peak_rss, reset_peak_rss
from aliquot.models.export import export
from aliquot.models.load import load_weights
from aliquot.tensor_io.parts import Part
from tests.tensor_io.world import FakeStore, PipedRanks, Tensors, run_world

MODEL: Tensors = [
    ("model.embed_tokens.weight", (15_001, 1024)),  # 31 MB in bf16
    *((f"model.layers.{i}.weight", (4096, 1021)) for i in range(12)),  # 100 MB
    ("model.norm.weight", (4096,)),
]
STORED_BYTES = 2 * (15_001 * 1024 + 12 * 4096 * 1021 + 4096)
EXCESS_BYTES = 64 << 20
SMALL_BYTES = 128 << 10  # headers, and what the ranks tell each other


class Rows:
    """This rank's rows in memory that nothing has touched yet."""

    def __init__(self, ranks: PipedRanks, dtype: torch.dtype) -> None:
        self._parts = FakeStore(MODEL, ranks.rank, ranks.world_size, kinds=["weight"], zeros=True).parts()
        self._values = {part: torch.empty(part.numel, dtype=dtype) for part in self._parts}

    def parts(self) -> Any:
        return self._parts

    def read(self, part: Part, start: int, out: torch.Tensor) -> None:
        out.copy_(self._values[part][start - part.start :][: out.numel()])

    def write(self, part: Part, start: int, values: torch.Tensor) -> None:
        self._values[part][start - part.start :][: values.numel()] = values

    @property
    def held_bytes(self) -> int:
        return sum(values.numel() * values.element_size() for values in self._values.values())


class Direct(Rows):
    def view(self, part: Part) -> torch.Tensor:
        return self._values[part]


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
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in MODEL}, directory / "model.safetensors"
    )
    return directory


@pytest.mark.few(3)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("kind", "dtype"), [(Direct, torch.bfloat16), (Direct, torch.float32), (Rows, torch.float32)])
def test_load(stored: Path, world_size: int, kind: type[Rows], dtype: torch.dtype) -> None:
    def work(ranks: PipedRanks) -> tuple[int, int, int, int]:
        store = kind(ranks, dtype)
        read, risen = measured("rchar", lambda: load_weights(store, stored, MODEL, {}, ranks))
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
        return measured("wchar", lambda: export(store, MODEL, tmp_path / "out", torch.bfloat16, files, ranks))

    ranks = run_world(world_size, work)
    assert STORED_BYTES <= sum(written for written, _ in ranks) <= STORED_BYTES + world_size * SMALL_BYTES
    assert all(risen <= EXCESS_BYTES for _, risen in ranks)
