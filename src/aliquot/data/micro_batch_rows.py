"""Build micro-batches from sequences: token ids, labels, positions and padding of one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np
import torch

from aliquot.core.errors import DataError
from aliquot.data.mismatched_answers import mismatched
from aliquot.data.token_store import TokenStore
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.logits_gradient import IGNORE
from aliquot.nn.preference_loss import Answers, Objective, RatedAnswers
from aliquot.nn.product_shapes import filler

Pieces = list[tuple[int, int]]  # (start, length) in the token store of each piece of a sequence


@dataclass(frozen=True)
class Group:
    """The sequences of one micro-batch, all from one source."""

    source: int
    first: int  # index of the first sequence in the mixture of all sources
    sequences: Sequence[int]  # indices within the source


@dataclass(frozen=True)
class SequenceFormat:
    """The settings by which documents become sequences, and sequences become rows of micro-batches.

    Args:
        length: maximum number of tokens in a sequence.
        pad_id: the token id of padding, which has no labels.
        packed: whether several documents share a sequence.
        model_packs: whether one forward pass takes several documents; otherwise each document is a forward pass.
        fills_up: whether rows of unpacked sequences are padded to one of a few lengths.
        objective: the loss of pairs of answers or of rated answers, if the documents are such answers.
    """

    length: int
    pad_id: int
    packed: bool
    model_packs: bool = True
    fills_up: bool = False
    objective: Objective | None = None

    @property
    def pads_sequences(self) -> bool:
        """Whether each sequence is padded to its full length."""
        return self.packed and self.model_packs

    @property
    def fills_rows(self) -> bool:
        """Whether rows are padded to one of a few lengths, because oneDNN keeps a compiled kernel for each shape."""
        return self.fills_up and self.model_packs and not self.packed

    def with_objective(self, objective: Objective, stores: Iterable[TokenStore]) -> SequenceFormat:
        """Return this format for a loss of answers. Raises UserError if one of `stores` has no such answers."""
        pairs, rated = ("pairs of answers", "chosen and rejected"), ("rated answers", "completion and label")
        kind, fields = rated if objective.rates_answers else pairs
        for store in stores:
            if not (store.desirable is not None if objective.rates_answers else store.pairs):
                raise DataError(
                    f"train.objective: {objective.name} needs {kind}, and these are plain text: give records with the"
                    f" fields prompt, {fields}"
                )
            if store.prompts is not None and (store.prompts == store.prompts[0]).all():
                raise DataError(
                    f"train.objective: {objective.name} compares answers to different prompts, but a source has only"
                    " one prompt: give more, also for evaluation"
                )
        return replace(self, objective=objective)


@dataclass(frozen=True)
class Layout:
    """Build micro-batches from sequences. Each micro-batch is one row; padding follows on the right of a sequence."""

    stores: Sequence[TokenStore]
    format: SequenceFormat

    def micro_batches(
        self, groups: Iterable[Group], rank: int, world_size: int, sequence: Callable[[int, int], Pieces]
    ) -> Iterator[tuple[int, MicroBatch | None]]:
        """Yield (index of the first sequence, micro-batch) for this rank; group m goes to rank m % world_size.

        Every rank gets the same number of micro-batches. A rank for which no group is left gets None. If each document
        is a forward pass, this rank instead gets an empty micro-batch, so that all ranks join the same number of
        collectives. `sequence(source, index)` returns the pieces of a sequence.
        """
        coming = iter(groups)
        while turn := list(islice(coming, world_size)):
            calls = 0
            if not self.format.model_packs:  # every rank must run the same number of forward passes
                calls = max(sum(len(sequence(group.source, at)) for at in group.sequences) for group in turn)
            if rank < len(turn):
                group = turn[rank]
                yield (
                    group.first,
                    self._row(group.source, [sequence(group.source, at) for at in group.sequences], calls),
                )
            else:
                yield 0, MicroBatch.empty(calls) if calls else None

    def _row(self, source: int, sequences: list[Pieces], calls: int) -> MicroBatch:
        store, pieces = self.stores[source], list[tuple[int, int]]()  # (start, length); padding has start -1
        for sequence in sequences:
            room = self.format.length - sum(length for _, length in sequence)
            pieces += [*sequence, *([(-1, room)] if room and self.format.pads_sequences else [])]
        if self.format.fills_rows:
            tokens = sum(length for _, length in pieces)
            pieces += [(-1, length) for length in filler(tokens, len(sequences), self.format.length)]
        edges = np.concatenate([[0], np.cumsum([length for _, length in pieces])])
        ids = np.full(edges[-1], self.format.pad_id, np.int64)
        labels = np.full(edges[-1], IGNORE, np.int64)
        for (start, length), at in zip(pieces, edges.tolist(), strict=False):
            if start < 0:
                continue
            ids[at : at + length] = store.tokens[start : start + length]
            labels[at : at + length - 1] = ids[at + 1 : at + length]
            if store.mask is not None:
                unlearned = store.mask[start + 1 : start + length] == 0
                labels[at : at + length - 1][unlearned] = IGNORE
        positions = np.arange(edges[-1]) - np.repeat(edges[:-1], np.diff(edges))
        id_row, label_row, position_row = (torch.from_numpy(array) for array in (ids, labels, positions))
        row = MicroBatch(id_row, label_row, position_row, tuple(edges.tolist()), calls=calls, source=source)
        objective = self.format.objective
        if objective is None:
            return row
        row = replace(row, row_loss=self._answers(objective, store, pieces, row))
        if store.desirable is not None:
            row = replace(row, mismatched=self._mismatched(store, [start for start, _ in pieces if start >= 0], calls))
        return row

    def _mismatched(self, store: TokenStore, starts: list[int], calls: int) -> MicroBatch:
        """Return the row of mismatched answers to the prompts of the documents that begin at tokens `starts`.

        Their lengths differ from those of the documents. The row is therefore padded to one of a few lengths.
        """
        other = mismatched(store, starts, self.format.length)
        layout = Layout([other], replace(self.format, packed=False, fills_up=True))
        return layout._row(0, [[(int(a), int(b - a))] for a, b in pairwise(other.offsets)], calls)

    def _answers(self, objective: Objective, store: TokenStore, pieces: Pieces, row: MicroBatch) -> Answers:
        """Return the answers in a row.

        `pieces` are answers, and padding at the end; a chosen answer precedes the rejected answer of its pair.
        """
        starts, lengths = np.array(pieces).T
        number = np.cumsum(starts >= 0) - 1  # padding has no labels
        starts = starts[starts >= 0]
        tokens = (row.labels != IGNORE).nonzero().flatten()
        numbers = torch.from_numpy(np.repeat(number, lengths))[tokens]
        labels = torch.bincount(numbers, minlength=len(starts)).float()
        places = store.places(starts)
        values = np.zeros(len(starts), np.float32) if store.reference is None else store.reference[places]
        group = 1 if objective.rates_answers else 2
        facts = numbers, labels.view(-1, group), torch.from_numpy(values).view(-1, group), tuple(places.tolist())
        if store.desirable is None:
            return Answers(tokens, objective, *facts)
        desirable = torch.from_numpy(store.desirable[np.searchsorted(store.offsets, starts)] > 0)
        return RatedAnswers(tokens, objective, *facts, desirable=desirable)
