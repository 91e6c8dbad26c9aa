"""What gradients in bf16 between hosts do to the loss: the same fine-tuning with both, several seeds.

python benchmarks/reduce_dtype.py --model DIRECTORY --text FILE --json reduce_dtype.json
                                                                  needs root: network namespaces

Two hosts of one rank, micro-batches of a packed sequence of 256 tokens, four a rank and step. Evaluation loss after
--steps steps, over a twentieth of the paragraphs of --text, which is held out; differences are between runs of one
seed, which sees the same batches with either. To compare with: how far seeds are apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Row, finish, target
from benchmarks.runs import metrics_of
from tests.multinode.namespaces import INTERFACE, Host, two_hosts, why_not

DTYPES = ("fp32", "bf16")
MICRO_BATCHES = 4


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, required=True)
    arguments.add_argument("--text", type=Path, required=True)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of the computation")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(reason)
    losses: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    with two_hosts() as hosts:
        for seed in given.seeds:
            for dtype in DTYPES:
                losses[dtype].append(run(given, hosts, dtype, seed))
                print(seed, dtype, losses[dtype][-1], flush=True)
    differences = [a - b for a, b in zip(losses["bf16"], losses["fp32"], strict=True)]
    rows: list[Row] = [
        {
            "shard.reduce_dtype": dtype,
            "evaluation loss, each seed": ", ".join(f"{loss:.4f}" for loss in found),
            "mean": f"{statistics.mean(found):.4f}",
            "between seeds": f"{max(found) - min(found):.4f}",
        }
        for dtype, found in losses.items()
    ]
    between_seeds = max(max(found) - min(found) for found in losses.values())
    worst = max(abs(difference) for difference in differences)
    targets = []
    if len(given.seeds) > 1:
        targets = [target("reduced_over_exact_of_seeds", worst / between_seeds, 1.0, "lower")]
    print("bf16 less fp32, each seed:", ", ".join(f"{difference:+.6f}" for difference in differences))
    finish(f"gradients between hosts, {given.steps} steps", rows, targets, given.json)


def run(given: argparse.Namespace, hosts: tuple[Host, Host], dtype: str, seed: int) -> float:
    lines = metrics_of(
        seed,
        nodes=[host.command() for host in hosts],
        environ={"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))},
        model={"path": str(given.model.absolute())},
        data={"path": str(given.text.absolute()), "document": "block", "eval_fraction": 0.05, "sequence_length": 256},
        train={
            "max_steps": given.steps, "global_batch_size": 2 * MICRO_BATCHES, "per_device_train_batch_size": 1,
            "learning_rate": 3e-4, "warmup_steps": 20, "lr_scheduler_type": "cosine", "weight_decay": 0.1,
            "adam_beta2": 0.95, "precision": given.precision, "logging_steps": given.steps,
        },
        shard={"engine": "host", "reduce_dtype": dtype},
        launch={"ranks": 1, "nodes": 2, "master_address": hosts[0].address, "master_port": 29521, "device": "cpu"},
    )  # fmt: skip
    return float(next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line))


if __name__ == "__main__":
    main()
