"""Perplexity and bits per byte on the evaluation documents, over all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from aliquot.data.eval_batches import EvalBatches
from aliquot.distributed.ranks import Ranks
from aliquot.engines.base import Engine

_ASKED_S = 1.0  # about how often ranks ask each other whether one was told to stop
_MORE = 4  # times as many micro-batches from one question to the next, at most


def compile_evaluation(engine: Engine, batches: EvalBatches, ranks: Ranks) -> None:
    """Have compiled what evaluates: of a micro-batch of each length that packed sequences have. Collective."""
    for micro_batch in batches.first_and_last(ranks.rank, ranks.world_size):
        engine.evaluate(micro_batch)


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
    asks_at, every, began = 0, 1, time.perf_counter()
    for done, micro_batch in enumerate(batches.micro_batches(ranks.rank, ranks.world_size)):
        if done == asks_at:
            if stopped():
                return None
            if done:
                took_s = max(ranks.gather(time.perf_counter() - began)) / every
                every = max(1, min(_MORE * every, int(_ASKED_S / took_s)))
            asks_at, began = done + every, time.perf_counter()
        summed += engine.evaluate(micro_batch).cpu()
        progress(done + 1, total)
    nats = math.fsum(ranks.gather(float(summed)))
    loss, text_bytes = nats / batches.predicted, batches.store.text_bytes
    return loss, math.exp(loss) if loss < 700 else math.inf, nats / math.log(2) / text_bytes if text_bytes else None
