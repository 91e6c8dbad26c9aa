"""Pack pieces of documents into sequences, all as flat arrays.

A packing fixes which lengths share a sequence. Each epoch shuffles which pieces of these lengths share a sequence, and
the order of sequences. Every epoch therefore has the same number of sequences, and the place of a step in the data
follows without a look at earlier epochs.
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

_CACHED_EPOCHS = 4  # epochs of a packing on disk: two runs with two epochs each


@dataclass(frozen=True)
class Packing:
    """Which lengths share a sequence, alike in every epoch. A slot is a place for a piece; slots descend in length."""

    pieces: Pieces
    slots: npt.NDArray[Any]  # [P], slots of pieces, sequence after sequence
    edges: Ints  # [S + 1]; sequence s has slots[edges[s] : edges[s + 1]]
    tokens: Ints  # [S], tokens without padding
    epoch_cache: Path | None  # directory for arrays of epochs; None: memory

    @classmethod
    def of(cls, store: TokenStore, sequence_length: int, packing: bool) -> Packing:
        """Pack the pieces of a store; without `packing` each piece is a sequence.

        Raises UserError if there is no label.
        """
        max_pieces = store.documents + int(store.offsets[-1]) // (sequence_length - 1)
        cache = store.path if max_pieces > MAPPED_PIECES else None
        name = f"{'packed' if packing else 'apart'}-{sequence_length}"
        arrays = _arrays_of(cache, name, lambda new: fill_packing(new, store, sequence_length, packing))
        pieces = Pieces(arrays["start"], arrays["length"], arrays["predicted"])
        directory = None if cache is None else cache / name
        return cls(pieces, arrays["slots"], arrays["edges"], arrays["tokens"], directory)

    @property
    def sequences(self) -> int:
        return len(self.tokens)

    def epoch(self, seed: int, epoch: int) -> Epoch:
        """Return the sequences of `epoch`, shuffled by (seed, epoch)."""
        shuffles = partial(shuffle, seed=seed, stream=2 * epoch), partial(shuffle, seed=seed, stream=2 * epoch + 1)
        return self._filled(f"epoch-{seed}-{epoch}", lambda new: fill_epoch(new, self._arrays, *shuffles))

    def in_order(self) -> Epoch:
        """Return the sequences without a shuffle."""
        return self._filled("in-order", lambda new: fill_epoch(new, self._arrays, ascending, ascending))

    @property
    def _arrays(self) -> PackingArrays:
        return PackingArrays(self.pieces, self.slots, self.edges, self.tokens)

    def _filled(self, name: str, fill: Callable[[NewArrays], None]) -> Epoch:
        arrays = _arrays_of(self.epoch_cache, name, fill, most=("epoch-*", _CACHED_EPOCHS))
        return Epoch(self, arrays["piece"], arrays["order"], arrays["predicted"], arrays["tokens"])


def _arrays_of(
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
    tokens: Ints  # [S], tokens of the i-th sequence, without padding

    def sequence(self, index: int) -> list[tuple[int, int]]:
        """Return (start, length) in the store of each piece of the `index`-th sequence."""
        piece, pieces = self._piece(index), self.packing.pieces
        return list(zip(pieces.start[piece].tolist(), pieces.length[piece].tolist(), strict=True))

    def lengths(self, index: int) -> npt.NDArray[np.int32]:
        """Return the lengths of the pieces of the `index`-th sequence."""
        lengths: npt.NDArray[np.int32] = self.packing.pieces.length[self._piece(index)]
        return lengths

    def _piece(self, index: int) -> npt.NDArray[Any]:
        at = self.order[index]
        return self.piece[self.packing.edges[at] : self.packing.edges[at + 1]]
