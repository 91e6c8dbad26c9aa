"""Run directories as a training run leaves them, with numbers of our own choosing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from aliquot.observe.ledger import PHASES
from aliquot.observe.run_directory import HEADER

MIB = 1 << 20
MACHINE = {
    "host": "node-1", "kernel": "6.1", "cpu": "Some CPU", "physical_cores": 8, "cpu_quota": None, "numa_nodes": 1,
    "isa": ["avx512_bf16", "avx2"], "matmul_kernels": {"bf16": "brg_matmul:avx512_core_bf16", "fp32": "MKL"},
    "allocator": "tcmalloc", "memory_limit_bytes": 4096 * MIB, "gpus": [], "python": "3.11", "torch": "2.13.0",
    "transformers": "5.23.0",
}  # fmt: skip


def start(**changes: Any) -> dict[str, Any]:
    return {
        "event": "start", "step": 0, "time": 1_700_000_000.0, "resumed_from": None, "model": "LlamaForCausalLM",
        "parameters": 8_000_000, "engine": "host", "placement": "2 ranks x 1 thread", "machine": MACHINE,
        "ceiling_flops_per_s": 1e12, "world_size": 2, "nodes": 1, "total_steps": 100, "aliquot": "0.1.0",
        "command": "aliquot train run.yaml",
        "data": {
            "summary": ["60 documents, 9,000 tokens"],
            "samples": ["example 1: 5 tokens, 2 are learned", "        | hello", "learned > hi"],
        },
        **changes,
    }  # fmt: skip


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": number, "loss": 9 / (1 + number / 20), "learning_rate": 1e-3, "grad_norm": 1.0, "tokens": 1000 * number,
        "epoch": 0.1, "wire_bytes": 0, "staged_bytes": 1_000_000 * number, "moved_bytes": 8_000_000 * number,
        "tokens_per_s": 4000.0, "flops_per_s": 5e11, "mfu": 0.5, "eta_s": 10.0, "data_s": 0.01, "forward_s": 0.3,
        "backward_s": 0.6, "reduce_s": 0.02, "optimizer_s": 0.05, "checkpoint_s": 0.0, "wait_s": 0.02,
        "own_work_s": [0.98, 0.97], "memory_bytes": [500 * MIB, 510 * MIB], **changes,
    }  # fmt: skip


def rows(ranks: int = 2, planned: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank, "phase": phase, "rss_bytes": (400 + 100 * i) * MIB, "private_bytes": 300 * MIB,
            "shared_bytes": 100 * MIB, "pss_bytes": (350 + 100 * i) * MIB, "peak_bytes": (400 + 100 * i) * MIB,
            "accounted_bytes": {"weights": 40 * i * MIB, "gradients": 20 * i * MIB, "moments": 60 * MIB, "gathered": 0},
            **({"planned_bytes": (420 + 90 * i) * MIB} if planned else {}),
        }
        for rank in range(ranks)
        for i, phase in enumerate(PHASES)
    ]  # fmt: skip


def plan() -> dict[str, Any]:
    """As `aliquot plan --json` prints it, of the numbers that the report reads."""
    phases = [
        {"name": phase, "private_bytes": {"weights": (300 + 90 * i) * MIB}, "shared_bytes": {"weights": 200 * MIB}}
        for i, phase in enumerate(PHASES)
    ]
    return {
        "ranks_per_node": 2, "phases": phases, "peak_bytes_per_rank": 1480 * MIB, "tokens_per_s": 5000.0, "step_s": 0.8,
        "wire_bytes_per_step": 0, "local_bytes_per_step": 0, "bottleneck": "compute-bound", "rates": "measured here",
        "limit_bytes": 2048 * MIB,
    }  # fmt: skip


def write_run(
    directory: Path,
    *,
    name: str = "quick",
    steps: list[dict[str, Any]] | None = None,
    events: list[dict[str, Any]] | None = None,
    ledger: list[dict[str, Any]] | None = None,
    plan: dict[str, Any] | None = None,
    tail: str = "",
    **config: Any,
) -> Path:
    """A run directory; `tail` is what lies behind the last whole line of metrics.jsonl."""
    directory.mkdir(parents=True)
    values = {"run": {"name": name, "directory": str(directory)}, "train": {"precision": "bf16"}, **config}
    (directory / "config.yaml").write_text(f"{HEADER}\n{yaml.safe_dump(values, allow_unicode=True)}")
    if steps is not None:
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps) + tail)
    if events is not None:
        (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if ledger is not None:
        (directory / "ledger.json").write_text(json.dumps({"machine": MACHINE, "plan": plan or {}, "rows": ledger}))
    return directory


def whole_run(directory: Path, **changes: Any) -> Path:
    """Complete, resumed once, with an evaluation, checkpoints, a warning and a plan."""
    steps = [step(number) for number in range(1, 101)]
    evaluation = {"step": 100, "eval_loss": 1.6, "eval_perplexity": 4.95, "eval_bits_per_byte": 0.91}
    events = [
        start(),
        {"event": "checkpoint", "step": 40, "time": 1_700_000_050.0, "seconds": 1.5, "stall_s": 0.25},
        start(event="resume", step=40, time=1_700_000_090.0, resumed_from="checkpoints/step-00000040"),
        {"event": "slow_ranks", "step": 70, "time": 1_700_000_110.0, "text": "slow for 20 steps: rank 1"},
        {"event": "end", "step": 100, "time": 1_700_000_150.0},
    ]
    return write_run(
        directory, **{"steps": [*steps, evaluation], "events": events, "ledger": rows(), "plan": plan(), **changes}
    )
