"""Check data and model before the first step: same on all ranks, plausible examples, plausible loss of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from aliquot.data.data_summary import first_samples, warnings
from aliquot.distributed.config_consistency import check_equal_on_ranks
from aliquot.distributed.ranks import Ranks
from aliquot.engines.base import Engine
from aliquot.models.micro_batch import MicroBatch
from aliquot.models.stored_weights import fingerprint
from aliquot.nn.head_loss import IGNORE
from aliquot.run.run_context import Inputs, Model, RunContext

_MUCH_BETTER = 0.5  # a difference of losses, in nats per token


def check_inputs(run: RunContext, inputs: Inputs) -> None:
    """Check that data and model are the same on all ranks; the paths of their files may differ. Collective.

    Raises NodesDifferError on every rank.
    """
    adapter = None if run.config.adapter is None else run.config.adapter.directory

    def identities() -> dict[str, Any]:
        data, config = inputs.data, inputs.source.config.to_dict()
        return {
            **{f"{name or 'data'} (hash of the tokens)": Path(path).name for name, path in data.train.items()},
            **{f"held-out {name or 'data'} (hash of the tokens)": Path(path).name for name, path in data.eval.items()},
            "tokenizer (hash of its files)": Path(data.tokenizer).name,
            "model.config": {key: value for key, value in config.items() if not key.startswith("_")},
            "weights (hash of samples)": inputs.source.fingerprint,
            "adapter (hash of samples)": None if adapter is None else fingerprint(adapter),
        }

    check_equal_on_ranks(run.ranks, identities)


def show_data(run: RunContext, inputs: Inputs) -> None:
    """Show the labels of the first examples, unless all tokens are labels, and warn of doubtful data. Rank 0 only."""
    for line in first_samples(inputs.batches, inputs.tokenizer):
        run.display.line(line)
    for text in warnings(inputs.batches, inputs.total_steps, run.config.train.max_steps is not None):
        run.display.warning(text)


def check_first_batch(run: RunContext, inputs: Inputs, model: Model) -> None:
    """Warn if a pretrained model predicts the first batch badly, or much better with a bos token. Collective."""
    batch = inputs.batches.step_batch(0, run.ranks.rank, run.ranks.world_size).micro_batches[0]
    batch = batch and replace(batch, answers=None)  # the cross-entropy of all answers
    vocabulary = inputs.source.config.get_text_config(decoder=True).vocab_size
    has_masks = {stream.source.store.mask is not None for stream in inputs.batches.streams}
    # In a mixture of data sources, ranks may see sources with and without loss masks. So the chat prefix is used only
    # if all sources are chat data.
    prefix = inputs.data.chat_prefix if has_masks == {True} else inputs.data.prefix
    tokenizer, ranks = inputs.tokenizer, run.ranks
    loss, guess = _mean_loss(model.engine, batch, ranks), math.log(vocabulary)
    advice = ""
    if not prefix and tokenizer.bos_token_id is not None:
        batch_with_bos = None if batch is None else with_prefix(batch, [tokenizer.bos_token_id])
        loss_with_bos = _mean_loss(model.engine, batch_with_bos, ranks)
        if loss_with_bos < loss - _MUCH_BETTER:
            run.display.warning(
                f"the documents begin at a loss of {loss:.2f}, and at {loss_with_bos:.2f} with {tokenizer.bos_token}"
                " before each document: set data.add_bos=true"
            )
            return
        advice = "; the model may have been trained with data.add_bos=true"
    if loss > guess:
        run.display.warning(
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
