"""Where the time of an optimizer step of the host engine goes, part by part, and what each part costs in MFU.

python benchmarks/breakdown.py --json breakdown.json [--shapes 125m,500m] [--rounds 3] [--steps 2]

The steps are those of "host, packed 2048 x 1" of the step benchmark. torch.profiler watches rank 0 of two after the
first steps; every moment of a step belongs to the innermost thing that was going on in it, so the parts add up to the
whole. *rest* is what belongs to none: Python, dispatch and views. Medians over --rounds, each a new pair of processes.

Times are those in which the rank had its core (`on_core`: how much of the time by the clock), for the step and for the
matmul that is the ceiling: so a machine that is busy with other things disturbs them less. On an idle one they are the
clock's. MFU is counted as in the step benchmark, for rank 0. `mfu_without` is what it would be if the part took no
time, or, for a product of the layers or the head, if that ran at the ceiling. `alone` is the rate, over the ceiling, of
plain products of the part's shapes outside the step.
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

from benchmarks import smoke
from benchmarks.contestants import aliquot_steps, matmul_rate, quiet
from benchmarks.layouts import llama_config
from benchmarks.report import Row, finish, target
from benchmarks.step import PACKED_LONG, RANKS, SHAPES, step_flops, tuned_topology
from benchmarks.worlds import Measured, run_world, tell

WARM = 2
PRODUCTS = ("projections", "mlp", "head")
REST = "rest"
UNWATCHED = "the same, not watched"
# Nanoseconds a token beside matrix products, on AMD Zen 4, before any work was done on them; the goal is half.
REST_NS = {"125m": 500_000}
# What the engine does beside computing: wherever these are called, what happens inside belongs to them.
_WAIT, _STAGE, _SUM, _NORM, _UPDATE, _PUBLISH = (
    "waiting for the other rank", "gradients: staging", "gradients: sum", "gradient norm", "optimizer", "publish"
)  # fmt: skip
_COPIES = {
    "aten::copy_", "aten::index_select", "aten::index", "aten::cat", "aten::fill_", "aten::zero_", "aten::_to_copy",
    "aten::clone", "aten::_index_put_impl_", "aten::gather",
}  # fmt: skip
# Inductor's own range around the kernels that it made and the products that it calls.
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
    given = smoke.parse(arguments, shapes="tiny", rounds=1, steps=1)
    rows: list[Row] = []
    targets = []
    for shape in given.shapes.split(","):
        found = rows_of(shape, measure(shape, given.rounds, given.steps))
        rows += found
        targets.append(target(f"unaccounted_{shape}", found[-1].get("share"), 0.03, "lower"))
        if shape in REST_NS:
            targets.append(target(f"rest_ns_per_token_{shape}", beside_products(found), REST_NS[shape] / 2, "lower"))
    finish("parts of a step of the host engine, rank 0 of two", rows, targets, given.json)


def measure(shape: str, rounds: int, steps: int) -> list[Measured]:
    """What rank 0 measured in each round."""
    from aliquot.machine.allocator import allocator_environment

    taken = []
    environ = {"LD_PRELOAD": allocator_environment(os.environ).get("LD_PRELOAD", "")}
    for _ in range(rounds):
        ranks = run_world(__file__, RANKS, shape, str(steps), timeout_s=3000, environ=environ)
        if "failed" in ranks[0]:
            print(shape, ranks[0]["failed"], flush=True)
            continue
        taken.append(ranks[0])
        print(shape, {key: value for key, value in ranks[0].items() if isinstance(value, float)}, flush=True)
    return taken


def rows_of(shape: str, taken: list[Measured]) -> list[Row]:
    """One row a part, dearest first, `rest` last; medians over rounds."""
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
    """Nanoseconds a token of a step that is not watched, less the products of layers and head."""
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
    shape, steps = sys.argv[2], int(sys.argv[3])
    numbers = SHAPES[shape]
    quiet()
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    topology = tuned_topology(tuned=True)
    tokens, hidden, mlp = PACKED_LONG.tokens, numbers["hidden_size"], numbers["intermediate_size"]
    mark_engine()

    def ceiling() -> float:
        dist.barrier()
        return matmul_rate([(1536, 1536, 1536), (tokens, hidden, mlp), (tokens, mlp, hidden)], clock=time.thread_time)

    before = ceiling()
    making = aliquot_steps("host", llama_config(numbers), PACKED_LONG, topology, {"compile": "layers"})
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
    # Both ranks at once, as in the step.
    alone = {name: alone_rate(shapes) / rate for name, shapes in of_first_rank(products).items()}
    flops = sum(step_flops(numbers, PACKED_LONG, topology.rank, WARM + steps + step) for step in range(steps))
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
    """Name in the profile what the engine does beside computing."""
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
    """Where a function is called, its name, and the part that its time belongs to."""
    from aliquot.distributed.collectives.peers import Peers
    from aliquot.engines.host import host_engine
    from aliquot.engines.host.gradient_sums import GradientSums
    from aliquot.engines.host.host_gradients import HostGradients
    from aliquot.optim.adamw import BlockedAdamW

    return [
        (Peers, "wait", _WAIT),
        *((HostGradients, method, _STAGE) for method in ("stage", "add_rows", "buffer", "publish", "finish")),
        *((HostGradients, method, _SUM) for method in ("_sum", "_rows_of_owners", "_add_rows")),
        (GradientSums, "squares", _NORM),
        (host_engine, "global_norm", _NORM),
        (BlockedAdamW, "step", _UPDATE),
        (host_engine.HostEngine, "_mark_updated", _PUBLISH),
    ]


@dataclass(frozen=True)
class Shapes:
    """What tells the matrix products of a step apart."""

    tokens: int
    hidden: int
    mlp: int
    vocabulary: int

    def part(self, product: tuple[int, int, int], of_head: bool) -> str:
        """Of [M, K] x [K, N]: the head's logits and gradients of weights may be made of some columns at a time."""
        if of_head:
            sums_over = {self.hidden: "logits", self.vocabulary: "gradient of hidden"}
            return f"head, {sums_over.get(product[1], 'gradient of weight')}"
        rest = Counter(product)
        rest.subtract([self.tokens])
        return "mlp" if rest[self.mlp] > 0 else "projections"


Products = dict[str, Counter[tuple[int, int, int]]]  # part -> (M, K, N) -> how many


def divide(events: list[Event], shapes: Shapes) -> tuple[dict[str, float], Products]:
    """Seconds of each part inside the ranges named `step`, and the matrix products of each.

    An event's own time is its time without that of the events inside it.
    """
    parts: dict[str, float] = defaultdict(float)
    products: Products = defaultdict(Counter)
    above: list[tuple[Event, str]] = []  # events that the next one may lie in, each with its part
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
    """The part that an event's own time belongs to; `inside`: the names around it, outermost first."""
    name = event.name
    if name in (_WAIT, _STAGE, _SUM, _NORM, _UPDATE, _PUBLISH):
        return name
    marked = [other for other in inside if other in (_WAIT, _STAGE, _SUM, _NORM, _UPDATE, _PUBLISH)]
    if marked:
        return marked[-1]
    if name == "aten::mm":
        (m, k), (_, n) = event.shapes[:2]
        part = shapes.part((m, k, n), any(other.startswith("_HeadLoss") for other in inside))
        direction = "backward" if any("Backward" in other for other in inside) else "forward"
        return part if part.startswith("head") else f"{part}, {direction}"
    if name == "aten::bmm":
        return "attention: products"
    if outer == "attention: products" or outer.split(",")[0] in PRODUCTS:
        return outer  # what a product calls belongs to it
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
    """Views and allocations: dispatch, no work on values."""
    looks = (
        "view strided slice select transpose permute reshape expand squeeze empty detach resolve alias narrow resize"
    )
    return name in ("aten::t", "aten::to", "aten::mT") or any(word in name for word in looks.split())


def flops_of(products: Counter[tuple[int, int, int]]) -> int:
    return sum(2 * m * k * n * count for (m, k, n), count in products.items())


def alone_rate(products: Counter[tuple[int, int, int]]) -> float:
    """FLOP/s of plain products of these shapes, each as often as in a step."""
    seconds = sum(
        count * 2 * m * k * n / matmul_rate([(m, k, n)], 0.1, time.thread_time) for (m, k, n), count in products.items()
    )
    return flops_of(products) / seconds


def of_first_rank(products: Products) -> Products:
    """Rank 0's products on every rank."""
    from aliquot.distributed.ranks import gather

    told = gather([[name, [[*shape, count] for shape, count in found.items()]] for name, found in products.items()])[0]
    return {name: Counter({(m, k, n): count for m, k, n, count in found}) for name, found in told}


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
