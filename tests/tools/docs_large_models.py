"""The tables of docs/guides/large-models.md and adapters.md: what trains on how much memory, as plans say.

python -m tests.tools.docs_large_models
"""

from __future__ import annotations

from typing import Any

from aliquot.config.adapter_section import AdapterSection
from aliquot.config.read_config import validate
from aliquot.config.schema import RunConfig
from aliquot.data.workload import Workload
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from tests.tools.docs_pages import ROOT, write_table

PAGE = ROOT / "docs" / "guides" / "large-models.md"


def llama(layers: int, hidden: int, intermediate: int, heads: int, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 8192, "tie_word_embeddings": tied,
    }  # fmt: skip


def qwen3(layers: int, intermediate: int, heads: int) -> dict[str, Any]:
    model = llama(layers, 5120, intermediate, heads)
    return {**model, "model_type": "qwen3", "vocab_size": 151936}


MODELS = {
    "Llama-3.2-1B": {**llama(16, 2048, 8192, 32, tied=True), "head_dim": 64},
    "Llama-3.2-3B": llama(28, 3072, 8192, 24, tied=True),
    "Llama-3-8B": llama(32, 4096, 14336, 32),
    "Qwen3-14B": qwen3(40, 17408, 40),
    "Qwen3-32B": qwen3(64, 25600, 64),
    "Llama-3-70B": llama(80, 8192, 28672, 64),
}
GIB = (24, 48, 96, 192, 512)
QWEN3_MOE = {
    **llama(48, 2048, 6144, 32), "model_type": "qwen3_moe", "num_key_value_heads": 4, "vocab_size": 151936,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
ADAPTED = {"Llama-3-8B": 16, "Qwen3-30B-A3B": 32, "Llama-3-70B": 64}  # GiB


def main() -> None:
    write_table(PAGE, "docs_large_models", table())
    write_table(PAGE.with_name("adapters.md"), "docs_large_models", adapters())


def adapters() -> str:
    """Plan LoRA on bases of 16, 8 and 4 bits: two ranks, four sequences of 1,024 tokens each, full recomputation."""
    rows = ["| model | memory | bf16 | int8 | nf4 | nf4 on 16 cores | nf4 on 64 cores |", "|--" * 7 + "|"]
    for name, gib in ADAPTED.items():
        cells = [name, f"{gib} GiB"]
        for base, cores in (("bf16", 16), ("int8", 16), ("nf4", 16), ("nf4", 64)):
            config = planned_config(
                (MODELS | {"Qwen3-30B-A3B": QWEN3_MOE})[name], precision="bf16", per_device_train_batch_size=4,
                global_batch_size=16,
            ).model_copy(update={"adapter": AdapterSection.model_validate({"base": base})})  # fmt: skip
            made = plan_on(config, Machine.from_numbers(gib, cores, None, isa="amx"))
            used = (made.peak_bytes_per_rank * made.ranks_per_node + made.beside_bytes) / 2**30
            cells += [f"{used:.0f} GiB" + ("" if made.fits else ": does not fit")] if cores == 16 else []
            cells += [f"{float(f'{made.tokens_per_s:.2g}'):,.0f} tokens/s"] if base == "nf4" else []
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def planned_config(model: dict[str, Any], offload: str = "none", **train: Any) -> RunConfig:
    values = {
        "model": {"config": model},
        "data": {"path": "stdlib", "sequence_length": 1024},
        "train": {"max_steps": 100, "gradient_checkpointing": "full", **train},
        "shard": {"engine": "host", "offload": offload},
        "launch": {"device": "cpu", "ranks": 2},
    }
    return validate(values, {}, "a table")


def table() -> str:
    rows = [f"| | {' | '.join(f'{gib} GiB' for gib in GIB)} |", "|--|" + "--|" * len(GIB)]
    for name, model in MODELS.items():
        for states in ("fp32", "int8"):
            rows.append(f"| {name}, {states} | {' | '.join(cell(model, states, gib) for gib in GIB)} |")
    return "\n".join(rows) + "\n"


def cell(model: dict[str, Any], states: str, gib: int) -> str:
    """Plan two ranks with sequences of 1,024 tokens and full recomputation."""
    made = plan_on(planned_config(model, "disk", optimizer_states=states), Machine.from_numbers(gib, 8, None))
    if not made.fits:
        return "no"
    layers = f", {made.on_disk.layers} layers" if made.on_disk.layers else ""
    return f"{made.scratch_bytes_per_node / 1e9:,.0f} GB{layers}" if made.on_disk else "memory"


def plan_on(
    config: RunConfig, machine: Machine, nodes: int = 1, ranks: int | None = None, approximate: bool = False
) -> Plan:
    """Plan a run, and cache what is planned of its model."""
    key = f"{config.model} {config.adapter}"
    model = _planned[key] = _planned.get(key) or PlannedModel(config)
    return Planner(model, machine).plan(
        config, machine.layout(config, nodes, ranks), Workload.assumed(config), approximate
    )


_planned: dict[str, PlannedModel] = {}


if __name__ == "__main__":
    main()
