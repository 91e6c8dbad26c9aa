"""The table of README.md: which model trains on which machines, how fast and at what price, as `aliquot plan` says.

python -m tests.tools.docs_sizes
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from aliquot.config.read_config import validate
from aliquot.config.schema import RunConfig
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import GIB, Machine
from tests.tools.docs_large_models import MODELS, plan_on
from tests.tools.docs_pages import ROOT, write_table

TOKENS = 10_000_000


@dataclass(frozen=True)
class Row:
    """A model, the weights to train, and nodes: an EC2 type, or GiB and cores of an own server with AMX."""

    model: str
    trains: str  # all | LoRA
    nodes: int
    node: str | tuple[int, int]

    @property
    def machines(self) -> str:
        name = self.node if isinstance(self.node, str) else f"{self.node[1]}-core server"
        return name if self.nodes == 1 else f"{self.nodes} x {name}"

    @property
    def machine(self) -> Machine:
        if isinstance(self.node, str):
            return Machine.from_instance(self.node)
        return Machine.from_numbers(*self.node, network_gbit=10, isa="amx")


ROWS = (
    Row("Llama-3.2-1B", "all", 1, (64, 32)),
    Row("Llama-3-8B", "LoRA", 1, (64, 32)),
    Row("Llama-3-8B", "LoRA", 1, "g6e.2xlarge"),
    Row("Llama-3-8B", "all", 1, "m7i.24xlarge"),
    Row("Llama-3-70B", "all", 4, "r7i.24xlarge"),
)


def main() -> None:
    write_table(ROOT / "README.md", "docs_sizes", table())


def table() -> str:
    head = "| model | trains | machines | GiB each | tokens/s | 10 M tokens |\n" + "|--" * 6 + "|\n"
    return head + "".join(line(row) for row in ROWS)


def line(row: Row) -> str:
    plan = fastest(row)
    hours = TOKENS / plan.tokens_per_s / 3600
    price = "" if plan.usd_per_hour is None else f", {digits(plan.usd_per_hour * hours)} USD"
    used = (plan.peak_bytes_per_rank * plan.ranks_per_node + plan.beside_bytes) / GIB
    where = " (GPU)" if plan.device == "cuda" else ""
    memory = f"{used:,.0f} of {plan.limit_bytes_per_node / GIB:,.0f}{where}"
    speed, duration = digits(plan.tokens_per_s), f"{digits(hours)} h"
    return f"| {row.model} | {row.trains} | {row.machines} | {memory} | {speed} | {duration}{price} |\n"


def digits(number: float) -> str:
    """Two of them, because the number is an estimate."""
    return f"{float(f'{number:.2g}'):,.3g}" if number < 10 else f"{float(f'{number:.2g}'):,.0f}"


def fastest(row: Row) -> Plan:
    """Of those ranks and micro-batches that fit."""
    fitting = []
    for ranks, micro_batch in product((1, 2, 4, 8), (1, 2, 4)):
        config, machine = settings(row.model, row.trains, micro_batch), row.machine
        if machine.gpus and ranks != machine.gpus:
            continue
        plan = plan_on(config, machine, row.nodes, ranks)
        if plan.fits:
            fitting.append(plan)
    return max(fitting, key=lambda plan: plan.tokens_per_s)


def settings(name: str, trains: str, micro_batch: int) -> RunConfig:
    shape = MODELS[name]
    values: dict[str, Any] = {
        "model": {"config": shape},
        "data": {"path": "stdlib", "sequence_length": 2048},
        "train": {
            "max_steps": 100,
            "global_batch_size": 64,
            "per_device_train_batch_size": micro_batch,
        },
    }
    if trains == "LoRA":  # of a pretrained model, of which a plan reads the shape alone
        directory = Path(tempfile.gettempdir()) / f"docs-sizes-{name}"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(shape))
        values |= {"adapter": {"r": 16}, "model": {"path": str(directory)}}
    return validate(values, {}, "a table")


if __name__ == "__main__":
    main()
