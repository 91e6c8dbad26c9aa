"""The table of docs/explanation/scale.md: large models on 4 to 256 nodes, as plans say, and what limits them first.

python -m tests.tools.docs_scale
"""

from __future__ import annotations

from typing import Any

from aliquot.config.read_config import validate
from aliquot.config.schema import RunConfig
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine
from tests.tools.docs_large_models import plan_on
from tests.tools.docs_pages import ROOT, write_table
from tests.tools.docs_sizes import digits

PAGE = ROOT / "docs" / "explanation" / "scale.md"
MODELS = ("Meta-Llama-3-8B", "Meta-Llama-3-70B", "Qwen3-235B-A22B")
CPU_RANKS = 8
NODES = ("r7i.48xlarge", "g6e.48xlarge", "p5.48xlarge")
COUNTS = (4, 8, 16, 32, 64, 128, 256)
SHOWN = (4, 16, 64, 256)
SEQUENCES, TOKENS = 2048, 4096  # of an optimizer step, and of a sequence
MUCH = 0.1  # a loss that limits a run


def main() -> None:
    write_table(PAGE, "docs_scale", table())


def table() -> str:
    head = f"| model | nodes | {' | '.join(f'{count} nodes' for count in SHOWN)} | limits first |\n|--|--|"
    return head + "--|" * (len(SHOWN) + 1) + "\n" + "".join(line(name, node) for name in MODELS for node in NODES)


def line(name: str, node: str) -> str:
    plans = {count: planned(name, node, count) for count in COUNTS}
    fitting = {count: plan for count, plan in plans.items() if plan.fits}
    best = max((tokens_per_s(plan) / count for count, plan in fitting.items()), default=1.0)
    cells = [
        f"{digits(tokens_per_s(fitting[count]))} ({tokens_per_s(fitting[count]) / count / best:.0%})"
        if count in fitting
        else "no memory"
        for count in SHOWN
    ]
    engines = " and ".join(dict.fromkeys(plan.engine for plan in fitting.values()))
    return f"| {name} | {node}, {engines or 'none'} | {' | '.join(cells)} | {first_limit(plans)} |\n"


def first_limit(plans: dict[int, Plan]) -> str:
    """What takes a tenth of the time, or more than computation, at the smallest number of nodes that fits."""
    has_fit = False
    for count, plan in plans.items():
        found = [name for name, loss in plan.losses.shares.items() if loss >= MUCH] if plan.fits else []
        if plan.fits and plan.bottleneck.startswith("network"):
            found.insert(0, "network")
        if has_fit and not plan.fits:
            found = ["memory"]
        if found:
            return f"{' and '.join(found)}, from {count} nodes"
        has_fit = has_fit or plan.fits
    return "nothing" if has_fit else "memory"


def tokens_per_s(plan: Plan) -> float:
    return plan.tokens_per_s * plan.losses.goodput


def planned(name: str, node: str, count: int) -> Plan:
    machine = Machine.from_instance(node)
    config = settings(name, "cuda" if machine.gpus else "cpu")
    return plan_on(config, machine, count, machine.gpus or CPU_RANKS, approximate=True)


def settings(name: str, device: str) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"path": name},
        "data": {"path": "stdlib", "sequence_length": TOKENS},
        "train": {
            "max_steps": 1000, "global_batch_size": SEQUENCES, "per_device_train_batch_size": 1,
            "gradient_checkpointing": "full",
        },
        "launch": {"device": device},
    }  # fmt: skip
    return validate(values, {}, "a table")


if __name__ == "__main__":
    main()
