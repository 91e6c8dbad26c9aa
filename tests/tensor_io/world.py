"""For tests of storage: ranks that are real processes, and a store that divides tensors by rows as FSDP2 does."""

from __future__ import annotations

import json
import math
import multiprocessing
import zlib
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from aliquot.tensor_io.file_layout import FilesLayout, LayoutEntry
from aliquot.tensor_io.parts import KINDS, Kind, Part

Tensors = list[tuple[str, tuple[int, ...]]]

SMALL: Tensors = [
    ("model.embed_tokens.weight", (11, 6)),
    ("model.layers.0.q_proj.weight", (6, 6)),  # 2 and 3 ranks: even
    ("model.layers.0.norm.weight", (7,)),
    ("model.scale", ()),
    ("model.layers.0.odd", (2, 3, 5)),  # 3 ranks: the last one's part is empty
    ("model.nothing", (0, 4)),
    ("lm_head.weight", (13, 6)),
]


def layout_of(tensors: Tensors, dtype: torch.dtype, max_shard_bytes: int, stem: str) -> FilesLayout:
    return FilesLayout.from_entries([LayoutEntry(name, shape, dtype) for name, shape in tensors], max_shard_bytes, stem)


def combine_gathered(values: list[Any], operation: str) -> Any:
    """`combine` of a group of ranks that can only gather."""
    return {"sum": np.add, "xor": np.bitwise_xor}[operation].reduce(np.array(values, np.int64))


class Died(Exception):
    """A rank ended without an answer, or was ended because another did."""


class PipedRanks:
    """This rank's end of a world whose gathers go through the parent process."""

    def __init__(self, rank: int, world_size: int, pipe: Connection) -> None:
        self.rank = rank
        self.world_size = world_size
        self._pipe = pipe

    def gather(self, value: Any) -> list[Any]:
        self._pipe.send(("gather", json.dumps(value)))
        return [json.loads(text) for text in self._pipe.recv()]

    def combine(self, values: Any, operation: str) -> Any:
        return combine_gathered(self.gather(values.tolist()), operation)


def run_world(world_size: int, work: Callable[[PipedRanks], Any]) -> list[Any]:
    """`work` in `world_size` forked processes; what each returned, or the exception it raised, or Died."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, world_size, theirs, work), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _serve(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(pipes: list[Connection]) -> list[Any]:
    while True:
        messages = [_receive(pipe) for pipe in pipes]
        if any(kind != "gather" for kind, _ in messages):
            return [Died() if kind == "gather" else value for kind, value in messages]
        for pipe in pipes:
            pipe.send([text for _, text in messages])


def _receive(pipe: Connection) -> tuple[str, Any]:
    if not pipe.poll(60):
        return "done", Died("no message for a minute")
    try:
        message: tuple[str, Any] = pipe.recv()
    except EOFError:
        return "done", Died()
    return message


def _rank(rank: int, world_size: int, pipe: Connection, work: Callable[[PipedRanks], Any]) -> None:
    torch.set_num_threads(1)  # the pool of the parent did not survive the fork
    try:
        result = work(PipedRanks(rank, world_size, pipe))
    except Exception as error:
        result = error
    pipe.send(("done", result))


class MemoryStore:
    """Parts in memory."""

    def __init__(self, values: dict[Part, torch.Tensor]) -> None:
        self.values = values

    def parts(self) -> Sequence[Part]:
        return [part for part in self.values if part.numel]

    def read(self, part: Part, start: int, out: torch.Tensor) -> None:
        first = start - part.start
        assert first >= 0 and first + out.numel() <= part.numel
        out.copy_(self.values[part][first : first + out.numel()])

    def write(self, part: Part, start: int, values: torch.Tensor) -> None:
        first = start - part.start
        assert first >= 0 and first + values.numel() <= part.numel
        self.values[part][first : first + values.numel()] = values


class FakeStore(MemoryStore):
    """Parts of known values: dimension 0 in chunks of ceil(rows / world size); a scalar is rank 0's."""

    def __init__(
        self, tensors: Tensors, rank: int = 0, world_size: int = 1, kinds: Sequence[Kind] = KINDS, zeros: bool = False
    ) -> None:
        parts = [p for kind in kinds for n, s in tensors if (p := _part(n, s, kind, rank, world_size)).numel]
        super().__init__(
            {part: torch.zeros(part.numel) if zeros else value_of(part)[part.start : part.stop] for part in parts}
        )

    def is_original(self, dtype: torch.dtype = torch.float32) -> bool:
        """Whether all parts hold the known values, bit for bit, as rounded to `dtype`."""
        expected = {part: value_of(part)[part.start : part.stop].to(dtype).float() for part in self.values}
        return all(torch.equal(values, expected[part]) for part, values in self.values.items())


def value_of(part: Part) -> torch.Tensor:
    """The whole tensor that `part` is of, flat, the same in every process."""
    seed = zlib.crc32(f"{part.kind} {part.name}".encode())
    return torch.randn(math.prod(part.shape), generator=torch.Generator().manual_seed(seed))


def _part(name: str, shape: tuple[int, ...], kind: Kind, rank: int, world_size: int) -> Part:
    rows = shape[0] if shape else 1
    row = math.prod(shape[1:])
    chunk = -(-rows // world_size)
    return Part(name, shape, kind, min(rank * chunk, rows) * row, min((rank + 1) * chunk, rows) * row)
