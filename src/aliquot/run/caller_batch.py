"""Turn the caller's sequences into micro-batches: divide them among ranks, and pack them into rows."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aliquot.core.errors import UsageError
from aliquot.core.on_rank_0 import gather_results
from aliquot.data.batches import StepBatch
from aliquot.data.data_order import drawn_seed
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.head_loss import Chosen
from aliquot.nn.logits_gradient import IGNORE
from aliquot.nn.product_shapes import filler
from aliquot.nn.token_loss import Group, LossFunction, TokenLoss, TokenSequence, loss_name
from aliquot.run.starting_point import initial_weights

if TYPE_CHECKING:
    from aliquot.run.trainer import Trainer


def as_groups(sequences: Sequence[TokenSequence | Group]) -> list[Group]:
    """Return sequences, and tuples of sequences, as tuples. Raises UsageError for other objects."""
    groups = [entry if isinstance(entry, tuple) else (entry,) for entry in sequences]
    for entry in chain.from_iterable(groups):
        if not isinstance(entry, TokenSequence):
            raise UsageError(f"expected aliquot.TokenSequence, or tuples of them, not {type(entry).__name__}")
    return groups


def scattered(trainer: Trainer, groups: Sequence[Group]) -> tuple[list[Group], list[int]]:
    """Return all groups of rank 0, and the indices of those that this rank takes. Collective.

    The longest group goes first, each to the rank with the fewest tokens.
    """
    ranks = trainer.ranks
    values = ranks.broadcast(_to_json(groups) if ranks.rank == 0 else None)
    received = [tuple(TokenSequence(**sequence) for sequence in group) for group in values]
    loads = [(0, rank) for rank in range(ranks.world_size)]
    shares: list[list[int]] = [[] for _ in loads]
    for index in sorted(range(len(received)), key=lambda at: -_tokens(received[at])):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + _tokens(received[index]), rank))
    return received, sorted(shares[ranks.rank])


def lay_out(
    trainer: Trainer, groups: Sequence[Group], loss: LossFunction | None = None, divisor: float | None = None
) -> StepBatch:
    """Pack this rank's groups into micro-batches, in their order, for a batch of all ranks. Collective.

    Raises UsageError on every rank for sequences that do not fit, and if ranks differ in `loss` or `divisor`.
    """
    rows = list[list[Group]]()

    def facts() -> dict[str, Any]:
        rows.extend(_rows(trainer, groups))
        if divisor is not None and not divisor > 0:
            raise UsageError(f"divisor is {divisor}: name a positive number")
        sequences = list(chain.from_iterable(groups))
        return {
            "documents": [sum(map(len, row)) for row in rows],
            "lengths": [len(sequence.ids) for sequence in sequences],
            "learned": sum(int(sequence.mask.sum()) for sequence in sequences),
            "loss": [f"{loss_name(loss)} over {divisor}"] if sequences else [],
        }

    reports = gather_results(trainer.ranks, facts)
    if len(losses := sorted({name for report in reports for name in report["loss"]})) != 1:
        raise UsageError(f"ranks differ in their loss: {' and '.join(losses)}" if losses else "no rank has a sequence")
    packs, micro_batches = trainer.train_batches.format.model_packs, list[MicroBatch | None]()
    for index in range(max(len(report["documents"]) for report in reports)):
        # Engines that gather weights in every forward pass need the same number of passes on every rank.
        calls = 0 if packs else max(sum(report["documents"][index : index + 1]) for report in reports)
        if index < len(rows):
            micro_batches.append(_micro_batch(trainer, rows[index], loss, calls, index))
        else:
            micro_batches.append(MicroBatch.empty(calls) if calls else None)
    lengths = np.array([length for report in reports for length in report["lengths"]], np.int32)
    if divisor is None:
        divisor = sum(report["learned"] for report in reports)
    return StepBatch(micro_batches, (divisor,), (int(lengths.sum()),), lengths, len(lengths), 0.0)


def token_logprobs(trainer: Trainer, groups: Sequence[Group], reference: bool, scatter: bool) -> list[Tensor]:
    """Return the log-probabilities [L] of each sequence; with `scatter`, of those of rank 0, on every rank.

    `reference`: compute them with the weights before training. Collective.
    """
    indices = list(range(len(groups)))
    if scatter:
        groups, indices = scattered(trainer, groups)
    batch, results = lay_out(trainer, [groups[index] for index in indices]), list[Tensor]()
    with initial_weights(trainer) if reference else nullcontext():
        for micro_batch in batch.micro_batches:
            logprobs = trainer.model.engine.evaluate(micro_batch)
            trainer.watchdog.beat()
            if micro_batch is not None and isinstance(micro_batch.row_loss, TokenLoss):
                results += [piece for pieces in micro_batch.row_loss.split(logprobs.cpu()) for piece in pieces]
    if not scatter:
        return results
    parts = trainer.ranks.gather([indices, [result.tolist() for result in results]])
    all_results = {index: torch.tensor(values) for part in parts for index, values in zip(*part, strict=True)}
    return [all_results[index] for index in range(len(groups))]


def check_ids(trainer: Trainer, ids: Tensor) -> None:
    """Raise UsageError for a token id that the model does not have."""
    vocabulary = trainer.model.built.model.get_input_embeddings().num_embeddings
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise UsageError(f"token ids are {int(ids.min())} to {int(ids.max())}, and the model has 0 to {vocabulary - 1}")


def _to_json(groups: Sequence[Group]) -> list[Any]:
    return [
        [{name: _plain(values) for name, values in vars(sequence).items()} for sequence in group] for group in groups
    ]


def _plain(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: _plain(entry) for name, entry in values.items()}
    return None if values is None else torch.as_tensor(values).tolist()


def _tokens(group: Group) -> int:
    return sum(len(sequence.ids) for sequence in group)


def _rows(trainer: Trainer, groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield the groups of each micro-batch: as many as fit. Raises UsageError for a group that does not fit."""
    batches, row, room = trainer.train_batches, list[Group](), 0
    limit, most = batches.format.length, batches.format.length * batches.micro_batch_size
    for group in groups:
        for sequence in group:
            check_ids(trainer, torch.cat([torch.as_tensor(sequence.ids), sequence.labels.flatten()]))
        longest, tokens = max(len(sequence.ids) for sequence in group), _tokens(group)
        if longest > limit:
            raise UsageError(f"a sequence has {longest} tokens: raise data.sequence_length ({limit})")
        if tokens > most:
            raise UsageError(
                f"a tuple of sequences has {tokens} tokens, and a micro-batch {most}: raise"
                " train.per_device_train_batch_size"
            )
        if tokens > room and row:
            yield row
            row = []
        room = (room if row else most) - tokens
        row.append(group)
    if row:
        yield row


def _micro_batch(trainer: Trainer, row: list[Group], loss: LossFunction | None, calls: int, index: int) -> MicroBatch:
    format, sequences = trainer.train_batches.format, [sequence for group in row for sequence in group]
    lengths = [len(sequence.ids) for sequence in sequences]
    if format.model_packs and format.fills_up:
        lengths += filler(sum(lengths), len(sequences), format.length)
    edges = [0, *np.cumsum(lengths).tolist()]
    ids = torch.full((edges[-1],), format.pad_id)
    labels, positions = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
    for sequence, (start, stop) in zip(sequences, pairwise(edges), strict=False):
        ids[start:stop] = torch.as_tensor(sequence.ids)
        labels[start : stop - 1] = torch.where(sequence.mask[1:], ids[start + 1 : stop], IGNORE)
    for start, stop in pairwise(edges):
        positions[start:stop] = torch.arange(stop - start)
    token_loss, chosen = TokenLoss((labels != IGNORE).nonzero().flatten(), row, loss), None
    if any(sequence.targets is not None for sequence in sequences):
        # The state before a token predicts its targets. A place with several targets is a row for each of them.
        rows = [
            (sequence.mask.nonzero() + start - 1).expand(sequence.labels.view(len(sequence.labels), -1).shape).flatten()
            for sequence, start in zip(sequences, edges, strict=False)
        ]
        targets = torch.cat([sequence.labels.flatten() for sequence in sequences])
        chosen = Chosen(torch.cat(rows), len(targets), replace(token_loss, tokens=torch.arange(len(targets))), targets)
    seed = drawn_seed("dropout", trainer.config.run.seed, f"{trainer.progress.step}:{trainer.ranks.rank}:{index}")
    return MicroBatch(ids, labels, positions, tuple(edges), seed, calls, chosen=chosen, row_loss=token_loss)
