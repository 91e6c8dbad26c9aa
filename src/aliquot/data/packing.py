"""Pieces of documents -> sequences of whole pieces; all as flat arrays.

The packing fixes which lengths share a sequence; which pieces those are, and the order of the sequences, is shuffled
anew in each epoch. So every epoch has the same number of sequences, and the position of any step is found without
looking at the epochs before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.data.disk_arrays import Arrays, NewArrays, ascending, cached_arrays, memory_arrays, shuffle
from aliquot.data.packing_arrays import PackingArrays, Pieces, fill_epoch, fill_packing
from aliquot.data.token_store import TokenStore
from aliquot.data.workload import MAPPED_PIECES

Ints = npt.NDArray[np.int64]

_KEPT_EPOCHS = 4  # of a packing, on disk: two runs with two epochs each


@dataclass(frozen=True)
class Packing:
    """Which lengths share a sequence: the same in every epoch. A slot is a place for a piece, in descending length."""

    pieces: Pieces
    slots: npt.NDArray[Any]  # [P], sequence after sequence
    edges: Ints  # [S + 1]; sequence s has slots[edges[s] : edges[s + 1]]
    tokens: Ints  # [S], real tokens
    kept_in: Path | None  # where its epochs are kept, too; None: in memory

    @classmethod
    def of(cls, store: TokenStore, sequence_length: int, packing: bool) -> Packing:
        """Raises UserError where no piece predicts anything. `packing` false: each piece is a sequence of its own."""
        most = store.documents + int(store.offsets[-1]) // (sequence_length - 1)
        kept_in = store.path if most > MAPPED_PIECES else None
        name = f"{'packed' if packing else 'apart'}-{sequence_length}"
        found = _kept(kept_in, name, lambda new: fill_packing(new, store, sequence_length, packing))
        pieces = Pieces(found["start"], found["length"], found["predicted"])
        within = None if kept_in is None else kept_in / name
        return cls(pieces, found["slots"], found["edges"], found["tokens"], within)

    @property
    def sequences(self) -> int:
        return len(self.tokens)

    def epoch(self, seed: int, epoch: int) -> Epoch:
        """The sequences of `epoch`, shuffled by (seed, epoch)."""
        shuffles = partial(shuffle, seed=seed, stream=2 * epoch), partial(shuffle, seed=seed, stream=2 * epoch + 1)
        return self._filled(f"epoch-{seed}-{epoch}", lambda new: fill_epoch(new, self._arrays, *shuffles))

    def in_order(self) -> Epoch:
        """The sequences without a shuffle."""
        return self._filled("in-order", lambda new: fill_epoch(new, self._arrays, ascending, ascending))

    @property
    def _arrays(self) -> PackingArrays:
        return PackingArrays(self.pieces, self.slots, self.edges, self.tokens)

    def _filled(self, name: str, fill: Callable[[NewArrays], None]) -> Epoch:
        found = _kept(self.kept_in, name, fill, most=("epoch-*", _KEPT_EPOCHS))
        return Epoch(self, found["piece"], found["order"], found["predicted"], found["tokens"])


def _kept(
    directory: Path | None, name: str, fill: Callable[[NewArrays], None], most: tuple[str, int] | None = None
) -> Arrays:
    return memory_arrays(fill) if directory is None else cached_arrays(directory / name, fill, most)


@dataclass(frozen=True)
class Epoch:
    """All pieces once, in S sequences."""

    packing: Packing
    piece: npt.NDArray[Any]  # [P], in the order of packing.edges
    order: Ints  # [S]: the i-th sequence of the epoch is packing's sequence order[i]
    predicted: Ints  # [S], labels of the i-th sequence
    tokens: Ints  # [S], real tokens of the i-th sequence

    def sequence(self, index: int) -> list[tuple[int, int]]:
        """(start, length) in the store of each piece of the `index`-th sequence."""
        piece, pieces = self._piece(index), self.packing.pieces
        return list(zip(pieces.start[piece].tolist(), pieces.length[piece].tolist(), strict=True))

    def lengths(self, index: int) -> npt.NDArray[np.int32]:
        """Of the pieces of the `index`-th sequence."""
        lengths: npt.NDArray[np.int32] = self.packing.pieces.length[self._piece(index)]
        return lengths

    def _piece(self, index: int) -> npt.NDArray[Any]:
        at = self.order[index]
        return self.piece[self.packing.edges[at] : self.packing.edges[at + 1]]
