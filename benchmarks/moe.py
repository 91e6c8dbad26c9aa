"""Measure steps of a mixture of experts on two ranks: aliquot, plain FSDP2, HF Trainer with DeepSpeed ZeRO-3.

python benchmarks/moe.py --json moe.json [--shapes top4of32,top8of128] [--layers 10] [--rounds 2] [--steps 3]
                         [--precision fp32] [--no-plan] [--only CONTESTANT;...]

The models resemble Qwen3-MoE, have 500 M parameters or more, and train on a packed row of 2,048 tokens per rank and
step, or on four rows. FLOP/s count active parameters only. The ceiling of `moe_mfu` is a plain product of the experts'
shapes on all ranks at once, in the same run. `moe_layer` compares the experts of one layer on one core with each
implementation of transformers for CPU. `batched_mm` copies a matrix per token, and is left out if that takes more than
8 GB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.contestants import Work, aliquot_steps, deepspeed_seconds, fsdp2_steps, matmul_rate, quiet
from benchmarks.report import Row, finish, target
from benchmarks.worlds import run_world, tell

RANKS, TOKENS = 2, smoke.choose(2048, 256)
PACKED, FOUR_ROWS, FULL = Work(TOKENS, 1, 300), Work(TOKENS, 4, 300), Work(TOKENS, 1)
COMMON = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 32000, "max_position_embeddings": 8192, "norm_topk_prob": True, "intermediate_size": 2048,
}  # fmt: skip
SHAPES = {
    "top4of32": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
    "top8of128": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 192},
}
if smoke.SMOKE:
    COMMON |= {"hidden_size": 64, "head_dim": 8, "vocab_size": 512, "intermediate_size": 128}
    SHAPES = {"top4of32": {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32}}
CONTESTANTS = {
    "host": PACKED, "host, four rows": FOUR_ROWS, "host, not compiled": PACKED, "plain FSDP2, tuned": FULL,
    "DeepSpeed ZeRO-3, tuned": FULL, "host, full sequences": FULL,
}  # fmt: skip
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shapes", default=",".join(SHAPES))
    arguments.add_argument("--layers", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    arguments.add_argument("--no-plan", action="store_true")
    arguments.add_argument("--only", help="contestants, separated by semicolons; the layer is then not measured")
    given = smoke.parse(arguments, layers=2, rounds=1, steps=1, precision="fp32")
    rows: list[Row] = []
    targets = []
    for name in set(CONTESTANTS) - set(given.only.split(";")) if given.only else ():
        del CONTESTANTS[name]
    for shape in given.shapes.split(","):
        found = [
            *steps_of(shape, given),
            *([] if given.only else run_world(__file__, 1, "layer", shape, given.precision)),
        ]
        rows += found
        targets += targets_of(shape, {row["who"]: row for row in found if "who" in row}, found[-1])
    if not given.no_plan:
        plan = planned(given)
        rows.append(plan)
        if "failed" not in plan:
            errors = (abs(plan["memory_error"]), abs(plan["time_error"]))
            targets += [
                target("moe_plan_memory", errors[0], 0.05, "lower"),
                target("moe_plan_time", errors[1], 0.10, "lower"),
            ]
    finish(f"a mixture of experts on two ranks, {given.precision}, {given.layers} layers", rows, targets, given.json)


def steps_of(shape: str, given: argparse.Namespace) -> list[Row]:
    from aliquot.machine.allocator import allocator_environment

    taken: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in CONTESTANTS}
    environ = {"LD_PRELOAD": allocator_environment(os.environ).get("LD_PRELOAD", "")}
    for _ in range(given.rounds):
        for name, runs in taken.items():
            words = ("steps", shape, name, str(given.steps), str(given.layers), given.precision)
            runs.append(run_world(__file__, RANKS, *words, timeout_s=1500, environ=environ))
            print(shape, name, runs[-1][0].get("failed") or [round(s, 2) for s in runs[-1][0]["seconds"]], flush=True)
    return [row(shape, name, runs) for name, runs in taken.items()]


def row(shape: str, name: str, runs: list[list[dict[str, Any]]]) -> Row:
    failed = [ranks[0]["failed"] for ranks in runs if "failed" in ranks[0]]
    if failed:
        return {"shape": shape, "who": name, "note": failed[0]}
    seconds = [max(pair) for ranks in runs for pair in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    rates = [
        sum(rank["flops"] for rank in ranks) / statistics.median(ranks[0]["seconds"]) / sum(r["ceiling"] for r in ranks)
        for ranks in runs
    ]
    ratios = [r["peak_pss_bytes"] / r["states_bytes"] for ranks in runs for r in ranks if r["states_bytes"]]
    return {
        "shape": shape,
        "who": name,
        "parameters": runs[0][0]["parameters"],
        "active": runs[0][0]["active"],
        "tokens_per_s": RANKS * TOKENS * CONTESTANTS[name].rows / statistics.median(seconds),
        "mfu": statistics.median(rates),
        "ceiling_gflops": sum(rank["ceiling"] for rank in runs[0]) / 1e9,
        "peak_pss_gb": max(rank["peak_pss_bytes"] for ranks in runs for rank in ranks) / 1e9,
        "pss_ratio": max(ratios, default=None),
    }


def targets_of(shape: str, rows: dict[str, Row], layer: Row) -> list[dict[str, Any]]:
    ours, four = rows.get("host", {}), rows.get("host, four rows", {})
    alike = rows.get("host, full sequences", {}).get("tokens_per_s")
    peers = [speed for name in CONTESTANTS if "tuned" in name and (speed := rows[name].get("tokens_per_s"))]
    best = min((layer[name] for name in IMPLEMENTATIONS if layer.get(name)), default=None)
    return [
        target(f"moe_mfu_{shape}", ours.get("mfu"), 0.60, "higher"),
        target(f"moe_mfu_four_rows_{shape}", four.get("mfu"), 0.70, "higher"),
        target(f"moe_layer_{shape}", best / layer["ours"] if best else None, 2.5, "higher"),
        target(f"moe_speedup_{shape}", alike / max(peers) if alike and peers else None, 4, "higher"),
        target(f"moe_pss_ratio_{shape}", ours.get("pss_ratio"), 1.25, "lower"),
    ]


def planned(given: argparse.Namespace) -> Row:
    """Run the command, and compare it with its plan."""
    from benchmarks.foresight import Case, measured, predicted

    model = {**COMMON, **SHAPES["top4of32"], "num_hidden_layers": max(2, given.layers // 2), "vocab_size": 8192}
    data = smoke.choose({}, {"path": str(smoke.DOCUMENTS)})
    case = Case("qwen3-moe host 2", model, RANKS, "host", 1024, 1, data=data)
    with tempfile.TemporaryDirectory() as scratch:
        prediction, file = predicted(case, Path(scratch), 12, given.precision)
        return prediction | measured(prediction, file)


def rank_steps(shape: str, name: str, steps: int, layers: int, precision: str) -> None:
    from transformers import AutoConfig

    from benchmarks.step import tuned_topology

    quiet()
    config: dict[str, Any] = {**COMMON, **SHAPES[shape], "num_hidden_layers": layers}
    topology = tuned_topology(True)
    import torch.distributed as dist

    from aliquot.machine.memory import memory_use, peak_pss
    from aliquot.models import meta

    built = meta.build(AutoConfig.for_model(**config))

    def ceiling() -> float:
        dist.barrier()
        return matmul_rate(expert_products(config), precision=precision)

    before, warm, work = ceiling(), 2, CONTESTANTS[name]
    ends: list[float] = []

    def between(_step: int) -> None:
        ends.append(time.perf_counter())

    states_bytes = 0
    if name.startswith("DeepSpeed"):
        deepspeed_seconds(config, lambda _: (TOKENS, TOKENS), 1, warm + steps, between, precision)
    else:
        if name.startswith("host"):
            settings = {} if "not compiled" in name else {"compile": "layers"}
            making = aliquot_steps("host", config, work, topology, settings, "bf16" if precision == "bf16" else "fp32")
            # Weight, gradient sum and two moments of each parameter; in bf16, the weight is a shared copy and low half.
            states_bytes = 16 * built.numel // RANKS
        else:
            making = fsdp2_steps(config, work, precision)
        for step in range(warm + steps):
            next(making)
            between(step)
    tell(
        {
            "seconds": [b - a for a, b in pairwise(ends)][warm - 1 :],
            "flops": step_flops(config, work, warm, topology.rank),
            "ceiling": (before + ceiling()) / 2,
            "peak_pss_bytes": peak_pss(memory_use()),
            "states_bytes": states_bytes,
            "parameters": built.numel,
            "active": built.matmul_flops // 6,
        }
    )
    os._exit(0)  # threads of peers would abort at exit


def expert_products(config: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return the shapes of an expert's products, [M, K] x [K, N], if all experts have the same number of tokens."""
    per_expert = TOKENS * config["num_experts_per_tok"] // config["num_experts"]
    width, inner = config["hidden_size"], config["moe_intermediate_size"]
    return [(per_expert, width, 2 * inner), (per_expert, inner, width)]


def step_flops(config: dict[str, Any], work: Work, step: int, rank: int) -> int:
    """Return the FLOPs of one rank's step, as `aliquot_steps` draws its documents."""
    from transformers import AutoConfig

    from aliquot.models import meta
    from aliquot.models.meta import attention_widths
    from aliquot.observe.throughput import model_flops

    built = meta.build(AutoConfig.for_model(**config))
    edges = [work.edges((step * work.rows + row) * RANKS + rank) for row in range(work.rows)]
    lengths = [b - a for of_row in edges for a, b in pairwise(of_row)]
    return model_flops(
        built.matmul_flops, work.tokens * work.rows, lengths, attention_widths(AutoConfig.for_model(**config))
    )


def rank_layer(shape: str, precision: str) -> None:
    """Return seconds of forward and backward of one layer's experts on one core; implementations alternate."""
    import torch
    from transformers import AutoConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from aliquot.nn.experts.sorted_experts import IMPLEMENTATION, register

    quiet()
    torch.set_num_threads(1)
    register()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config = AutoConfig.for_model(**COMMON, **SHAPES[shape])
    experts: Any = Qwen3MoeExperts(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.05, generator=generator)
    chosen = torch.rand(TOKENS, config.num_experts, generator=generator).topk(config.num_experts_per_tok).indices
    scores = torch.rand(chosen.shape, generator=generator).to(dtype).requires_grad_()
    hidden = torch.randn(TOKENS, config.hidden_size, generator=generator).to(dtype).requires_grad_()
    copied = chosen.numel() * 3 * config.hidden_size * config.moe_intermediate_size * dtype.itemsize
    names = [name for name in IMPLEMENTATIONS if name != "batched_mm" or copied < 8e9]
    taken: dict[str, list[float]] = {name: [] for name in (*names, IMPLEMENTATION)}
    for _ in range(4):
        for name, seconds in taken.items():
            config._experts_implementation = name
            began = time.perf_counter()
            experts(hidden, chosen, scores).sum().backward()
            seconds.append(time.perf_counter() - began)
            experts.zero_grad()
    found = {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}
    tell({"shape": f"{shape}, a layer, seconds", "ours": found.pop(IMPLEMENTATION), **found})


if __name__ == "__main__":
    if "--rank" not in sys.argv:
        main()
    elif sys.argv[2] == "layer":
        rank_layer(sys.argv[3], sys.argv[4])
    else:
        rank_steps(sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]), sys.argv[7])
