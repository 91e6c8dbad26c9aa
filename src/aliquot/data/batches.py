"""The global batch of any step and a rank's share of it: a function of the step number, so resuming needs no state."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from aliquot.config.batch_size import BatchSize
from aliquot.config.schema import DataSection
from aliquot.config.workload import Workload
from aliquot.data.packing import Epoch, Packing
from aliquot.data.prepare import Prepared
from aliquot.data.steps import Steps
from aliquot.data.token_store import TokenStore
from aliquot.errors import ResumeError
from aliquot.loss.base import IGNORE
from aliquot.models.batch import MicroBatch

_PLANNED_SEQUENCES = 64  # that a plan looks at

Sequence = list[tuple[int, int]]  # (start, length) in the store of each piece


@dataclass(frozen=True)
class Position:
    """Where in the data a step begins: sequence `index` of `epoch`."""

    epoch: int
    index: int


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step. All but `micro_batches` is of the global batch and the same on every rank."""

    micro_batches: list[MicroBatch | None]  # equally long on every rank; None where this rank has nothing left
    predicted: int  # labels: what the mean of the loss is taken over
    tokens: int  # real tokens, padding not counted
    lengths: npt.NDArray[np.int32]  # of the documents, or pieces of them: what attention costs
    sequences: int
    epoch: float  # epochs done after this step

    @property
    def own_tokens(self) -> int:
        """What this rank computes, padding too."""
        return sum(len(micro_batch.input_ids) for micro_batch in self.micro_batches if micro_batch is not None)


class Batches:
    """Sequences of epoch 0, then of epoch 1 shuffled anew, and so on; each step takes the next `global_batch_size`.

    Where an earlier stage of a run ended within a batch, the next one begins there (`going_on`).

    The sequences of a global batch form micro-batches of `micro_batch_size` in order, and micro-batch m goes to rank
    m % world_size: what is trained on does not depend on the world size. With `epochs` the last batch ends with the
    last sequence and may be smaller; without, there is no last batch. Raises UserError where there is no sequence.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        sequence_length: int,
        packing: bool,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        pad_id: int,
        epochs: float | None = None,
        packs: bool = True,
    ) -> None:
        """`packs`: the model takes several documents in a call; else each is one."""
        self.store = store
        self.packs = packs
        self.sequence_length = sequence_length
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.pad_id = pad_id
        self.packed = packing
        self.packing = Packing.of(store, sequence_length, packing)
        self.steps = Steps(global_batch_size, None if epochs is None else self._sequences_in(epochs))
        self._epochs: dict[int, Epoch] = {}

    @classmethod
    def of(
        cls, data: Prepared, section: DataSection, seed: int, size: BatchSize, epochs: float | None, packs: bool = True
    ) -> Self:
        """The training batches of a run."""
        return cls(
            data.open_train(),
            sequence_length=section.sequence_length,
            packing=section.packing,
            seed=seed,
            global_batch_size=size.total,
            micro_batch_size=size.micro,
            pad_id=data.pad_id,
            epochs=epochs,
            packs=packs,
        )

    def workload(self) -> Workload:
        """What a plan needs to know of these data."""
        epoch, size = self._epoch(0), self.packing.sequences
        edges = []
        for index in range(min(size, _PLANNED_SEQUENCES)):
            ends = np.cumsum([length for _, length in epoch.sequence(index)]).tolist()
            padded = self.packed and self.packs and ends[-1] < self.sequence_length
            edges.append((0, *ends, *([self.sequence_length] if padded else [])))
        return Workload(
            samples=tuple(edges),
            tokens=float(epoch.tokens.mean()),
            predicted=float(epoch.predicted.mean()),
            sequences=size,
            pieces=len(self.packing.pieces.start),
            source="as the data are",
        )

    def described(self, total_steps: int) -> str:
        """The data and what is made of them, in one line."""
        packed = "packed" if self.packed else "a document each"
        return (
            f"{self.store.documents:,} documents, {len(self.store.tokens):,} tokens; {total_steps} steps of"
            f" {self.global_batch_size} sequences of {self.sequence_length}, {packed}"
        )

    def determinants(self) -> dict[str, str | int]:
        """All that the order of the data depends on: while these stay, a step's number says where in the data it is."""
        return {
            "run.seed": self.seed,
            "data (hash of the tokens)": self.store.path.name,
            "data.sequence_length": self.sequence_length,
            "data.packing": self.packed,
            "train.global_batch_size": self.global_batch_size,
        }

    def steps_in(self, epochs: float) -> int:
        """Optimizer steps that see `epochs` times the data."""
        return self.steps.until(self._sequences_in(epochs))

    def position(self, step: int) -> Position:
        """Where `step` (the first is 0) begins; after the last step, where the data ended."""
        return Position(*self._place(self.steps.of(step - 1).stop if step else 0))

    def going_on(self, step: int, position: Position, ends: Iterable[int]) -> Self:
        """These batches behind an earlier stage of the run, which ended at `position` after `step` steps.

        `ends`: where stages before it ended within a batch. Raises UserError where it cannot have ended there.
        """
        later = copy(self)
        try:
            earlier = replace(self.steps, ends=tuple(ends))
            later.steps = earlier.going_on(step, position.epoch * self.packing.sequences + position.index)
        except ValueError as error:
            raise ResumeError(f"cannot continue: the checkpoint's state contradicts itself: {error}") from None
        return later

    def step_batch(self, step: int, rank: int, world_size: int) -> StepBatch:
        """The batch of `step` (the first is 0). Reads the tokens of this rank alone. Raises IndexError past the end."""
        taken = self.steps.of(step)
        first, stop = taken.start, taken.stop
        if not taken:
            raise IndexError(f"step {step} begins after the last sequence")
        predicted = tokens = 0
        for epoch, start, end in self._stretches(first, stop):
            predicted += int(self._epoch(epoch).predicted[start:end].sum())
            tokens += int(self._epoch(epoch).tokens[start:end].sum())
        layout = Layout(self.store, self.sequence_length, self.pad_id, self.packed, self.packs)
        own = layout.micro_batches(taken, self.micro_batch_size, rank, world_size, self._sequence)
        # What is dropped depends on what is trained on and nothing else: the same at any world size.
        micro_batches = [found and replace(found, seed=_seed(self.seed, start)) for start, found in own]
        lengths = np.concatenate([self._epoch(epoch).lengths(at) for epoch, at in map(self._place, taken)])
        return StepBatch(micro_batches, predicted, tokens, lengths, len(taken), stop / self.packing.sequences)

    def _sequences_in(self, epochs: float) -> int:
        return max(1, math.ceil(epochs * self.packing.sequences - 1e-6))

    def _stretches(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(epoch, start, end) of each epoch's stretch of the sequences [first, stop) of the endless stream."""
        while first < stop:
            epoch, start = divmod(first, self.packing.sequences)
            end = min(self.packing.sequences, start + stop - first)
            yield epoch, start, end
            first += end - start

    def _sequence(self, index: int) -> Sequence:
        epoch, within = self._place(index)
        return self._epoch(epoch).sequence(within)

    def _place(self, index: int) -> tuple[int, int]:
        """Epoch of a sequence of the endless stream, and which it is there."""
        return divmod(index, self.packing.sequences)

    def _epoch(self, epoch: int) -> Epoch:
        if epoch not in self._epochs:
            # A batch that straddles two epochs needs both.
            self._epochs = {kept: self._epochs[kept] for kept in self._epochs if kept == epoch - 1}
            self._epochs[epoch] = self.packing.epoch(self.seed, epoch)
        return self._epochs[epoch]


class EvalBatches:
    """All sequences of a store once, in a fixed order. Raises UserError where there is none."""

    def __init__(
        self,
        store: TokenStore,
        *,
        sequence_length: int,
        packing: bool,
        micro_batch_size: int,
        pad_id: int,
        packs: bool = True,
    ) -> None:
        self.store = store
        self.packs = packs
        self.packed = packing
        self.sequence_length = sequence_length
        self.micro_batch_size = micro_batch_size
        self.pad_id = pad_id
        self.epoch = Packing.of(store, sequence_length, packing).in_order()
        self.predicted = int(self.epoch.predicted.sum())  # over all ranks: what perplexity is taken over

    @classmethod
    def of(cls, data: Prepared, section: DataSection, size: BatchSize, packs: bool = True) -> Self | None:
        """The evaluation batches of a run; None where it has no evaluation data."""
        store = data.open_eval()
        if store is None:
            return None
        return cls(
            store,
            sequence_length=section.sequence_length,
            packing=section.packing,
            micro_batch_size=size.micro,
            pad_id=data.pad_id,
            packs=packs,
        )

    def count(self, world_size: int) -> int:
        """Micro-batches of each rank."""
        return -(-self.epoch.packing.sequences // (world_size * self.micro_batch_size))

    def micro_batches(self, rank: int, world_size: int) -> Iterator[MicroBatch | None]:
        """This rank's share; equally many on every rank, None where it has nothing left."""
        layout = Layout(self.store, self.sequence_length, self.pad_id, self.packed, self.packs)
        every = range(self.epoch.packing.sequences)
        for _, found in layout.micro_batches(every, self.micro_batch_size, rank, world_size, self.epoch.sequence):
            yield found


def shares(first: int, stop: int, micro_batch_size: int, rank: int, world_size: int) -> list[range]:
    """The micro-batches of sequences [first, stop) that are this rank's: m = rank, rank + world_size, ...

    Equally many for every rank; an empty range where a rank has fewer.
    """
    starts = range(first + rank * micro_batch_size, stop, world_size * micro_batch_size)
    most = len(range(first, stop, world_size * micro_batch_size))
    own = [range(start, min(start + micro_batch_size, stop)) for start in starts]
    return own + [range(0)] * (most - len(own))


def _seed(seed: int, sequence: int) -> int:
    return int.from_bytes(hashlib.sha256(f"dropout:{seed}:{sequence}".encode()).digest()[:7], "little")


@dataclass(frozen=True)
class Layout:
    """How sequences become the rows of micro-batches.

    Packed sequences are padded to the full length on their right, where the model `packs` them in one call too.
    """

    store: TokenStore
    sequence_length: int
    pad_id: int
    packed: bool
    packs: bool

    def micro_batches(
        self, indices: range, size: int, rank: int, world_size: int, sequence: Callable[[int], Sequence]
    ) -> Iterator[tuple[int, MicroBatch | None]]:
        """This rank's share of the sequences `indices`, and where each begins; equally many on every rank.

        Where each document is a call, a rank without sequences gets a micro-batch that only makes the calls.
        """
        own = shares(indices.start, indices.stop, size, rank, world_size)
        for turn, share in enumerate(own):
            calls = 0
            if not self.packs:  # ranks make equally many
                first = indices.start + turn * world_size * size
                turns = (range(at, min(at + size, indices.stop)) for at in range(first, indices.stop, size))
                calls = max(sum(len(sequence(index)) for index in each) for each in islice(turns, world_size))
            if share:
                yield share.start, self._row([sequence(index) for index in share], calls)
            else:
                yield share.start, MicroBatch.empty(calls) if calls else None

    def _row(self, sequences: list[Sequence], calls: int) -> MicroBatch:
        pieces: list[tuple[int, int]] = []  # (start, length), padding from nowhere
        for sequence in sequences:
            room = self.sequence_length - sum(length for _, length in sequence)
            pieces += [*sequence, *([(-1, room)] if room and self.packed and self.packs else [])]
        edges = np.concatenate([[0], np.cumsum([length for _, length in pieces])])
        ids = np.full(edges[-1], self.pad_id, np.int64)
        labels = np.full(edges[-1], IGNORE, np.int64)
        for (start, length), at in zip(pieces, edges.tolist(), strict=False):
            if start < 0:
                continue
            ids[at : at + length] = self.store.tokens[start : start + length]
            labels[at : at + length - 1] = ids[at + 1 : at + length]
            if self.store.mask is not None:
                unsaid = self.store.mask[start + 1 : start + length] == 0
                labels[at : at + length - 1][unsaid] = IGNORE
        positions = np.arange(edges[-1]) - np.repeat(edges[:-1], np.diff(edges))
        of_ids, of_labels, of_positions = (torch.from_numpy(array) for array in (ids, labels, positions))
        return MicroBatch(of_ids, of_labels, of_positions, tuple(edges.tolist()), calls=calls)
