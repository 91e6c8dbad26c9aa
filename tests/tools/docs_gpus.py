"""The tables of docs/guides/one-gpu.md: what trains on one GPU with engine host, as plans say.

python -m tests.tools.docs_gpus
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from aliquot.config.read_config import validate
from aliquot.config.schema import RunConfig
from aliquot.data.workload import Workload
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import GIB, Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from tests.tools.docs_large_models import MODELS
from tests.tools.docs_pages import ROOT, write_table

PAGES = [ROOT / "docs" / "guides" / "one-gpu.md", ROOT / "docs" / "ko" / "guides" / "one-gpu.md"]
GPU_GB = (8, 12, 16, 24, 48, 80)
KINDS: dict[str, dict[str, Any]] = {
    "all weights": {}, "LoRA": {"adapter": {"r": 16}}, "LoRA, nf4": {"adapter": {"r": 16, "base": "nf4"}},
}  # fmt: skip
USABLE = 0.98  # of a card's memory; the rest belongs to the driver


def main() -> None:
    for page in PAGES:
        write_table(page, "docs_gpus", fitting())
        write_table(page, "docs_gpus predictions", predictions())


def consumer(gpu_gb: int, host_gib: int) -> Machine:
    """A machine of 16 cores with one GeForce RTX 4090, or with a GPU that has another amount of memory."""
    gpu_bytes = int(USABLE * gpu_gb * GIB)
    machine = Machine.from_numbers(host_gib, 16, None)
    return replace(machine, gpus=1, gpu_name="NVIDIA GeForce RTX 4090", gpu_memory_bytes=gpu_bytes)


@cache
def fitting() -> str:
    rows = [f"| model | trained | host memory | {' | '.join(f'{gb} GB' for gb in GPU_GB)} |", "|--" * 9 + "|"]
    for name in MODELS:
        for kind in KINDS:
            plans = [planned(name, kind, consumer(gb, 4096), micro=1, offload="none") for gb in GPU_GB]
            host = f"{plans[-1].host_peak_bytes_per_rank / GIB:,.0f} GiB"
            rows.append(f"| {name} | {kind} | {host} | {' | '.join(map(cell, plans))} |")
    return "\n".join(rows) + "\n"


def cell(plan: Plan) -> str:
    if not plan.fits:
        return "no"
    return f"{plan.copied_layers} copied" if plan.copied_layers else "resident"


@cache
def predictions() -> str:
    """Plan steps of 131,072 tokens on consumer machines and EC2 types."""
    l40s, one_l40s = Machine.from_instance("g6e.12xlarge"), Machine.from_instance("g6e.8xlarge")
    cases = [
        ("Llama-3-8B", "all weights", "RTX 4090, 64 GiB", consumer(24, 64), "fp32"),
        ("Llama-3-8B", "all weights", "RTX 4090, 256 GiB", consumer(24, 256), "fp32"),
        ("Qwen3-32B", "all weights", "RTX 4090, 64 GiB", consumer(24, 64), "int8"),
        ("Qwen3-32B", "all weights", "RTX 4090, 256 GiB", consumer(24, 256), "fp32"),
        ("Qwen3-32B", "all weights", "RTX 4090, 640 GiB", consumer(24, 640), "fp32"),
        ("Qwen3-32B", "LoRA", "RTX 4090, 128 GiB", consumer(24, 128), "fp32"),
        ("Llama-3-70B", "all weights", "g6e.12xlarge: 4 L40S, 384 GiB", l40s, "int8"),
        ("Llama-3-70B", "LoRA", "g6e.8xlarge: 1 L40S, 256 GiB", one_l40s, "fp32"),
        ("Llama-3-70B", "LoRA, nf4", "RTX 4090, 64 GiB", consumer(24, 64), "fp32"),
    ]
    rows = ["| model | trained | machine | copied layers | GPU | host | disk | tokens/s | bound by |", "|--" * 9 + "|"]
    for name, kind, words, machine, states in cases:
        offload = "disk" if kind == "all weights" else "none"
        plan = planned(name, kind, machine, micro="auto", offload=offload, states=states)
        copied = f"{plan.copied_layers} of {layers(name)}" if plan.fits else "does not fit"
        host = plan.host_peak_bytes_per_rank * plan.ranks_per_node / GIB
        speed = f"{float(f'{plan.tokens_per_s:.2g}'):,.0f}" if plan.fits else ""
        bound = plan.bottleneck.partition("-bound")[0] if plan.fits else ""
        disk = f"{plan.scratch_bytes_per_node / 1e9:,.0f} GB" if plan.on_disk else ""
        rows.append(
            f"| {name} | {kind} | {words} | {copied} | {plan.peak_bytes_per_rank / GIB:.0f} GiB | {host:,.0f} GiB"
            f" | {disk} | {speed} | {bound} |"
        )
    return "\n".join(rows) + "\n"


def layers(name: str) -> int:
    return int(MODELS[name]["num_hidden_layers"])


def planned(name: str, kind: str, machine: Machine, micro: int | str, offload: str, states: str = "fp32") -> Plan:
    config = settings(name, kind, micro, offload, states)
    workload = Workload.assumed(config)
    return Planner(model(name, kind), machine).plan(config, machine.layout(config), workload)


@cache
def model(name: str, kind: str) -> PlannedModel:
    return PlannedModel(settings(name, kind, 1, "none", "fp32"))


def settings(name: str, kind: str, micro: int | str, offload: str, states: str) -> RunConfig:
    values = {
        "model": {"config": MODELS[name]},
        "data": {"path": "stdlib", "sequence_length": 2048},
        "train": {
            "max_steps": 100, "precision": "bf16", "gradient_checkpointing": "full" if micro == 1 else "auto",
            "global_batch_size": 64, "per_device_train_batch_size": micro, "optimizer_states": states,
        },
        "shard": {"engine": "host", "offload": offload},
        "checkpoint": {"every": 0},
        "launch": {"device": "cuda"},
        **KINDS[kind],
    }  # fmt: skip
    return validate(values, {}, "a table")


if __name__ == "__main__":
    main()
