"""Perplexity and bits per byte on the evaluation documents, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from aliquot.data.batches import EvalBatches
from aliquot.engines.base import Engine
from aliquot.launch.ranks import Ranks

_ASKED_EVERY = 4  # micro-batches, of seconds each for a large model


def evaluate(
    engine: Engine, batches: EvalBatches, ranks: Ranks, progress: Callable[[int, int], None], stopped: Callable[[], int]
) -> tuple[float, float, float | None] | None:
    """Loss and perplexity per predicted token, bits per byte of their text where its size is known. Collective.

    `progress` gets how many micro-batches are done, and of how many, before the first and after each. None: given up,
    because `stopped`, which is collective, said so.
    """
    summed = torch.zeros((), dtype=torch.float64)
    total = batches.count(ranks.world_size)
    progress(0, total)
    for done, micro_batch in enumerate(batches.micro_batches(ranks.rank, ranks.world_size)):
        if done % _ASKED_EVERY == 0 and stopped():
            return None
        summed += engine.evaluate(micro_batch).cpu()
        progress(done + 1, total)
    nats = math.fsum(ranks.gather(float(summed)))
    loss, text_bytes = nats / batches.predicted, batches.store.text_bytes
    return loss, math.exp(loss) if loss < 700 else math.inf, nats / math.log(2) / text_bytes if text_bytes else None
