"""A rank trains on rows with all kinds of documents: how many shapes of attention's products does it meet, and when?"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from aliquot.engines.base import EngineSpec
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.host.host_engine import HostEngine
from aliquot.launch.topology import Topology
from aliquot.models import initialize, meta
from tests.engines.cases import SMALL, micro_batch
from tests.processes import as_ranks

# Of equal length, the first with a document that is cut into blocks.
ROWS = ([300, 84], [64] * 6, [128] * 3, [384], [150, 100, 90, 44], [20] * 19 + [4], [250, 134])


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    seen: set[object] = set()
    multiply = torch.bmm

    def watched(left: Tensor, right: Tensor) -> Tensor:
        seen.add((left.shape, right.shape, left.stride(-1) == 1, right.stride(-1) == 1))
        return multiply(left, right)

    torch.bmm = watched  # type: ignore[assignment]
    built = meta.build(AutoConfig.for_model("llama", **{**SMALL, "max_position_embeddings": 384}))
    spec = EngineSpec("bf16", 384, built.traits.plain_head, gradient_checkpointing=arguments[1])  # type: ignore[arg-type]
    kind = {"host": HostEngine, "fsdp": FsdpEngine}[arguments[0]]
    engine = kind.build(built.model, spec, Topology(rank, world_size, rank, world_size, 0, 1, "cpu", 1, ()))
    initialize.initialize(engine, built.fills, 1)
    engine.ready()
    counts = []
    for lengths in ROWS:
        engine.backward(micro_batch([torch.arange(length) % 60 for length in lengths]), 1 / 384, last=True)
        engine.step(1e-3, 1.0)
        counts.append(len(seen))
    engine.close()
    (folder / f"{rank}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    as_ranks(work)
