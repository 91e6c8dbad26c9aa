"""Measure the effect of bf16 gradients between hosts on the loss: the same fine-tuning with fp32 and bf16.

python benchmarks/reduce_dtype.py --model DIRECTORY --text FILE --json reduce_dtype.json
                                                                  needs root: network namespaces

Two hosts with one rank each train on packed sequences of 256 tokens, four per rank and step. Rows have the evaluation
loss after --steps steps on a held-out twentieth of the paragraphs. Differences compare runs of the same seed, which see
the same batches. Two controls show what a difference means: the distance between seeds, and, with --nudged, the effect
of a learning rate that is higher by a millionth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.multinode.namespaces import INTERFACE, Host, switched_hosts, why_not

from benchmarks import smoke
from benchmarks.report import Row, finish, target
from benchmarks.runs import metrics_of

RATE = 3e-4
# shard.reduce_dtype, learning rate
KINDS = {"fp32": ("fp32", RATE), "bf16": ("bf16", RATE), "fp32, nudged": ("fp32", RATE * (1 + 1e-6))}
MICRO_BATCHES = 4


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, required=not smoke.SMOKE)
    arguments.add_argument("--text", type=Path, required=not smoke.SMOKE)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="precision of the computation")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--nudged", action="store_true", help="run the control, too: half as many runs more")
    given = smoke.parse(arguments, model=smoke.model, text=smoke.text, steps=4, precision="fp32", seeds=[0])
    if (reason := why_not()) is not None:
        sys.exit(reason)
    losses: dict[str, list[float]] = {kind: [] for kind in KINDS if given.nudged or "nudged" not in kind}
    with switched_hosts(2) as hosts:
        for seed in given.seeds:
            for kind, found in losses.items():
                found.append(run(given, hosts, *KINDS[kind], seed))
                print(seed, kind, found[-1], flush=True)
    rows: list[Row] = [
        {
            "shard.reduce_dtype": kind,
            "evaluation loss, each seed": ", ".join(f"{loss:.4f}" for loss in found),
            "mean": f"{statistics.mean(found):.4f}",
            "between seeds": f"{max(found) - min(found):.4f}",
        }
        for kind, found in losses.items()
    ]
    between_seeds = max(max(found) - min(found) for found in losses.values())
    targets = []
    for kind, found in list(losses.items())[1:]:
        differences = [loss - exact for loss, exact in zip(found, losses["fp32"], strict=True)]
        print(f"{kind} less fp32, each seed:", ", ".join(f"{difference:+.6f}" for difference in differences))
        if kind == "bf16" and len(given.seeds) > 1:
            worst = max(abs(difference) for difference in differences)
            targets.append(target("reduced_over_exact_of_seeds", worst / between_seeds, 1.0, "lower"))
    finish(f"gradients between hosts, {given.steps} steps", rows, targets, given.json)


def run(given: argparse.Namespace, hosts: list[Host], dtype: str, rate: float, seed: int) -> float:
    lines = metrics_of(
        seed,
        nodes=[host.command() for host in hosts],
        environ={"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))},
        model={"path": str(given.model.absolute())},
        data={"path": str(given.text.absolute()), "document": "block", "eval_fraction": 0.05, "sequence_length": 256},
        train={
            "max_steps": given.steps, "global_batch_size": 2 * MICRO_BATCHES, "per_device_train_batch_size": 1,
            "learning_rate": rate, "warmup_steps": min(20, given.steps // 2), "lr_scheduler_type": "cosine",
            "weight_decay": 0.1, "adam_beta2": 0.95, "precision": given.precision, "logging_steps": given.steps,
        },
        shard={"engine": "host", "reduce_dtype": dtype},
        launch={"ranks": 1, "nodes": 2, "master_address": hosts[0].address, "master_port": 29521, "device": "cpu"},
    )  # fmt: skip
    return float(next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line))


if __name__ == "__main__":
    main()
