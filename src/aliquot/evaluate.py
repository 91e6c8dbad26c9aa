"""Perplexity and bits per byte on the evaluation documents, over all ranks; and how training begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from aliquot.data.batches import EvalBatches
from aliquot.engines.base import Engine
from aliquot.launch.ranks import Ranks
from aliquot.loss.base import IGNORE
from aliquot.models.batch import MicroBatch


def first_loss(engine: Engine, batch: MicroBatch | None, ranks: Ranks) -> float:
    """The mean loss of each rank's first micro-batch, before any training. Collective."""
    own = [float(engine.evaluate(batch)), 0 if batch is None else batch.predicted]
    summed, predicted = (math.fsum(values) for values in zip(*ranks.gather(own), strict=True))
    return summed / max(1.0, predicted)


def with_prefix(batch: MicroBatch, prefix: Sequence[int], longest: int) -> MicroBatch:
    """The same documents with `prefix` before each, which is not predicted, cut to `longest` tokens."""
    ids, labels, edges = [], [], [0]
    for start, stop in pairwise(batch.edges):
        stop = min(stop, start + longest - len(prefix))
        ids += [torch.tensor(prefix), batch.input_ids[start:stop]]
        labels += [torch.full((len(prefix),), IGNORE), batch.labels[start:stop]]
        edges.append(edges[-1] + len(prefix) + stop - start)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])
    return MicroBatch(torch.cat(ids), torch.cat(labels), positions, tuple(edges), calls=batch.calls)


def evaluate(
    engine: Engine, batches: EvalBatches, ranks: Ranks, beat: Callable[[], None]
) -> tuple[float, float, float | None]:
    """Loss and perplexity per predicted token, bits per byte of their text where its size is known. Collective.

    `beat` is called after each micro-batch.
    """
    summed = torch.zeros((), dtype=torch.float64)
    for micro_batch in batches.micro_batches(ranks.rank, ranks.world_size):
        summed += engine.evaluate(micro_batch).cpu()
        beat()
    nats = math.fsum(ranks.gather(float(summed)))
    loss, text_bytes = nats / batches.predicted, batches.store.text_bytes
    return loss, math.exp(loss) if loss < 700 else math.inf, nats / math.log(2) / text_bytes if text_bytes else None
