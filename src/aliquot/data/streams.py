"""The endless stream of sequences of one source."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from aliquot.data.layout import Pieces
from aliquot.data.packing import Epoch, Packing
from aliquot.data.token_store import TokenStore


@dataclass(frozen=True)
class TrainStore:
    """A source of a run."""

    store: TokenStore
    name: str = ""
    weight: float | None = None  # of its tokens; None: as many as it has
    repeat: bool = True


class Stream:
    """The sequences of epoch 0 of one source, then of epoch 1 shuffled anew, and so on."""

    def __init__(self, source: TrainStore, packing: Packing, seed: int) -> None:
        self.source = source
        self.packing = packing
        # Sources of equal size would be shuffled alike, and one that is named twice would be seen twice at a time.
        self._seed = seed if not source.name else drawn_seed("source", seed, source.name)
        self._epochs: dict[int, Epoch] = {}

    @cached_property
    def epoch_tokens(self) -> int:
        return int(self.packing.tokens.sum())

    @property
    def sequence_tokens(self) -> Fraction:
        """On average."""
        return Fraction(self.epoch_tokens, self.packing.sequences)

    def sequence(self, index: int) -> Pieces:
        epoch, within = divmod(index, self.packing.sequences)
        return self.epoch(epoch).sequence(within)

    def lengths(self, index: int) -> npt.NDArray[np.int32]:
        epoch, within = divmod(index, self.packing.sequences)
        return self.epoch(epoch).lengths(within)

    def counts(self, first: int, stop: int) -> tuple[int, int]:
        """(labels, real tokens) of the sequences [first, stop)."""
        predicted = tokens = 0
        while first < stop:
            epoch, start = divmod(first, self.packing.sequences)
            end = min(self.packing.sequences, start + stop - first)
            predicted += int(self.epoch(epoch).predicted[start:end].sum())
            tokens += int(self.epoch(epoch).tokens[start:end].sum())
            first += end - start
        return predicted, tokens

    def epoch(self, epoch: int) -> Epoch:
        if epoch not in self._epochs:
            # A batch that straddles two epochs needs both.
            self._epochs = {kept: self._epochs[kept] for kept in self._epochs if kept == epoch - 1}
            self._epochs[epoch] = self.packing.epoch(self._seed, epoch)
        return self._epochs[epoch]


def drawn_seed(kind: str, seed: int, place: object) -> int:
    """What `kind` is drawn from at `place`."""
    return int.from_bytes(hashlib.sha256(f"{kind}:{seed}:{place}".encode()).digest()[:7], "little")
