"""Describe a run before its first step, and check its data and model: plausible examples, plausible loss."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aliquot.data.data_summary import day_line, first_samples, header, warnings
from aliquot.distributed.launcher import torchrun_advice
from aliquot.distributed.ranks import Ranks, group_lines
from aliquot.engines.base import Engine
from aliquot.models.micro_batch import MicroBatch
from aliquot.models.narrow import has_dropout
from aliquot.nn.experts.expert_modules import has_experts
from aliquot.nn.logits_gradient import IGNORE
from aliquot.observe import run_summary
from aliquot.observe.events import RunRecord

if TYPE_CHECKING:
    from aliquot.run.prepared_run import PreparedRun

_MUCH_BETTER = 0.5  # a difference of losses, in nats per token


def introduce(trainer: PreparedRun) -> RunRecord:
    """Print what the run trains, on which data and how, and return these facts for the records. Collective."""
    run, ranks, built = trainer.resolved, trainer.ranks, trainer.model.built
    days = [day_line(run.data.day)] if run.data.day else []
    data = [*header(trainer.train_batches, trainer.total_steps, trainer.held_out), *days] if ranks.rank == 0 else days
    samples = first_samples(trainer.train_batches, run.tokenizer, text=True) if ranks.rank == 0 else []
    record = RunRecord(
        trainer.placement, trainer.machine, *run.ceiling,
        resumed_from=None if trainer.start.resumed_from is None else str(trainer.start.resumed_from),
        model=built.name, parameters=built.numel, learned=built.learned_numel,
        engine=trainer.model.engine_name, plan=trainer.ledger.plan, data={"summary": data, "samples": samples},
    )  # fmt: skip
    connections = group_lines(ranks, trainer.model.engine.transport)
    command = b""
    with suppress(OSError):  # a container may hide the parent process, or have none
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    notes = [*trainer.model.notes, *torchrun_advice(os.environ, trainer.config.checkpoint.grace_s, command)]
    if not run.config.train.drops and has_dropout(run.source.config, run.config.adapter):
        notes.append("dropout of model and adapter is off (train.disable_dropout: false keeps it)")
    if (adapter := run.config.adapter) is not None and not adapter.experts and has_experts(built.model):
        notes.append("the adapter leaves out the experts (adapter.experts: true adapts them)")
    run_summary.begin(trainer.display, trainer.config, record, *data, *connections, *notes)
    return record


def show_data(trainer: PreparedRun) -> None:
    """Show the labels of the first examples, unless all tokens are labels, and warn of doubtful data. Rank 0 only."""
    for line in first_samples(trainer.train_batches, trainer.resolved.tokenizer):
        trainer.display.line(line)
    for text in warnings(trainer.train_batches, trainer.total_steps, trainer.config.train.max_steps is not None):
        trainer.display.warning(text)


def check_first_batch(trainer: PreparedRun) -> None:
    """Warn if a pretrained model predicts the first batch badly, or much better with a bos token. Collective."""
    batch = trainer.train_batches.step_batch(0, trainer.ranks.rank, trainer.ranks.world_size).micro_batches[0]
    batch = batch and replace(batch, row_loss=None)  # the cross-entropy of all answers
    vocabulary = trainer.resolved.source.config.get_text_config(decoder=True).vocab_size
    has_masks = {stream.source.store.mask is not None for stream in trainer.train_batches.streams}
    # In a mixture of data sources, ranks may see sources with and without loss masks. So the chat prefix is used only
    # if all sources are chat data.
    prefix = trainer.resolved.data.chat_prefix if has_masks == {True} else trainer.resolved.data.prefix
    tokenizer, ranks = trainer.resolved.tokenizer, trainer.ranks
    loss, guess = _mean_loss(trainer.model.engine, batch, ranks), math.log(vocabulary)
    advice = ""
    if not prefix and tokenizer.bos_token_id is not None:
        batch_with_bos = None if batch is None else with_prefix(batch, [tokenizer.bos_token_id])
        loss_with_bos = _mean_loss(trainer.model.engine, batch_with_bos, ranks)
        if loss_with_bos < loss - _MUCH_BETTER:
            trainer.display.warning(
                f"the documents begin at a loss of {loss:.2f}, and at {loss_with_bos:.2f} with {tokenizer.bos_token}"
                " before each document: set data.add_bos=true"
            )
            return
        advice = "; the model may have been trained with data.add_bos=true"
    if loss > guess:
        trainer.display.warning(
            f"the documents begin at a loss of {loss:.2f}, and guessing gives {guess:.2f}: are model, tokenizer and"
            f" text made for each other?{advice}"
        )


def with_prefix(batch: MicroBatch, prefix: Sequence[int]) -> MicroBatch:
    """Insert `prefix`, with ignored labels, before each document, and cut each document to its former length."""
    ids, labels, edges = [], [], [0]
    for start, stop in pairwise(batch.edges):
        cut = max(start, stop - len(prefix))
        ids += [torch.tensor(prefix), batch.input_ids[start:cut]]
        labels += [torch.full((len(prefix),), IGNORE), batch.labels[start:cut]]
        edges.append(edges[-1] + len(prefix) + cut - start)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])
    return MicroBatch(torch.cat(ids), torch.cat(labels), positions, tuple(edges), calls=batch.calls)


def _mean_loss(engine: Engine, batch: MicroBatch | None, ranks: Ranks) -> float:
    """The mean loss per predicted token over the micro-batches of all ranks. Collective."""
    loss_and_tokens = [float(engine.evaluate(batch)), 0 if batch is None else batch.predicted]
    loss, predicted = (math.fsum(values) for values in zip(*ranks.gather(loss_and_tokens), strict=True))
    return loss / max(1.0, predicted)
