"""A rank of engine fsdp or host among others that share one GPU, over gloo: NCCL refuses two ranks on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig

from aliquot.distributed.topology import Topology
from aliquot.engines.base import Engine, EngineSpec
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.host.host_engine import HostEngine
from aliquot.models import initialize, meta
from tests.engines import cases


def work(rank: int, world_size: int, folder: Path, device: str, engine_name: str) -> None:
    """Losses and norms of a few steps, the same at any world size."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo" if device == "cuda" else "gloo", init_method=f"file://{folder}/meet-{world_size}",
        rank=rank, world_size=world_size,
    )  # fmt: skip
    layers = 5 if engine_name == "host" else 2  # of engine host, all are copied into three slots for each use
    built = meta.build(AutoConfig.for_model("llama", **{**cases.SMALL, "num_hidden_layers": layers}))
    replicates = engine_name == "replicas"  # of engine fsdp: each rank is a node
    spec = EngineSpec("fp32", 64, built.traits.plain_head, copies_weights=True, copied_layers=5, replicates=replicates)
    nodes = world_size if replicates else 1
    local_rank, node = (0, rank) if replicates else (rank, 0)
    topology = Topology(rank, world_size, local_rank, world_size // nodes, node, nodes, device, 1, ())  # type: ignore[arg-type]
    kind: type[Engine] = HostEngine if engine_name == "host" else FsdpEngine
    engine = kind.build(built.model, spec, topology)
    initialize.initialize(engine, built.fills, cases.SEED)
    engine.ready()
    told = []
    for step in range(cases.STEPS):
        sequences = cases.documents(step)[:4]
        mine = sequences[rank::world_size]
        total = torch.zeros((), dtype=torch.float64)
        for i, sequence in enumerate(mine):
            summed = engine.backward(cases.micro_batch(sequence), 1 / cases.predicted(sequences), i == len(mine) - 1)
            total += float(summed)
        dist.all_reduce(total)
        told += [float(total), engine.step(cases.LEARNING_RATE, cases.MAX_GRAD_NORM)]
    (folder / f"{world_size}-{rank}.json").write_text(json.dumps(told))
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
