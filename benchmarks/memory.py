"""Measure the peak memory (PSS) of training on each of two ranks, next to DeepSpeed.

python benchmarks/memory.py --json memory.json

The model has 500 M parameters and two micro-batches of 512 tokens per step; more would not change the peak. Compressed
means int8 moments and bf16 gradient sums. The seconds per step show the cost of selective activation checkpointing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.contestants import Work, aliquot_steps, deepspeed_seconds, quiet
from benchmarks.layouts import LLAMA_500M, llama_config
from benchmarks.report import Row, finish, target
from benchmarks.worlds import PeakPss, run_world, tell

RANKS, STEPS = 2, 2
WORK = Work(512, 2)
MODEL = smoke.choose(LLAMA_500M, smoke.TINY)
SELECTIVE: dict[str, Any] = {"gradient_checkpointing": "selective"}
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "host, exact": ("host", {}),
    "host, exact, selective checkpointing": ("host", SELECTIVE),
    "host, compressed": ("host", {"optimizer_states": "int8"}),
    "host, compressed, selective checkpointing": ("host", {"optimizer_states": "int8", **SELECTIVE}),
    "HF Trainer + DeepSpeed ZeRO-3": ("deepspeed", {}),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    given = smoke.parse(arguments)
    from aliquot.machine.allocator import allocator_environment

    environ = {"LD_PRELOAD": allocator_environment(os.environ).get("LD_PRELOAD", "")}
    rows: list[Row] = []
    for name in CONTESTANTS:
        ranks = run_world(__file__, RANKS, name, environ=environ, timeout_s=1200)
        if "failed" in ranks[0]:
            rows.append({"who": name, "peak_pss_gb": None, "peak_rss_gb": None, "note": ranks[0]["failed"]})
        else:
            worst = {key: max(rank[key] for rank in ranks) / 1e9 for key in ("pss", "rss")}
            step_s = ranks[0]["step_s"]
            rows.append({"who": name, "peak_pss_gb": worst["pss"], "peak_rss_gb": worst["rss"], "step_s": step_s})
        print(rows[-1], flush=True)
    targets = [
        target("pss_500m_exact_gb", rows[1]["peak_pss_gb"], 4.9, "lower"),
        target("pss_500m_frugal_gb", rows[3]["peak_pss_gb"], 3.0, "lower"),
    ]
    finish("peak memory of a rank, 500 M parameters, 2 ranks", rows, targets, given.json)


def rank() -> None:
    who, settings = CONTESTANTS[sys.argv[2]]
    quiet()
    import torch
    import torch.distributed as dist

    from aliquot.distributed.topology import Topology
    from aliquot.machine.memory import peak_rss

    number = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = Topology(number, RANKS, number, RANKS, 0, 1, "cpu", 1, ())
    pss = PeakPss()
    config = llama_config(MODEL)
    ends: list[float] = []
    if who == "deepspeed":
        deepspeed_seconds(
            config, lambda _: (WORK.tokens, WORK.tokens), WORK.rows, STEPS, lambda _: ends.append(time.perf_counter())
        )
    else:
        making = aliquot_steps(who, config, WORK, topology, settings)
        for _ in range(STEPS):
            next(making)
            ends.append(time.perf_counter())
    pss.stop()
    tell({"pss": pss.bytes, "rss": peak_rss(), "step_s": ends[-1] - ends[-2]})
    os._exit(0)


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
