"""Measure how long each part of a step of engine `host` takes, and what the part costs in MFU.

python benchmarks/breakdown.py --json breakdown.json [--shapes 125m,500m] [--rounds 3] [--steps 2] [--layers 10]

The steps are those of "host, packed 2048 x 1" of step.py, or of "host" of moe.py for its shapes top4of32 and top8of128,
whose number of layers is --layers. torch.profiler records rank 0 of two after the first steps.
Every moment of a step belongs to the innermost event at that moment, so the parts add up to the step. *rest* belongs to
no event: Python, dispatch and views. Rows are medians over --rounds; each round starts new processes.

Times count only while the rank had its core, for the step and for the matmul ceiling, so that other work on the machine
disturbs them less. `on_core` is their share of wall-clock time. MFU is counted for rank 0 as in step.py. `mfu_without`
is the MFU if the part took no time or, for matrix products of layers or head, if the part ran at the ceiling. `alone`
is the rate of plain products of the part's shapes outside a step, relative to the ceiling.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import moe, smoke
from benchmarks.contestants import aliquot_steps, matmul_rate, quiet
from benchmarks.layouts import llama_config
from benchmarks.report import Row, finish, target
from benchmarks.step import PACKED_LONG, RANKS, SHAPES, step_flops, tuned_topology
from benchmarks.worlds import Measured, run_world, tell

WARM = 2
PRODUCTS = ("projections", "mlp", "experts", "head")
REST = "rest"
UNWATCHED = "the same, not profiled"
# Nanoseconds per token outside matrix products on AMD Zen 4, before optimization; the goal is half.
REST_NS = {"125m": 500_000}
# Work of the engine other than computation. Time inside these calls belongs to them.
_WAIT, _STAGE, _SUM, _NORM, _UPDATE, _PUBLISH, _ROUTE = MARKED = (
    "waiting for the other rank", "gradients: staging", "gradients: sum", "gradient norm", "optimizer", "publish",
    "experts: sorting tokens",
)  # fmt: skip
# Operations inside of the experts, by part; other operations are the activation and the scores.
_EXPERTS = {
    "aten::index_select": "experts: gathering rows", "aten::_embedding_bag": "experts: summing results",
    "aten::embedding_bag": "experts: summing results",
}  # fmt: skip
_COPIES = {
    "aten::copy_", "aten::index_select", "aten::index", "aten::cat", "aten::fill_", "aten::zero_", "aten::_to_copy",
    "aten::clone", "aten::_index_put_impl_", "aten::gather",
}  # fmt: skip
# Inductor's range around its generated kernels and the products that it calls.
_FUSED = "## Call CompiledFxGraph"


@dataclass(frozen=True)
class Event:
    name: str
    start: float  # microseconds
    stop: float
    shapes: tuple[tuple[int, ...], ...]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--shapes", default="125m,500m")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=2)
    arguments.add_argument("--layers", type=int, default=10)
    given = smoke.parse(arguments, shapes="tiny", rounds=1, steps=1)
    rows: list[Row] = []
    targets = []
    for shape in given.shapes.split(","):
        found = rows_of(shape, measure(shape, given.rounds, given.steps, given.layers))
        rows += found
        targets.append(target(f"unaccounted_{shape}", found[-1].get("share"), 0.03, "lower"))
        if shape in REST_NS:
            targets.append(target(f"rest_ns_per_token_{shape}", beside_products(found), REST_NS[shape] / 2, "lower"))
    finish("parts of a step of the host engine, rank 0 of two", rows, targets, given.json)


def measure(shape: str, rounds: int, steps: int, layers: int) -> list[Measured]:
    """Return the measurements of rank 0, one per round."""
    from aliquot.machine.allocator import allocator_environment

    taken = []
    environ = {"LD_PRELOAD": allocator_environment(os.environ).get("LD_PRELOAD", "")}
    for _ in range(rounds):
        ranks = run_world(__file__, RANKS, shape, str(steps), str(layers), timeout_s=3000, environ=environ)
        if "failed" in ranks[0]:
            print(shape, ranks[0]["failed"], flush=True)
            continue
        taken.append(ranks[0])
        print(shape, {key: value for key, value in ranks[0].items() if isinstance(value, float)}, flush=True)
    return taken


def rows_of(shape: str, taken: list[Measured]) -> list[Row]:
    """Return one row per part, the longest first and `rest` last: medians over rounds."""
    if not taken:
        return [{"shape": shape, "part": "not measured"}]
    rounds = [{row["part"]: row for row in rows_of_round(of)} for of in taken]
    rows = []
    for part, first in rounds[0].items():
        found = [of[part] for of in rounds if part in of]
        numbers = {column: [row[column] for row in found] for column in first if column != "part"}
        medians = {column: statistics.median(of) if None not in of else None for column, of in numbers.items()}
        rows.append({"shape": shape, "part": part, **medians})
    return rows


def beside_products(rows: list[Row]) -> float | None:
    """Return nanoseconds per token of an unprofiled step, minus the products of layers and head."""
    ms: dict[str, float] = {row["part"]: row["ms"] for row in rows if "ms" in row}
    if UNWATCHED not in ms:
        return None
    products = sum(took for part, took in ms.items() if part.split(",")[0] in PRODUCTS)
    return 1e6 * (ms[UNWATCHED] - products) / PACKED_LONG.tokens


def rows_of_round(of: Measured) -> list[Row]:
    mfu = of["flops"] / of["ran_s"] / of["matmul_rate"]
    whole: Row = {"part": "whole step", "share": 1.0, "ms": 1e3 * of["ran_s"], "of_ceiling": mfu, "alone": None}
    whole |= {"mfu_without": None, "on_core": of["ran_s"] / of["clock_s"]}
    unwatched = {"part": UNWATCHED, "ms": 1e3 * of["unwatched_s"]}
    rows: list[Row] = [whole, unwatched | {"of_ceiling": mfu * of["ran_s"] / of["unwatched_s"]}]
    for part, clock_s in sorted(of["parts"].items(), key=lambda item: (item[0] == REST, -item[1])):
        share = clock_s / of["clock_s"]
        row: Row = {"part": part, "share": share, "ms": 1e3 * share * of["ran_s"], "mfu_without": mfu / (1 - share)}
        if part in of["products"]:
            at_ceiling = of["products"][part] / of["matmul_rate"] / of["ran_s"]
            row |= {"of_ceiling": at_ceiling / share, "alone": of["alone"][part]}
            row["mfu_without"] = mfu / (1 - share + at_ceiling)
        rows.append(row)
    return rows


def rank() -> None:
    shape, steps, layers = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    mixture = shape in moe.SHAPES
    numbers: dict[str, Any] = SHAPES.get(shape, {})
    if mixture:
        numbers = {**moe.COMMON, **moe.SHAPES[shape], "num_hidden_layers": layers}
    config, work = (numbers, moe.PACKED) if mixture else (llama_config(numbers), PACKED_LONG)
    quiet()
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    topology = tuned_topology(tuned=True)
    tokens, hidden, mlp = work.tokens, numbers["hidden_size"], numbers["intermediate_size"]
    mark_engine()

    def ceiling() -> float:
        dist.barrier()
        plain = [(1536, 1536, 1536), (tokens, hidden, mlp), (tokens, mlp, hidden)]
        return matmul_rate(moe.expert_products(numbers) if mixture else plain, clock=time.thread_time)

    before = ceiling()
    making = aliquot_steps("host", config, work, topology, {"compile": "layers"})
    for _ in range(WARM):
        next(making)
    began = time.thread_time()
    for _ in range(steps):
        next(making)
    unwatched_s = time.thread_time() - began
    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) if topology.is_first else nullcontext() as watch
    ):
        began = time.thread_time()
        for _ in range(steps):
            with record_function("step"):
                next(making)
        ran_s = time.thread_time() - began
    rate = (before + ceiling()) / 2
    events = [
        Event(event.name, event.time_range.start, event.time_range.end, tuple(map(tuple, event.input_shapes or ())))
        for event in (watch.events() if watch is not None else ())
    ]
    parts, products = divide(events, Shapes(tokens, hidden, mlp, numbers["vocab_size"]))
    # Both ranks multiply at once, as in the step.
    alone = {name: alone_rate(shapes) / rate for name, shapes in of_first_rank(products).items()}
    numbers_of_steps = range(WARM + steps, WARM + 2 * steps)
    if mixture:
        flops = sum(moe.step_flops(config, work, step, topology.rank) for step in numbers_of_steps)
    else:
        flops = sum(step_flops(numbers, work, topology.rank, step) for step in numbers_of_steps)
    tell(
        {
            "ran_s": ran_s / steps,
            "clock_s": sum(parts.values()) / steps,
            "unwatched_s": unwatched_s / steps,
            "parts": {name: seconds / steps for name, seconds in parts.items()},
            "products": {name: flops_of(shapes) / steps for name, shapes in products.items()},
            "alone": alone,
            "flops": flops / steps,
            "matmul_rate": rate,
        }
    )
    os._exit(0)


def mark_engine() -> None:
    """Name the engine's work other than computation in the profile."""
    from torch.profiler import record_function

    def mark(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def marked(*arguments: Any, **options: Any) -> Any:
            with record_function(name):
                return original(*arguments, **options)

        setattr(owner, method, marked)

    for owner, method, name in marks():
        mark(owner, method, name)


def marks() -> list[tuple[Any, str, str]]:
    """Return the owner and the name of each marked function, and the part of its time."""
    from aliquot.distributed.collectives.peers import Peers
    from aliquot.engines.host import host_engine
    from aliquot.engines.host.gradient_sums import GradientSums
    from aliquot.engines.host.host_gradients import HostGradients
    from aliquot.engines.host.weight_publication import WeightPublication
    from aliquot.nn.experts import sorted_experts
    from aliquot.optim.adamw import BlockedAdamW

    return [
        (Peers, "wait", _WAIT),
        *((HostGradients, method, _STAGE) for method in ("stage", "add_rows", "buffer", "publish", "finish")),
        *((HostGradients, method, _SUM) for method in ("_sum", "_rows_of_owners", "_add_rows")),
        (GradientSums, "squares", _NORM),
        (host_engine, "global_norm", _NORM),
        (BlockedAdamW, "step", _UPDATE),
        (WeightPublication, "mark_updated", _PUBLISH),
        (sorted_experts, "route", _ROUTE),
    ]


@dataclass(frozen=True)
class Shapes:
    """Sizes that identify the matrix products of a step."""

    tokens: int
    hidden: int
    mlp: int
    vocabulary: int

    def part(self, product: tuple[int, int, int], of_head: bool) -> str:
        """Return the part of a product [M, K] x [K, N]. Products of the head may be computed in blocks of columns."""
        if of_head:
            sums_over = {self.hidden: "logits", self.vocabulary: "gradient of hidden"}
            return f"head, {sums_over.get(product[1], 'gradient of weight')}"
        rest = Counter(product)
        rest.subtract([self.tokens])
        return "mlp" if rest[self.mlp] > 0 else "projections"


Products = dict[str, Counter[tuple[int, int, int]]]  # part -> (M, K, N) -> count


def divide(events: list[Event], shapes: Shapes) -> tuple[dict[str, float], Products]:
    """Return the seconds of each part inside ranges named `step`, and the matrix products of each part.

    The time of an event excludes the events inside it.
    """
    parts: dict[str, float] = defaultdict(float)
    products: Products = defaultdict(Counter)
    above: list[tuple[Event, str]] = []  # events that may contain the next one, each with its part
    for event in sorted(events, key=lambda event: (event.start, -event.stop)):
        while above and above[-1][0].stop <= event.start:
            above.pop()
        if not above and event.name != "step":
            continue
        inside = [other.name for other, _ in above]
        part = part_of(event, inside, above[-1][1] if above else REST, shapes)
        seconds = (event.stop - event.start) / 1e6
        parts[part] += seconds
        if above:
            parts[above[-1][1]] -= seconds
        if event.name == "aten::mm" and part.split(",")[0] in PRODUCTS:
            (m, k), (_, n) = event.shapes[:2]
            products[part][m, k, n] += 1
        above.append((event, part))
    return dict(parts), dict(products)


def part_of(event: Event, inside: list[str], outer: str, shapes: Shapes) -> str:
    """Return the part of an event's own time; `inside` has the names of the events around it, outermost first."""
    name = event.name
    if name in MARKED:
        return name
    marked = [other for other in inside if other in MARKED]
    if marked:
        return marked[-1]
    of_experts = any("_SortedExperts" in other for other in [*inside, name])
    if name == "aten::mm":
        (m, k), (_, n) = event.shapes[:2]
        part = shapes.part((m, k, n), any(other.startswith("_HeadLoss") for other in inside))
        part = "experts" if of_experts else part
        direction = "backward" if any("Backward" in other for other in inside) else "forward"
        return part if part.startswith("head") else f"{part}, {direction}"
    if name == "aten::bmm":
        return "attention: products"
    if outer == "attention: products" or outer.split(",")[0] in PRODUCTS:
        return outer  # calls inside a product belong to the product
    if of_experts:
        return next((_EXPERTS[other] for other in [name, *inside] if other in _EXPERTS), "experts: activation, scores")
    if any(other.startswith("_HeadLoss") for other in [*inside, name]):
        return "softmax and loss"
    if any(other.startswith("_Tiled") for other in [*inside, name]):
        return "attention: copies" if name in _COPIES else "attention: softmax and the rest"
    if name.startswith(_FUSED):
        return "elementwise, fused by torch.compile"
    if name in _COPIES:
        return "other copies and casts"
    return "other elementwise" if name.startswith("aten::") and not _only_looks(name) else REST


def _only_looks(name: str) -> bool:
    """Return whether the operation is a view or an allocation, which does not compute values."""
    looks = (
        "view strided slice select transpose permute reshape expand squeeze empty detach resolve alias narrow resize"
    )
    return name in ("aten::t", "aten::to", "aten::mT") or any(word in name for word in looks.split())


def flops_of(products: Counter[tuple[int, int, int]]) -> int:
    return sum(2 * m * k * n * count for (m, k, n), count in products.items())


def alone_rate(products: Counter[tuple[int, int, int]]) -> float:
    """Return FLOP/s of plain products of these shapes, each as often as in a step."""
    seconds = sum(
        count * 2 * m * k * n / matmul_rate([(m, k, n)], 0.1, time.thread_time) for (m, k, n), count in products.items()
    )
    return flops_of(products) / seconds


def of_first_rank(products: Products) -> Products:
    """Return rank 0's products on every rank."""
    from aliquot.distributed.ranks import gather

    told = gather([[name, [[*shape, count] for shape, count in found.items()]] for name, found in products.items()])[0]
    return {name: Counter({(m, k, n): count for m, k, n, count in found}) for name, found in told}


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
