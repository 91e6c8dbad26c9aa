"""Measure the effect of compressed optimizer states on the loss: the same fine-tuning with fp32, bf16 and int8 states.

python benchmarks/states.py --model DIRECTORY --text FILE --json states.json

Rows have the evaluation loss after --steps steps of two packed sequences of 256 tokens, on a held-out twentieth of the
paragraphs of --text. Differences compare runs of the same seed, which see the same batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.report import Row, finish
from benchmarks.runs import metrics_of

STATES = ("fp32", "bf16", "int8")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", type=Path, required=not smoke.SMOKE)
    arguments.add_argument("--text", type=Path, required=not smoke.SMOKE)
    arguments.add_argument("--steps", type=int, default=500)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = smoke.parse(arguments, model=smoke.model, text=smoke.text, steps=4, seeds=[0])
    losses: dict[str, list[float]] = {states: [] for states in STATES}
    for seed in given.seeds:
        for states in STATES:
            losses[states].append(run(given, states, seed))
            print(seed, states, losses[states][-1], flush=True)
    rows: list[Row] = []
    for states, found in losses.items():
        differences = [a - b for a, b in zip(found, losses["fp32"], strict=True)]
        rows.append(
            {
                "states": states,
                "evaluation loss, each seed": ", ".join(f"{loss:.4f}" for loss in found),
                "mean": f"{statistics.mean(found):.4f}",
                "over fp32, each seed": ", ".join(f"{difference:+.4f}" for difference in differences),
                "over fp32, mean": f"{statistics.mean(differences):+.4f}",
            }
        )
    finish(f"optimizer states, {given.steps} steps", rows, [], given.json)


def run(given: argparse.Namespace, states: str, seed: int) -> float:
    lines = metrics_of(
        seed,
        model={"path": str(given.model)},
        data={"path": str(given.text), "document": "block", "eval_fraction": 0.05, "sequence_length": 256},
        train={
            "max_steps": given.steps, "global_batch_size": 2, "learning_rate": 3e-4,
            "warmup_steps": min(20, given.steps // 2), "lr_scheduler_type": "cosine", "weight_decay": 0.1,
            "adam_beta2": 0.95, "optimizer_states": states, "logging_steps": given.steps,
        },
        shard={"engine": "host"},
        launch={"ranks": 2, "device": "cpu"},
    )  # fmt: skip
    return float(next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line))


if __name__ == "__main__":
    main()
