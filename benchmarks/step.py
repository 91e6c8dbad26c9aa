"""Measure optimizer steps of aliquot, plain FSDP2 and HF Trainer with DeepSpeed ZeRO-3 on two ranks of this machine.

python benchmarks/step.py --json step.json [--shapes 125m,500m] [--precision auto] [--rounds 2] [--steps 3]

Every contestant is a new pair of processes, and rounds alternate between contestants. Figures are medians of all steps
but the first ones. MFU counts 6 x matmul parameters (without the input embedding) x tokens, and causal attention over
true document lengths. Its ceiling is a plain matmul in the same precision (the best of square and model shapes) on both
ranks at once, measured before and after the steps. Precision `auto` is what `train.precision: auto` chooses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.contestants import (
    PRECISIONS,
    Work,
    aliquot_steps,
    chosen_precision,
    deepspeed_seconds,
    fsdp2_steps,
    matmul_rate,
    quiet,
    sent_bytes,
)
from benchmarks.layouts import LLAMA_125M, LLAMA_500M, llama_config
from benchmarks.report import Row, Target, finish, target
from benchmarks.worlds import Measured, run_world, tell

if TYPE_CHECKING:
    from aliquot.distributed.topology import Topology

RANKS = 2
SHAPES = {"125m": LLAMA_125M, "500m": LLAMA_500M, "tiny": smoke.TINY}
FULL, PACKED, PACKED_LONG = Work(512, 4), Work(512, 4, 65), Work(2048, 1, 65)
WORKS = {"full 512 x 4": FULL, "packed 512 x 4": PACKED, "packed 2048 x 1": PACKED_LONG}
# name -> (who, work, tuned as aliquot is: preloaded allocator, one core per rank)
CONTESTANTS = {
    "host, packed 512 x 4": ("host", "packed 512 x 4", True),
    "host, packed 2048 x 1": ("host", "packed 2048 x 1", True),
    "host, packed 2048 x 1, not compiled": ("host-eager", "packed 2048 x 1", True),
    "host": ("host", "full 512 x 4", True),
    "host, collectives off": ("alone", "full 512 x 4", True),
    "fsdp": ("fsdp", "full 512 x 4", True),
    "plain FSDP2": ("fsdp2", "full 512 x 4", False),
    "plain FSDP2, tuned": ("fsdp2", "full 512 x 4", True),
    "DeepSpeed ZeRO-3": ("deepspeed", "full 512 x 4", False),
    "DeepSpeed ZeRO-3, tuned": ("deepspeed", "full 512 x 4", True),
}
PACKED_ROWS = ("host, packed 512 x 4", "host, packed 2048 x 1")
ALONE = "host, collectives off"
SMOKE_CONTESTANTS = ("host, packed 2048 x 1", ALONE, "fsdp", "plain FSDP2, tuned", "DeepSpeed ZeRO-3, tuned")
PEERS = [name for name, (who, _, _) in CONTESTANTS.items() if who in ("fsdp2", "deepspeed")]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--shapes", default="125m,500m")
    arguments.add_argument("--precision", choices=PRECISIONS, default="auto")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--only", help="contestants, separated by semicolons")
    arguments.add_argument("--steps", type=int, default=3)
    given = smoke.parse(arguments, shapes="tiny", rounds=1, steps=1, only=";".join(SMOKE_CONTESTANTS))
    if given.only:
        for name in set(CONTESTANTS) - set(given.only.split(";")):
            del CONTESTANTS[name]
    precision = chosen_precision(given.precision)
    rows: list[Row] = []
    targets = []
    for shape in given.shapes.split(","):
        found = measure(shape, precision, given.rounds, given.steps)
        rows += [row(shape, name, runs) | {"precision": precision} for name, runs in found.items()]
        targets += targets_of(shape, {r["who"]: r for r in rows if r["shape"] == shape})
    finish("optimizer steps on two ranks", rows, targets, given.json)


def measure(shape: str, precision: str, rounds: int, steps: int) -> dict[str, list[list[Measured]]]:
    from aliquot.machine.allocator import allocator_environment

    taken: dict[str, list[list[Measured]]] = defaultdict(list)
    preload = allocator_environment(os.environ).get("LD_PRELOAD", "")
    for _ in range(rounds):
        for name, (_, _, tuned) in CONTESTANTS.items():
            environ = {"LD_PRELOAD": preload} if tuned else {}
            options = (shape, precision, name, str(steps))
            taken[name].append(run_world(__file__, RANKS, *options, timeout_s=1500, environ=environ))
            first = taken[name][-1][0]
            print(shape, name, first.get("failed") or [round(s, 2) for s in first["seconds"]], flush=True)
    return taken


def row(shape: str, name: str, runs: list[list[Measured]]) -> Row:
    failed = [ranks[0]["failed"] for ranks in runs if "failed" in ranks[0]]
    if failed:
        return {"shape": shape, "who": name, "tokens_per_s": None, "mfu": None, "note": failed[0]}
    work = WORKS[CONTESTANTS[name][1]]
    seconds = [max(pair) for ranks in runs for pair in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    tokens = work.tokens * work.rows * RANKS
    rates = [
        sum(rank["flops"] for rank in ranks) / statistics.median(ranks[0]["seconds"])
        / sum(rank["matmul_rate"] for rank in ranks)
        for ranks in runs
    ]  # fmt: skip
    return {
        "shape": shape,
        "who": name,
        "tokens_per_s": tokens / statistics.median(seconds),
        "mfu": statistics.median(rates),
        "loopback_mb": statistics.median(ranks[0]["loopback_bytes"] for ranks in runs) / 1e6,
        "peak_rss_gb": max(rank["peak_rss_bytes"] for ranks in runs for rank in ranks) / 1e9,
        "matmul_gflops": sum(rank["matmul_rate"] for rank in runs[0]) / 1e9,
    }


def targets_of(shape: str, rows: dict[str, Row]) -> list[Target]:
    def speed(name: str) -> float | None:
        value: float | None = rows[name]["tokens_per_s"] if name in rows else None
        return value

    def why(*names: str) -> str | None:
        """Return the failures of contestants as the reason for a missing value."""
        died = [f"{name}: {rows[name]['note']}" for name in names if name in rows and "note" in rows[name]]
        return "; ".join(died) or None

    packed = [rows[name]["mfu"] if name in rows else None for name in PACKED_ROWS]
    peers = [rate for name in PEERS if (rate := speed(name)) is not None]
    ours, alone = speed("host"), speed(ALONE)
    found: list[Target] = [
        target(
            f"mfu_{shape}",
            max(filter(None, packed), default=None),
            0.85 if shape == "125m" else 0.93,
            "higher",
            why(*PACKED_ROWS),
        ),
        target(f"speedup_{shape}", ours / max(peers) if ours and peers else None, 2.0, "higher", why("host", *PEERS)),
        target(f"of_ceiling_{shape}", ours / alone if ours and alone else None, 0.98, "higher", why("host", ALONE)),
    ]
    if shape == "125m" and "host" in rows:
        found.append(target("loopback_mb", rows["host"].get("loopback_mb"), 1, "lower"))
    return found


def rank() -> None:
    shape, precision, name, steps = sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
    who, work_name, tuned = CONTESTANTS[name]
    numbers, work = SHAPES[shape], WORKS[work_name]
    config = llama_config(numbers)
    quiet()
    import torch.distributed as dist

    from aliquot.machine.memory import peak_rss

    topology = tuned_topology(tuned)
    number = topology.rank
    hidden, mlp = numbers["hidden_size"], numbers["intermediate_size"]
    shapes = [(1536, 1536, 1536), (work.tokens, hidden, mlp), (work.tokens, mlp, hidden)]

    def ceiling() -> float:
        dist.barrier()
        return matmul_rate(shapes, precision=precision)

    before = ceiling()
    warm = 3 if who in ("host", "alone") else 1  # compilation, and changing shapes
    ends = []
    sent = []

    def between(_step: int) -> None:
        ends.append(time.perf_counter())
        sent.append(sent_bytes())

    if who == "deepspeed":
        deepspeed_seconds(config, lambda _: (work.tokens, work.tokens), work.rows, warm + steps, between, precision)
    else:
        if who == "fsdp2":
            making = fsdp2_steps(config, work, precision)
        else:
            engine = "fsdp" if who == "fsdp" else "host"
            if who == "alone":
                topology = without_the_other(topology)
            settings = {"compile": "layers"} if who in ("host", "alone") else {"collectives": "shared_memory"}
            making = aliquot_steps(engine, config, work, topology, settings, precision)  # type: ignore[arg-type]
        for step in range(warm + steps):
            next(making)
            between(step)
    seconds = [b - a for a, b in pairwise(ends)][warm - 1 :]
    moved = [b - a for a, b in pairwise(sent)][warm - 1 :]
    peak = peak_rss()
    tell(
        {
            "seconds": seconds,
            "flops": step_flops(numbers, work, number, warm),
            "matmul_rate": (before + ceiling()) / 2,
            "loopback_bytes": statistics.median(moved),
            "peak_rss_bytes": peak,
        }
    )
    os._exit(0)  # threads of peers would abort at exit


def tuned_topology(tuned: bool) -> Topology:
    """Join the other rank; with `tuned`, on cores of its own."""
    import torch
    import torch.distributed as dist

    from aliquot.distributed.topology import Topology

    number = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    own = tuple(cores[number::RANKS]) if tuned else ()
    if own:
        os.sched_setaffinity(0, own)
    torch.set_num_threads(max(1, len(cores) // RANKS))
    dist.init_process_group("gloo")
    return Topology(number, RANKS, number, RANKS, 0, 1, "cpu", torch.get_num_threads(), own)


def without_the_other(topology: Topology) -> Topology:
    """Leave the other rank: both then train a whole model at the same time."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return replace(topology, rank=0, world_size=1, local_rank=0, local_world_size=1)


def step_flops(numbers: dict[str, Any], work: Work, rank_number: int, step: int, ranks: int = RANKS) -> int:
    """Return the FLOPs of one rank's micro-batches of one step."""
    from aliquot.observe.throughput import model_flops

    hidden, mlp = numbers["hidden_size"], numbers["intermediate_size"]
    key = numbers["num_key_value_heads"] * numbers["head_dim"]
    query = numbers["num_attention_heads"] * numbers["head_dim"]
    layer = 2 * hidden * query + 2 * hidden * key + 3 * hidden * mlp
    parameters = numbers["num_hidden_layers"] * layer + hidden * numbers["vocab_size"]
    edges = [work.edges((step * work.rows + row) * ranks + rank_number) for row in range(work.rows)]
    lengths = [b - a for of_row in edges for a, b in pairwise(of_row)]
    return model_flops(6 * parameters, work.tokens * work.rows, lengths, {None: numbers["num_hidden_layers"] * query})


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
