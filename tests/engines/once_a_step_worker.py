"""A rank of engine host on one of several hosts, with a copy of the weights as on a GPU: the bytes that it sends."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig

from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.ranks import gather
from aliquot.distributed.topology import Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.host.host_engine import HostEngine
from aliquot.models import initialize, meta
from aliquot.models.micro_batch import MicroBatch
from tests.processes import as_ranks

# Llama 3 8B, scaled down: a sixteenth of its width and vocabulary, an eighth of its layers.
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8016,
    "max_position_embeddings": 512,
}
TOKENS, LEARNING_RATE = 256, 2e-5
FIRST, STEPS = 3, 6  # counted are the steps from FIRST on: Adam's first steps change more weights


def row(seed: int) -> MicroBatch:
    """Tokens as often as in text, by Zipf's law."""
    draw = torch.Generator().manual_seed(seed)
    frequencies = 1 / torch.arange(1, MODEL["vocab_size"] + 1)  # type: ignore[operator]
    ids = torch.multinomial(frequencies, TOKENS + 1, replacement=True, generator=draw)
    return MicroBatch(ids[:-1], ids[1:], torch.arange(TOKENS), (0, TOKENS))


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    micro_batches = int(arguments[0])
    built = meta.build(AutoConfig.for_model(**MODEL))
    spec = EngineSpec("bf16", TOKENS, built.traits.plain_head, micro_batches=micro_batches, copies_weights=True)
    topology = Topology(rank, world_size, 0, 1, rank, world_size, "cpu", 1, ())
    engine = HostEngine(built.model, spec, Hosts.join(rank, 0, gather, f"host {rank}"), topology)
    initialize.initialize(engine, built.fills, 0)
    engine.ready()
    sent = [engine.counters().wire_bytes]
    for step in range(STEPS):
        for number in range(micro_batches):
            batch = row((step * micro_batches + number) * world_size + rank)
            engine.backward(batch, 1 / (TOKENS * micro_batches * world_size), last=number == micro_batches - 1)
        engine.step(LEARNING_RATE, 1.0)
        sent.append(engine.counters().wire_bytes)
    (folder / f"{rank}.json").write_text(json.dumps(sent))
    engine.close()


if __name__ == "__main__":
    as_ranks(work)
