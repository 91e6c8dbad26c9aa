"""A rank trains a model of one layer, then one of many: how much more does it account for, and how much more hold?"""

from __future__ import annotations

import gc
import json
from pathlib import Path

import torch

from aliquot.engines.host.host_engine import HostEngine
from tests.engines.cases import SMALL, llama, micro_batch
from tests.processes import as_ranks

# Layers large enough to see in /proc. The largest tensors are the same in both models: what is held once, whatever the
# model (kernels, buffers, a gradient on its way, the update's scratch), is in both and falls out of the difference.
ONE_LAYER = {**SMALL, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1, "vocab_size": 8000}
MANY_LAYERS = {**ONE_LAYER, "num_hidden_layers": 9}


def train(rank: int, world_size: int, shape: dict[str, object], states: str) -> tuple[int, dict[str, int], int]:
    """Anonymous bytes after two steps, accounted bytes, and parameters of the model.

    Not all private bytes: a page of the shared ring that only this rank has touched so far counts as private.
    """
    engine, numel = llama(HostEngine, shape, rank, world_size, seed=1, precision="bf16", optimizer_states=states)
    for _ in range(2):
        engine.backward(micro_batch([torch.arange(30), torch.arange(20)]), 1 / 50, last=True)
        engine.step(1e-3, 1.0)
    gc.collect()
    measured = anonymous_bytes(), engine.counters().memory(), numel
    engine.close()
    return measured


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    small = train(rank, world_size, ONE_LAYER, arguments[0])
    large = train(rank, world_size, MANY_LAYERS, arguments[0])
    grown = {
        "private": large[0] - small[0],
        "accounted": {name: held - small[1][name] for name, held in large[1].items()},
        "numel": large[2] - small[2],
    }
    (folder / f"{rank}.json").write_text(json.dumps(grown))


if __name__ == "__main__":
    as_ranks(work)
