"""The global batch of any step and a rank's share of it: a function of the step number, so resuming needs no state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

import numpy as np
import numpy.typing as npt

from aliquot.config.data_section import DataSection
from aliquot.core.errors import DataError, ResumeError
from aliquot.data.batch_size import BatchSize
from aliquot.data.data_order import Mixture, Steps, Stream, TrainStore, drawn_seed
from aliquot.data.layout import Group, Layout, SequenceFormat
from aliquot.data.packing import Packing
from aliquot.data.prepare import Prepared
from aliquot.data.workload import Workload
from aliquot.models.micro_batch import MicroBatch

_PLANNED_SEQUENCES = 64  # that a plan looks at


@dataclass(frozen=True)
class Position:
    """Where in the data a step begins: sequence `index` of `epoch`."""

    epoch: int
    index: int


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step. All but `micro_batches` is of the global batch and the same on every rank."""

    micro_batches: list[MicroBatch | None]  # equally long on every rank; None where this rank has nothing left
    predicted_of: tuple[int, ...]  # labels of each source
    tokens_of: tuple[int, ...]  # real tokens of each source, padding not counted
    lengths: npt.NDArray[np.int32]  # of the documents, or pieces of them: what attention costs
    sequences: int
    epoch: float  # epochs done after this step

    @property
    def predicted(self) -> int:
        """What the mean of the loss is taken over."""
        return sum(self.predicted_of)

    @property
    def tokens(self) -> int:
        return sum(self.tokens_of)

    @property
    def own_tokens(self) -> int:
        """What this rank computes, padding too."""
        return sum(len(micro_batch.input_ids) for micro_batch in self.micro_batches if micro_batch is not None)


class Batches:
    """Sequences of all sources in the order of their mixture; each step takes the next `global_batch_size`.

    Where an earlier stage of a run ended within a batch, the next one begins there (`going_on`).

    The sequences of a global batch form micro-batches of `micro_batch_size`, each of one source, and micro-batch m goes
    to rank m % world_size: what is trained on does not depend on the world size. With `epochs` the last batch ends with
    the last sequence and may be smaller; without, there is no last batch unless all sources end. An epoch is as many
    tokens as all sources have together, or all of them where none repeats. Raises UserError where there is no sequence.
    """

    def __init__(
        self,
        sources: Sequence[TrainStore],
        format: SequenceFormat,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        epochs: float | None = None,
    ) -> None:
        self.sources = sources
        self.format = format
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.streams = [Stream(each, Packing.of(each.store, format.length, format.packed), seed) for each in sources]
        own_tokens = [stream.epoch_tokens for stream in self.streams]
        means = [stream.sequence_tokens for stream in self.streams]
        self.mixture = Mixture.of_tokens(
            [each.weight or tokens for each, tokens in zip(sources, own_tokens, strict=True)],
            means,
            [None if stream.source.repeat else stream.packing.sequences for stream in self.streams],
        )
        mixed = sum(rate * mean for rate, mean in zip(self.mixture.rates, means, strict=True))
        self.epoch_sequences = max(1, round(sum(own_tokens) * sum(self.mixture.rates) / mixed))
        if self.mixture.total is not None:
            self.epoch_sequences = self.mixture.total  # they end: all of them is all there is
            if epochs is not None and epochs > 1:
                raise DataError(f"no source repeats, so train.num_train_epochs cannot be {epochs:g}: 1 is all of them")
        limits = [self.mixture.total, None if epochs is None else self._sequences_in(epochs)]
        self.steps = Steps(global_batch_size, min((limit for limit in limits if limit is not None), default=None))

    @classmethod
    def of(
        cls,
        data: Prepared,
        section: DataSection,
        seed: int,
        size: BatchSize,
        epochs: float | None,
        packs: bool = True,
        fills_up: bool = False,
    ) -> Self:
        """The training batches of a run."""
        given = {source.name: source for source in section.sources or []}
        sources = [
            TrainStore(store, name, given[name].weight, given[name].repeat) if name in given else TrainStore(store)
            for name, store in data.open_train().items()
        ]
        return cls(
            sources,
            SequenceFormat(section.sequence_length, data.pad_id, section.packing, packs, fills_up),
            seed=seed,
            global_batch_size=size.total,
            micro_batch_size=size.micro,
            epochs=epochs,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    def workload(self) -> Workload:
        """What a plan needs to know of these data."""
        size = self.epoch_sequences
        samples = self.mixture.between(0, min(size, _PLANNED_SEQUENCES, self.mixture.total or size))
        edges = []
        for source, index in samples:
            ends = np.cumsum([length for _, length in self.streams[source].sequence(index)]).tolist()
            padded = self.format.pads_sequences and ends[-1] < self.format.length
            edges.append((0, *ends, *([self.format.length] if padded else [])))
        rates = np.array(self.mixture.rates, np.float64)
        means = [[float(each.epoch(0).tokens.mean()), float(each.epoch(0).predicted.mean())] for each in self.streams]
        tokens, predicted = (rates / rates.sum()) @ np.array(means)
        return Workload(
            samples=tuple(edges),
            tokens=float(tokens),
            predicted=float(predicted),
            sequences=size,
            pieces=sum(len(stream.packing.pieces.start) for stream in self.streams),
            source="as the data are",
            fills_up=self.format.length if self.format.fills_rows else None,
        )

    def determinants(self) -> dict[str, str | int | float | None]:
        """All that the order of the data depends on: while these stay, a step's number says where in the data it is."""
        found: dict[str, str | int | float | None] = {
            "run.seed": self.seed,
            "data.sequence_length": self.format.length,
            "data.packing": self.format.packed,
            "train.global_batch_size": self.global_batch_size,
            "data.sources": ", ".join(self.names),
        }
        for source in self.sources:
            of = f"data.sources, {source.name}: " if source.name else "data "
            found[f"{of}(hash of the tokens)"] = source.store.path.name
            if source.name:
                found[f"{of}weight"], found[f"{of}repeat"] = source.weight, source.repeat
        return found

    def total_steps(self, max_steps: int | None) -> int:
        """Optimizer steps of the run. Raises UserError where all sources end before `max_steps`."""
        there = None if self.steps.stop is None else self.steps.until(self.steps.stop)
        if max_steps is None:
            assert there is not None, "a run has an end: in steps, or in epochs"
            return there
        if there is not None and there < max_steps:
            raise DataError(f"all of data.sources end after {there} steps, before train.max_steps {max_steps}")
        return max_steps

    def position(self, step: int) -> Position:
        """Where `step` (the first is 0) begins; after the last step, where the data ended."""
        return Position(*divmod(self.steps.of(step - 1).stop if step else 0, self.epoch_sequences))

    def going_on(self, step: int, position: Position, ends: Iterable[int]) -> Self:
        """These batches behind an earlier stage of the run, which ended at `position` after `step` steps.

        `ends`: where stages before it ended within a batch. Raises UserError where it cannot have ended there.
        """
        later = copy(self)
        try:
            earlier = replace(self.steps, ends=tuple(ends))
            later.steps = earlier.going_on(step, position.epoch * self.epoch_sequences + position.index)
        except ValueError as error:
            raise ResumeError(f"cannot continue: the checkpoint's state contradicts itself: {error}") from None
        return later

    def step_batch(self, step: int, rank: int, world_size: int) -> StepBatch:
        """The batch of `step` (the first is 0). Reads the tokens of this rank alone. Raises IndexError past the end."""
        taken = self.steps.of(step)
        first, stop = taken.start, taken.stop
        if not taken:
            raise IndexError(f"step {step} begins after the last sequence")
        places = self.mixture.between(first, stop)
        ranges = zip(self.streams, self.mixture.drawn(first), self.mixture.drawn(stop), strict=True)
        counts = [stream.counts(start, end) for stream, start, end in ranges]
        stores = [source.store for source in self.sources]
        layout = Layout(stores, self.format)
        groups = self._groups(first, places)
        own = layout.micro_batches(groups, rank, world_size, lambda source, at: self.streams[source].sequence(at))
        # What is dropped depends on what is trained on and nothing else: the same at any world size.
        micro_batches = [found and replace(found, seed=drawn_seed("dropout", self.seed, start)) for start, found in own]
        lengths = np.concatenate([self.streams[source].lengths(at) for source, at in places])
        predicted_of, tokens_of = zip(*counts, strict=True)
        return StepBatch(micro_batches, predicted_of, tokens_of, lengths, stop - first, stop / self.epoch_sequences)

    def _groups(self, first: int, places: list[tuple[int, int]]) -> list[Group]:
        """The micro-batches of a global batch, each of one source, so that the loss of each is known; the smaller ones
        last: with two of each source one rank of two would have all that are whole, and the other what they leave."""
        numbered = sorted(((source, first + n, at) for n, (source, at) in enumerate(places)), key=lambda each: each[0])
        groups = []
        for source, of_source in groupby(numbered, key=lambda each: each[0]):
            sequences = list(of_source)
            for start in range(0, len(sequences), self.micro_batch_size):
                taken = sequences[start : start + self.micro_batch_size]
                groups.append(Group(source, taken[0][1], [at for _, _, at in taken]))
        return sorted(groups, key=lambda group: -len(group.sequences))

    def _sequences_in(self, epochs: float) -> int:
        return max(1, math.ceil(epochs * self.epoch_sequences - 1e-6))
