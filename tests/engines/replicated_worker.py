"""One rank of engine fsdp that trains, saves, restores or stays idle, on nodes that may be replicas.

The arguments: number of replicas (1: all ranks divide the weights), a checkpoint to restore or "none", steps to train.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig

from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.restore import restore
from aliquot.distributed.topology import Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.engine_plan import Unsharded
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.loaders.sharded import Members
from aliquot.models import initialize, meta
from tests.checkpoint.saving import save
from tests.engines import cases
from tests.processes import as_ranks

MODEL = {**cases.SMALL, "vocab_size": 72, "intermediate_size": 60}  # 2, 3 and 4 ranks pad nothing but hidden_size
MICRO_BATCHES = 12  # of a global batch: as many on each of 1, 2, 3 and 4 ranks


def train(engine: FsdpEngine, step: int, rank: int, world_size: int) -> tuple[float, int]:
    """Train a step; return the gradient norm, and the bytes that this rank has sent."""
    before = engine.counters().wire_bytes
    sequences = [*cases.documents(step), *cases.documents(100 + step), *cases.documents(200 + step)][:MICRO_BATCHES]
    local = sequences[rank::world_size]
    for number, sequence in enumerate(local):
        engine.backward(cases.micro_batch(sequence), 1 / 300, last=number == len(local) - 1)
        held = 4 * sum(shard.local.numel() for shard in engine._trainable)
        assert engine.counters().gradients_bytes in (held, 0)  # 0: unsharded sums, which torch holds elsewhere
    norm = engine.step(cases.LEARNING_RATE, cases.MAX_GRAD_NORM).grad_norm
    return norm, engine.counters().wire_bytes - before


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    replicas, source, steps, whole = int(arguments[0]), arguments[1], int(arguments[2]), arguments[3] == "whole"
    built = meta.build(AutoConfig.for_model("llama", **MODEL))
    spec = EngineSpec(
        "fp32", 64, built.traits.plain_head, replicates=replicas > 1, unsharded=Unsharded(whole, whole),
        collectives="auto" if world_size > replicas else "gloo",
    )  # fmt: skip
    node, local_rank = divmod(rank, local_size := world_size // replicas)
    engine = FsdpEngine.build(
        built.model, spec, Topology(rank, world_size, local_rank, local_size, node, replicas, "cpu", 1, ())
    )
    ranks, files = Members(torch.device("cpu")), CheckpointSpec(built.saved, trained=built.learned)
    begun = 0
    if source == "none":
        initialize.initialize(engine, built.fills, cases.SEED)
    else:
        begun = restore(Path(source), engine, files, ranks)["step"]
        engine.resume_at(begun)
    engine.ready()
    save(folder / "restored", begun, engine, files, {"step": begun}, ranks, 1)
    trained = [train(engine, step, rank, world_size) for step in range(begun, begun + steps)]
    save(folder / "trained", begun + steps, engine, files, {"step": begun + steps}, ranks, 1)
    norms, sent = [norm for norm, _ in trained], [sent_bytes for _, sent_bytes in trained]
    (folder / f"{rank}.json").write_text(json.dumps({"norms": norms, "sent": sent, "transport": engine.transport}))
    engine.close()


if __name__ == "__main__":
    as_ranks(work)
