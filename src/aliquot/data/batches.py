"""Build the training batches of a run: each rank's micro-batches of an optimizer step.

The step number alone determines the batch of a step, so that resuming needs no other state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

import numpy as np
import numpy.typing as npt

from aliquot.config.schema import DataSection, TrainSection
from aliquot.core.errors import DataError, ResumeError
from aliquot.core.number_format import count_of
from aliquot.data.data_order import Mixture, Steps, TrainStore, drawn_seed
from aliquot.data.micro_batch_rows import Group, Layout, SequenceFormat
from aliquot.data.prepare import Prepared
from aliquot.data.segment_sequences import SegmentSequences
from aliquot.data.token_store import Reference
from aliquot.data.workload import BatchSize, Workload
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.preference_loss import Objective

_PLANNED_SEQUENCES = 64  # sequences that represent the data set when the planner estimates memory and time


@dataclass(frozen=True)
class Position:
    """The position in the data at which an optimizer step begins: sequence `index` of `epoch`."""

    epoch: int
    index: int


@dataclass(frozen=True)
class StepBatch:
    """The batch of one optimizer step. Only `micro_batches` differs between ranks."""

    micro_batches: list[MicroBatch | None]  # the same number on every rank; None if this rank has no sequences left
    predicted_of: tuple[float, ...]  # labels of each source, or its pairs or rated answers, or the caller's divisor
    tokens_of: tuple[int, ...]  # real tokens of each source, padding not counted
    lengths: npt.NDArray[np.int32]  # lengths of the packed documents or pieces, which decide the cost of attention
    sequences: int
    epoch: float  # epochs completed after this step

    @property
    def predicted(self) -> float:
        """The number of labels, pairs or rated answers in the global batch, by which the summed loss is divided."""
        return sum(self.predicted_of)

    @property
    def tokens(self) -> int:
        return sum(self.tokens_of)


def objective_of(train: TrainSection) -> Objective | None:
    """Return the loss of answers that the section `train` sets; None: the cross-entropy of labels."""
    if train.objective == "sft":
        return None
    return Objective(
        train.objective,
        train.beta,
        train.loss_type,
        train.label_smoothing,
        train.simpo_gamma,
        train.desirable_weight,
        train.undesirable_weight,
    )


def _hash_key(source: TrainStore) -> str:
    return f"{f'data.sources, {source.name}:' if source.name else 'data'} (hash of the tokens)"


class Batches:
    """Global batches: each step takes the next `global_batch_size` sequences in the order of the mixture of sources.

    The sequences of a global batch form micro-batches; all sequences of a micro-batch come from one source.
    Micro-batch m goes to rank m % world_size, so that the sequences of a step do not depend on the world size.
    The last batch, at the end of `epochs` or of all sources, may be smaller. Without `epochs`, batches end only if no
    source repeats. An epoch takes about as many tokens from the mixture as all sources contain together; if no source
    repeats, an epoch takes each sequence once. Raises UserError if there are no sequences.
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
        self.sources, self.format, self.seed = sources, format, seed
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.streams = [SegmentSequences(source, format, seed) for source in sources]
        self._stores = [stream.store for stream in self.streams]
        source_tokens = [round(stream.packing.tokens / stream.known_share) for stream in self.streams]
        means = [stream.sequence_tokens for stream in self.streams]
        self.mixture = Mixture.from_token_weights(
            [source.weight or tokens for source, tokens in zip(sources, source_tokens, strict=True)],
            means,
            [None if stream.source.repeat else stream.packing.sequences for stream in self.streams],
        )
        mean_tokens = sum(rate * mean for rate, mean in zip(self.mixture.rates, means, strict=True))
        self.epoch_sequences = max(1, round(sum(source_tokens) * sum(self.mixture.rates) / mean_tokens))
        if self.mixture.total is not None:
            self.epoch_sequences = self.mixture.total  # no source repeats: an epoch takes each sequence once
            if epochs is not None and epochs > 1:
                raise DataError(
                    f"no source repeats, so train.num_train_epochs cannot be {epochs:g}: all sources end after 1 epoch"
                )
        sequences = None if epochs is None else max(1, math.ceil(epochs * self.epoch_sequences - 1e-6))
        limits = [self.mixture.total, sequences]
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
        """Return the training batches of a run."""
        shares = {source.name: (source.weight, source.repeat) for source in section.sources or []}
        sources = [
            TrainStore(store, name, *shares.get(name, (None, True)), data.streams.get(name))
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

    def with_objective(self, objective: Objective, reference: Mapping[str, Reference] | None = None) -> Self:
        """Return a copy of these batches for a loss of pairs of answers.

        `reference`: the log-probabilities before training of each source, by its name. Raises UserError if a source has
        no pairs.
        """
        later = copy(self)
        later.format = self.format.with_objective(objective, [source.store for source in self.sources])
        if reference is not None:
            stores = zip(self.names, self._stores, strict=True)
            later._stores = [replace(store, reference=reference[name]) for name, store in stores]
        return later

    def with_micro_batches(self, sequences: int) -> Self:
        """Return a copy of these batches with `sequences` in a micro-batch. The global batches stay the same."""
        later = copy(self)
        later.micro_batch_size = sequences
        return later

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    def workload(self) -> Workload:
        """Return the statistics of the data from which the planner estimates memory and time."""
        size = self.epoch_sequences
        samples = self.mixture.between(0, min(size, _PLANNED_SEQUENCES, self.mixture.total or size))
        edges = []
        for source, index in samples:
            ends = np.cumsum([length for _, length in self.streams[source].sequence(index)]).tolist()
            padded = self.format.pads_sequences and ends[-1] < self.format.length
            edges.append((0, *ends, *([self.format.length] if padded else [])))
        rates = np.array(self.mixture.rates, np.float64)
        packings = (stream.packing for stream in self.streams)
        means = [[packing.tokens / packing.sequences, packing.labels / packing.sequences] for packing in packings]
        tokens, predicted = (rates / rates.sum()) @ np.array(means)
        stores = [source.store for source in self.sources]
        if all(store.keeps_whole for store in stores):  # `predicted` counts answers, and the planner needs labels
            predicted = tokens * sum(store.labels for store in stores) / sum(len(store.tokens) for store in stores)
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
        """Return the settings that decide the order of the data.

        While these settings are unchanged, a step number determines the position in the data.
        """
        values: dict[str, str | int | float | None] = {
            "run.seed": self.seed,
            "data.sequence_length": self.format.length,
            "data.packing": self.format.packed,
            "train.global_batch_size": self.global_batch_size,
            "data.sources": ", ".join(self.names),
        }
        for source in self.sources:
            values[_hash_key(source)] = source.digest
            if source.name:
                prefix = f"data.sources, {source.name}: "
                values[f"{prefix}weight"], values[f"{prefix}repeat"] = source.weight, source.repeat
        return values

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return (documents, tokens) of each source, under the key of its hash in `determinants`."""
        return {_hash_key(source): (source.store.documents, len(source.store.tokens)) for source in self.sources}

    def total_steps(self, max_steps: int | None) -> int:
        """Return the number of optimizer steps of the run. Raises UserError if all sources end before `max_steps`."""
        available = None if self.steps.stop is None else self.steps.until(self.steps.stop)
        if max_steps is None:
            assert available is not None, "a run has an end: in steps, or in epochs"
            return available
        if available is not None and available < max_steps:
            raise DataError(
                f"all of data.sources end after {count_of(available, 'step')}, before train.max_steps {max_steps}:"
                " lower it, or let a source repeat"
            )
        return max_steps

    def position(self, step: int) -> Position:
        """Return the position at which `step` (counted from 0) begins; after the last step, the end of the data."""
        return Position(*divmod(self.sequences_until(step), self.epoch_sequences))

    def sequences_until(self, step: int) -> int:
        """Return the number of sequences that the first `step` steps take."""
        return self.steps.of(step - 1).stop if step else 0

    def continued_at(self, step: int, position: Position, ends: Iterable[int]) -> Self:
        """Return a copy of these batches that continues an earlier stage of the run.

        The earlier stage ended at `position` after `step` steps. `ends`: the sequence numbers at which the stages
        before the earlier stage ended, for stages whose last batch was smaller. Raises UserError if no stage can have
        ended at `position`.
        """
        later = copy(self)
        try:
            earlier = replace(self.steps, ends=tuple(ends))
            later.steps = earlier.continued_at(step, position.epoch * self.epoch_sequences + position.index)
        except ValueError as error:
            raise ResumeError(f"cannot continue: the checkpoint's state contradicts itself: {error}") from None
        return later

    def wait_for(self, step: int) -> None:
        """Return when the data of the steps before `step` have been tokenised."""
        for stream, count in zip(self.streams, self.mixture.drawn(self.sequences_until(step)), strict=True):
            stream.wait_for(count)

    def close(self) -> None:
        """Stop tokenising; no further batch can be made."""
        for stream in self.streams:
            stream.close()

    def step_batch(self, step: int, rank: int, world_size: int) -> StepBatch:
        """Return the batch of `step`, counted from 0, for `rank`. Raises IndexError after the last step."""
        sequences = self.steps.of(step)
        first, stop = sequences.start, sequences.stop
        if not sequences:
            raise IndexError(f"step {step} begins after the last sequence")
        places = self.mixture.between(first, stop)
        ranges = zip(self.streams, self.mixture.drawn(first), self.mixture.drawn(stop), strict=True)
        counts = [stream.counts(start, end) for stream, start, end in ranges]
        layout, groups = Layout(self._stores, self.format), self._groups(first, places)
        share = layout.micro_batches(groups, rank, world_size, lambda source, at: self.streams[source].sequence(at))
        # The dropout seed depends only on the sequences, so that dropout is the same at any world size.
        micro_batches = [
            micro_batch and replace(micro_batch, seed=drawn_seed("dropout", self.seed, start))
            for start, micro_batch in share
        ]
        lengths = np.concatenate([self.streams[source].lengths(at) for source, at in places])
        predicted_of, tokens_of = zip(*counts, strict=True)
        return StepBatch(micro_batches, predicted_of, tokens_of, lengths, stop - first, stop / self.epoch_sequences)

    def _groups(self, first: int, places: list[tuple[int, int]]) -> list[Group]:
        """Divide a global batch into micro-batches of one source each, so that the loss of each source is known.

        Smaller micro-batches come last. Otherwise, if each source gave one full and one smaller micro-batch, rank 0 of
        two ranks would get all full micro-batches and rank 1 all smaller ones.
        """
        numbered = sorted(
            ((source, first + n, at) for n, (source, at) in enumerate(places)), key=lambda entry: entry[0]
        )
        groups = []
        for source, entries in groupby(numbered, key=lambda entry: entry[0]):
            sequences = list(entries)
            for start in range(0, len(sequences), self.micro_batch_size):
                batch = sequences[start : start + self.micro_batch_size]
                groups.append(Group(source, batch[0][1], [at for _, _, at in batch]))
        return sorted(groups, key=lambda group: -len(group.sequences))
