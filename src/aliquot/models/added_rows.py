"""Make rows for added tokens of a pretrained model, as transformers' `resize_token_embeddings` does.

New rows are drawn from a normal distribution with the mean of the old rows and 1e-9 of their covariance. A sum of
centred old rows, each times a number from N(0, 1e-9 / rows), has this distribution, so that no covariance is computed.
Old rows are summed in chunks, which do not depend on the world size and are divided among the ranks.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aliquot.core.on_rank_0 import RankGroup, gather_results
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.parts import Part, PartStore, ViewableStore
from aliquot.tensor_io.range_io import RangeReader

_CHUNKS = 16
_BLOCK_NUMEL = 1 << 20
_AT_ONCE = 64  # new rows whose sums the ranks exchange together
_COVARIANCE_SCALE = 1e-9  # transformers'


class OldRows:
    """A store with the shapes of the file: tensors that grow end after their old rows."""

    def __init__(self, store: PartStore, stored: Mapping[str, TensorEntry]) -> None:
        self._store = store
        self._whole: dict[Part, Part] = {}
        for part in store.parts():
            old = stored.get(part.name) if part.kind == "weight" else None
            if old is None or old.shape == part.shape:
                self._whole[part] = part
            elif part.start < old.numel:
                self._whole[replace(part, shape=old.shape, stop=min(part.stop, old.numel))] = part

    def parts(self) -> Sequence[Part]:
        return list(self._whole)

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._store.read(self._whole[part], start, out)

    def write(self, part: Part, start: int, values: Tensor) -> None:
        self._store.write(self._whole[part], start, values)

    def view(self, part: Part) -> Tensor | None:
        whole = self._store.view(self._whole[part]) if isinstance(self._store, ViewableStore) else None
        return whole if whole is None else whole[: part.numel]


def add_rows(
    store: PartStore,
    grown: Mapping[str, TensorEntry],
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    ranks: RankGroup,
) -> None:
    """Write the additional rows of tensors that grow.

    `grown` has their old rows, `shapes` the new shapes. Collective.
    """
    for name, entry in grown.items():
        for first in range(entry.shape[0], shapes[name][0], _AT_ONCE):
            rows = new_rows(entry, f"{seed}:{name}:{first}", min(_AT_ONCE, shapes[name][0] - first), ranks)
            begin = first * (entry.numel // entry.shape[0])
            for part in store.parts():
                start, stop = max(begin, part.start), min(begin + rows.numel(), part.stop)
                if part.kind == "weight" and part.name == name and start < stop:
                    store.write(part, start, rows.flatten()[start - begin : stop - begin])


def new_rows(entry: TensorEntry, drawn_from: str, count: int, ranks: RankGroup) -> Tensor:
    """Return new rows, fp32 [count, width], alike on every rank.

    Collective. Raises UserError for an unreadable file.
    """
    rows, width = entry.shape[0], entry.numel // entry.shape[0]
    edges = [rows * chunk // _CHUNKS for chunk in range(_CHUNKS + 1)]
    rank_chunks = range(ranks.rank, _CHUNKS, ranks.world_size)

    def sums() -> list[str]:
        totals = [
            _sums(entry, width, edges[chunk], edges[chunk + 1], f"{drawn_from}:{chunk}", count) for chunk in rank_chunks
        ]
        return [base64.b64encode(total.numpy().tobytes()).decode() for total in totals]

    gathered = gather_results(ranks, sums)
    total = torch.zeros(count + 1, width + 1, dtype=torch.float64)
    for chunk in range(_CHUNKS):  # in order: the same sum at any world size
        data = base64.b64decode(gathered[chunk % ranks.world_size][chunk // ranks.world_size])
        total += torch.frombuffer(bytearray(data), dtype=torch.float64).view(count + 1, width + 1)
    mean, weighted, weights = total[-1, :-1] / rows, total[:-1, :-1], total[:-1, -1:]
    return (mean + math.sqrt(_COVARIANCE_SCALE / rows) * (weighted - weights * mean)).float()


def _sums(entry: TensorEntry, width: int, start: int, stop: int, drawn_from: str, count: int) -> Tensor:
    """Sum the old rows [start, stop), extended by a column of ones: fp64 [count + 1, width + 1].

    For each new row the old rows are multiplied by numbers from N(0, 1); in the last sum they are multiplied by 1.
    """
    seed = int.from_bytes(hashlib.sha256(drawn_from.encode()).digest()[:8], "little")
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(count + 1, width + 1, dtype=torch.float64)
    threads, step = torch.get_num_threads(), max(1, _BLOCK_NUMEL // width)
    torch.set_num_threads(1)  # the division of a product among threads changes its last digits
    try:
        with RangeReader() as reader:
            for first in range(start, stop, step):
                number = min(step, stop - first)
                stored = torch.empty(number * width)
                reader.read(entry, first * width, stored)
                values = torch.cat([stored.view(number, width).double(), torch.ones(number, 1).double()], dim=1)
                drawn = torch.randn(number, count, generator=generator, dtype=torch.float64)
                total[:-1] += drawn.T @ values
                total[-1] += values.sum(0)
    finally:
        torch.set_num_threads(threads)
    return total
