"""The tables of docs/guides/one-gpu.md: what trains on one GPU with engine host, as plans say.

python -m tests.tools.docs_gpus
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from aliquot.config.adapter_section import AdapterSection
from aliquot.planner.automatic_settings import with_settings
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import GIB, Machine
from tests.tools.docs_large_models import MODELS, plan_on, planned_config
from tests.tools.docs_pages import ROOT, write_table

GPU_GB = (8, 12, 16, 24, 48, 80)
KINDS = {"all weights": None, "LoRA": AdapterSection(), "LoRA, nf4": AdapterSection(base="nf4")}


def main() -> None:
    tables = {"docs_gpus": fitting(), "docs_gpus predictions": predictions()}
    for (name, table), docs in product(tables.items(), (ROOT / "docs", ROOT / "docs" / "ko")):
        write_table(docs / "guides" / "one-gpu.md", name, table)


def consumer(gpu_gb: int, host_gib: int) -> Machine:
    """A machine of 16 cores with one GeForce RTX 4090, or with a GPU that has another amount of memory."""
    machine = replace(Machine.from_numbers(host_gib, 16, None), gpus=1, gpu_name="NVIDIA GeForce RTX 4090")
    return replace(machine, gpu_memory_bytes=int(0.98 * gpu_gb * GIB))  # the rest belongs to the driver


def fitting() -> str:
    rows = [f"| model | trained | host memory | {' | '.join(f'{gb} GB' for gb in GPU_GB)} |", "|--" * 9 + "|"]
    for name, kind in product(MODELS, KINDS):
        plans = [planned(name, kind, consumer(gb, 4096), "none", per_device_train_batch_size=1) for gb in GPU_GB]
        rows.append(f"| {name} | {kind} | {host_gib(plans[-1])} | {' | '.join(map(placement, plans))} |")
    return "\n".join(rows) + "\n"


def predictions() -> str:
    """Plan steps of 131,072 tokens on consumer machines and EC2 types."""
    rows = ["| model | trained | machine | copied layers | GPU | host | disk | tokens/s | bound by |", "|--" * 9 + "|"]
    for name, kind, words, machine, states in (
        ("Llama-3-8B", "all weights", "RTX 4090, 64 GiB", consumer(24, 64), "fp32"),
        ("Llama-3-8B", "all weights", "RTX 4090, 256 GiB", consumer(24, 256), "fp32"),
        ("Qwen3-32B", "all weights", "RTX 4090, 64 GiB", consumer(24, 64), "int8"),
        ("Qwen3-32B", "all weights", "RTX 4090, 256 GiB", consumer(24, 256), "fp32"),
        ("Qwen3-32B", "all weights", "RTX 4090, 640 GiB", consumer(24, 640), "fp32"),
        ("Qwen3-32B", "LoRA", "RTX 4090, 128 GiB", consumer(24, 128), "fp32"),
        ("Llama-3-70B", "all weights", "g6e.12xlarge: 4 L40S", Machine.from_instance("g6e.12xlarge"), "int8"),
        ("Llama-3-70B", "LoRA", "g6e.8xlarge: 1 L40S", Machine.from_instance("g6e.8xlarge"), "fp32"),
        ("Llama-3-70B", "LoRA, nf4", "RTX 4090, 64 GiB", consumer(24, 64), "fp32"),
    ):
        plan = planned(
            name, kind, machine, "disk" if kind == "all weights" else "none", optimizer_states=states,
            per_device_train_batch_size="auto", gradient_checkpointing="auto",
        )  # fmt: skip
        cells = [
            f"{plan.copied_layers} of {MODELS[name]['num_hidden_layers']}",
            f"{plan.peak_bytes_per_rank / GIB:.0f} GiB", host_gib(plan),
            f"{plan.scratch_bytes_per_node / 1e9:,.0f} GB", f"{float(f'{plan.tokens_per_s:.2g}'):,.0f}",
            plan.bottleneck.partition("-bound")[0],
        ]  # fmt: skip
        rows.append(f"| {name} | {kind} | {words} | {' | '.join(cells if plan.fits else ['does not fit', *' ' * 5])} |")
    return "\n".join(rows) + "\n"


def placement(plan: Plan) -> str:
    return "no" if not plan.fits else f"{plan.copied_layers} copied" if plan.copied_layers else "resident"


def host_gib(plan: Plan) -> str:
    return f"{plan.host_peak_bytes_per_rank * plan.ranks_per_node / GIB:,.0f} GiB"


def planned(name: str, kind: str, machine: Machine, offload: str, **train: object) -> Plan:
    config = planned_config(MODELS[name], offload, precision="bf16", global_batch_size=64, **train)
    changes = {"launch.device": "cuda", "launch.ranks": "auto", "data.sequence_length": 2048, "checkpoint.every": 0}
    return plan_on(with_settings(config, changes).model_copy(update={"adapter": KINDS[kind]}), machine)


if __name__ == "__main__":
    main()
