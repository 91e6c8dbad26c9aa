"""Train a mixture of experts and a dense model of the same active size from scratch, on the same tokens.

python benchmarks/moe_curve.py [--text FILE] [--tokenizer DIRECTORY] [--steps 600] [--seeds 0 1 2]
                               [--json FILE] [--svg FILE]

Both models have the shape of Qwen3 with four layers. The mixture has a router and 16 experts, each with a quarter of
the dense model's width; a token takes four experts. Both see the same batches. Rows have the loss of a held-out
twentieth of the documents along the training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.report import Row, finish, target
from benchmarks.runs import metrics_of

LENGTH = 256
BATCH, EVALUATIONS = smoke.choose((16, 12), (4, 2))
EXPERTS, CHOSEN, WIDTH = 16, 4, 96
SHAPE = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": LENGTH, "tie_word_embeddings": True, "initializer_range": 0.04,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", "intermediate_size": CHOSEN * WIDTH},
    "mixture": {
        "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True,
        "moe_intermediate_size": WIDTH, "intermediate_size": CHOSEN * WIDTH, "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
    },
}  # fmt: skip
COLOURS = {"dense": "#d9480f", "mixture": "#1864ab"}
Curve = list[tuple[int, float]]  # (step, held-out loss)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--text", default="stdlib", help="a file; default: the source of Python's standard library")
    arguments.add_argument("--tokenizer", type=Path, help="default: 512 pieces, trained on the text")
    arguments.add_argument("--steps", type=int, default=600)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--svg", type=Path)
    given = smoke.parse(arguments, text=lambda: str(smoke.text()), tokenizer=smoke.tokenizer, steps=4, seeds=[0])
    curves: dict[str, list[Curve]] = {name: [] for name in MODELS}
    for seed in given.seeds:
        for name in MODELS:
            curves[name].append(trained(given, name, seed))
            print(seed, name, curves[name][-1][-1], flush=True)
    rows: list[Row] = []
    for i, (step, _) in enumerate(curves["dense"][0]):
        row: Row = {"tokens": step * BATCH * LENGTH}
        for name, found in curves.items():
            row[f"{name}, each seed"] = ", ".join(f"{curve[i][1]:.3f}" for curve in found)
        row["mixture - dense, mean"] = statistics.mean(gaps(curves, i))
        rows.append(row)
    targets = [target("moe_below_dense_worst_seed", max(gaps(curves, -1)), 0.0, "lower")]
    if given.svg is not None:
        given.svg.write_text(picture(curves))
    finish(f"held-out loss, {given.steps} steps of {BATCH} x {LENGTH} tokens", rows, targets, given.json)


def gaps(curves: dict[str, list[Curve]], at: int) -> list[float]:
    """Return mixture minus dense, for each seed."""
    return [a[at][1] - b[at][1] for a, b in zip(curves["mixture"], curves["dense"], strict=True)]


def trained(given: argparse.Namespace, name: str, seed: int) -> Curve:
    data: dict[str, Any] = {"path": given.text, "eval_fraction": 0.05, "sequence_length": LENGTH}
    if given.text != "stdlib":
        data["document"] = "block"
    tokenizer = {"tokenizer_vocab_size": 512} if given.tokenizer is None else {"tokenizer": str(given.tokenizer)}
    lines = metrics_of(
        seed,
        model={"config": {**SHAPE, **MODELS[name]}},
        data=data | tokenizer,
        train={
            "max_steps": given.steps, "global_batch_size": BATCH, "precision": "fp32", "learning_rate": 3e-3,
            "warmup_steps": given.steps // 20, "lr_scheduler_type": "cosine", "weight_decay": 0.1,
            "adam_beta2": 0.95, "logging_steps": given.steps // EVALUATIONS, "eval_steps": given.steps // EVALUATIONS,
        },
        shard={"engine": "host"},
        launch={"device": "cpu"},
    )  # fmt: skip
    return [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]


def picture(curves: dict[str, list[Curve]]) -> str:
    """Draw thin lines for the seeds and thick lines for their means."""
    values = [loss for found in curves.values() for curve in found for _, loss in curve]
    low, high, last = min(values), max(values), curves["dense"][0][-1][0]

    def line(curve: Curve, colour: str, width: float) -> str:
        places = " ".join(
            f"{60 + 700 * step / last:.1f},{40 + 260 * (high - loss) / (high - low):.1f}" for step, loss in curve
        )
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 340" role="img" font-family="sans-serif"'
        ' font-size="13" fill="#1b1f24">',
        "<title>Held-out loss of a mixture of experts and of a dense model of the same active size</title>",
        '<rect width="800" height="340" fill="#ffffff"/>',
        f'<text x="54" y="44" text-anchor="end">{high:.2f}</text>',
        f'<text x="54" y="304" text-anchor="end">{low:.2f}</text>',
        f'<text x="760" y="326" text-anchor="end">{last * BATCH * LENGTH / 1e6:.2g} M tokens</text>',
    ]
    for i, (name, found) in enumerate(curves.items()):
        mean = [(step, statistics.mean(curve[j][1] for curve in found)) for j, (step, _) in enumerate(found[0])]
        parts += [line(curve, COLOURS[name], 0.7) for curve in found] + [line(mean, COLOURS[name], 2.5)]
        parts.append(f'<text x="760" y="{60 + 20 * i}" text-anchor="end" fill="{COLOURS[name]}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
