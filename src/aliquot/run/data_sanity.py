"""How a pretrained model meets its documents: whether it knows them, and whether it misses the bos it knew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from aliquot.distributed.ranks import Ranks
from aliquot.engines.base import Engine
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.loss.base import IGNORE

_MUCH_BETTER = 0.5  # nats a token


def doubts(
    engine: Engine, batch: MicroBatch | None, prefix: Sequence[int], tokenizer: Any, vocabulary: int, ranks: Ranks
) -> str | None:
    """What to tell the person before training; None: all is as it should be. Collective.

    `batch`: this rank's first micro-batch, whose documents have `prefix` before them.
    """
    found, guess = _loss(engine, batch, ranks), math.log(vocabulary)
    advice = ""
    if not prefix and tokenizer.bos_token_id is not None:
        dressed = None if batch is None else with_prefix(batch, [tokenizer.bos_token_id])
        better = _loss(engine, dressed, ranks)
        if better < found - _MUCH_BETTER:
            return (
                f"the documents begin at a loss of {found:.2f}, and at {better:.2f} with {tokenizer.bos_token} before"
                " each: set data.add_bos=true"
            )
        advice = "; data.add_bos=true may be what it was trained with"
    if found <= guess:
        return None
    return (
        f"the documents begin at a loss of {found:.2f}, and guessing gives {guess:.2f}: are model, tokenizer and text"
        f" made for each other?{advice}"
    )


def with_prefix(batch: MicroBatch, prefix: Sequence[int]) -> MicroBatch:
    """The same documents with `prefix`, which is not predicted, before each, and as much less at their ends."""
    ids, labels, edges = [], [], [0]
    for start, stop in pairwise(batch.edges):
        kept = max(start, stop - len(prefix))
        ids += [torch.tensor(prefix), batch.input_ids[start:kept]]
        labels += [torch.full((len(prefix),), IGNORE), batch.labels[start:kept]]
        edges.append(edges[-1] + len(prefix) + kept - start)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])
    return MicroBatch(torch.cat(ids), torch.cat(labels), positions, tuple(edges), calls=batch.calls)


def _loss(engine: Engine, batch: MicroBatch | None, ranks: Ranks) -> float:
    """The mean over all ranks' micro-batches. Collective."""
    own = [float(engine.evaluate(batch)), 0 if batch is None else batch.predicted]
    summed, predicted = (math.fsum(values) for values in zip(*ranks.gather(own), strict=True))
    return summed / max(1.0, predicted)
