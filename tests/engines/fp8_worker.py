"""One rank of engine fsdp with products in fp8, which torchao emulates: alone, as on a single GPU, or one of two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from aliquot.distributed.topology import Topology
from aliquot.engines.base import Engine, EngineSpec
from aliquot.engines.engine_plan import Unsharded
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.fsdp.single_gpu_engine import SingleGpuEngine
from aliquot.models import initialize, meta
from aliquot.models.micro_batch import MicroBatch
from tests.engines import cases
from tests.processes import as_ranks

# Two of the three matrices of an MLP are large enough for fp8: 133,120 of 160,000 weights of a model.
MODEL = {**cases.SMALL, "vocab_size": 68, "intermediate_size": 1040}
SEQUENCES = 4


def train(rank: int, world_size: int, **settings: Any) -> dict[str, Any]:
    built = meta.build(AutoConfig.for_model("llama", **MODEL))
    spec = EngineSpec("bf16", 64, built.traits.plain_head, **settings)
    topology = Topology(rank, world_size, rank, world_size, 0, 1, "cpu", 1, ())
    kind: type[Engine] = SingleGpuEngine if world_size == 1 else FsdpEngine
    engine = kind.build(built.model, spec, topology)
    initialize.initialize(engine, built.fills, cases.SEED)
    engine.ready()
    losses = []
    for step in range(cases.FAR):
        mine = [cases.micro_batch(sequence) for sequence in cases.documents(step)[rank:SEQUENCES:world_size]]
        batches: list[MicroBatch | None] = [*mine]
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches):
            total += float(engine.backward(batch, 1 / 100, last=number == len(batches) - 1))
        dist.all_reduce(total)
        losses.append(float(total))
        engine.step(cases.LEARNING_RATE, cases.MAX_GRAD_NORM)
    counters = engine.counters()
    names = {part.name for part in engine.parts()}
    engine.close()
    return {
        "losses": losses, "names": sorted(names), "wire_bytes": counters.wire_bytes, "numel": built.numel,
        "gathered_bytes": counters.gathered_bytes, "weights_bytes": counters.weights_bytes,
    }  # fmt: skip


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    variants: dict[str, dict[str, Any]] = {
        "bf16": {"fp8": False}, "fp8": {}, "compiled": {"compile": "layers"},
        "recomputed": {"gradient_checkpointing": "full"}, "kept whole": {"unsharded": Unsharded(True, True)},
    }  # fmt: skip
    told = {name: train(rank, world_size, **{"fp8": True, **settings}) for name, settings in variants.items()}
    (folder / f"{world_size}-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    as_ranks(work)
