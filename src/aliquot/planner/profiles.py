"""What was measured of this machine, kept in the cache directory under its name: processor, cores, version of torch.

There are two kinds. A thorough one (`aliquot plan --calibrate`) knows a rank of one thread and one with a thread a
core. A quick one, of which every run makes sure, knows the ranks and threads of that run. Machines that others share
become slower and faster, by half within a day: after an hour a quick one is measured again, and tells whether the
thorough one still holds.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from aliquot.core.paths import cache_root
from aliquot.core.small_files import publish_text
from aliquot.distributed.topology import RankLayout
from aliquot.machine.cpu import CpuFacts
from aliquot.optim.sizes import States
from aliquot.planner.measure_rates import Tables
from aliquot.planner.planned_machine import Machine
from aliquot.planner.profile_schema import check_quick, check_thorough
from aliquot.planner.rates import ASSUMED_NETWORK, GLOO_BYTES_PER_S, OFF_BY, Rates, estimated, interpolated

FORMAT = 8
_PROFILE_BYTES = 8192  # at most, about
_BUSY = 0.1  # a spread of products above which a quick profile is measured again by the next run
_FRESH_S = 3600.0  # about as long as a machine stays what it is, and a second an hour is little
_SCALED_OFF_BY = 1.5  # about: eight threads were 5 to 8 times as fast as one
# What ranks that share cores have of their parts, in kernels and in calls, whose code and data another rank has driven
# out of the caches: of four ranks on two cores with AMX.
_OF_SHARED, _CALLS_OF_SHARED = 0.93, 0.8
_APART = 4 / 3  # between the ceilings of two profiles: more than two measurements of one machine differ by


def rates_of(machine: Machine, layout: RankLayout) -> Rates | None:
    """By what was measured of this machine; None for another one, for GPUs, or where nothing was."""
    if machine.cpu is None or layout.device != "cpu":
        return None
    thorough, quick = _read(_path(machine.cpu), check_thorough), _nearest_quick(machine.cpu, layout)
    profile = quick if thorough is None or (quick is not None and _overtaken(thorough, quick, machine)) else thorough
    return None if profile is None else Measured.of(profile, machine, layout)


def known(machine: Machine, layout: RankLayout) -> bool:
    """Whether plans for `layout` need no measurement first: one was made within the hour, or can tell nothing."""
    if machine.cpu is None or layout.device != "cpu":
        return True
    return any(
        profile is not None and _fresh(profile)
        for profile in (_read(_path(machine.cpu), check_thorough), _nearest_quick(machine.cpu, layout))
    )


def keep_thorough(cpu: CpuFacts, core: Tables, all_cores: Tables) -> Path:
    """`core`: of ranks of one thread, as many as there are cores; `all_cores`: of one rank. Raises OSError."""
    return _keep(_path(cpu), cpu, {"core": core, "all_cores": all_cores, "cores": cpu.usable_cores})


def keep_quick(cpu: CpuFacts, ranks: int, threads: int, tables: Tables) -> Path:
    """`ranks`: of this machine, of so many threads each. Raises OSError."""
    return _keep(_path(cpu, ranks, threads), cpu, {"ranks": ranks, "threads": threads, "tables": tables})


def check_room() -> None:
    """Raises OSError where a profile could not be kept."""
    probe = cache_root() / "machines" / f"room-{os.getpid()}"
    probe.parent.mkdir(parents=True, exist_ok=True)
    publish_text(probe, " " * _PROFILE_BYTES)
    probe.unlink()


def quick(cpu: CpuFacts, ranks: int, threads: int) -> Tables | None:
    """None: not measured within the hour, or while the machine was busy."""
    profile = _read(_path(cpu, ranks, threads), check_quick)
    return profile["tables"] if profile is not None and _fresh(profile) and not is_busy(profile["tables"]) else None


def ceiling(tables: Tables, itemsize: int) -> float:
    """FLOP/s of a rank in the products that it is fastest at: without instructions for bf16 those of fp32 are."""
    rates: list[float] = [rate for size in {str(itemsize), "4"} for _, rate in tables["products"][size]]
    return max(rates)


@dataclass(frozen=True)
class Measured:
    """Rates of one rank."""

    source: str
    products: dict[int, list[tuple[float, float]]]  # itemsize -> (side of a cube, FLOP/s), as layers make them
    plain: dict[int, list[tuple[float, float]]]
    small: dict[int, float]  # itemsize -> FLOP/s of attention's batched products
    memory: dict[str, list[tuple[float, float]]]  # kind of operation -> (bytes of a tensor, bytes/s)
    sums: dict[str, list[tuple[float, float]]]  # kind that is kept -> (sources, elements/s)
    updates: dict[str, float]  # states -> elements/s of an update that is not compiled
    stage_bytes_per_s: float
    patch_bytes_per_s: float
    call_s: float
    socket_bytes_per_s: float
    of_core: float  # that a thread has where ranks share cores
    network: Rates  # what cannot be measured on one machine
    off_by: float = 1.0

    @classmethod
    def of(cls, profile: dict[str, Any], machine: Machine, layout: RankLayout) -> Measured:
        off_by, own = 1.0, (layout.ranks_per_node, layout.threads_per_rank)
        if "core" in profile:
            core, every, cores = profile["core"], profile["all_cores"], profile["cores"]
            threads = min(layout.threads_per_rank, cores / layout.ranks_per_node)  # more share cores
            share, how = max(0.0, threads - 1) / max(1, cores - 1), ""
            of_core = now = _of_core(cores, own)
            factor = now.lost * min(1.0, threads)
        else:
            core = every = profile["tables"]
            other = profile["ranks"], profile["threads"]
            measured, wanted = (min(threads, machine.cores / ranks) for ranks, threads in (other, own))
            share, how = 0.0, " in a second; --calibrate takes its time"
            now, then = _of_core(machine.cores, own), _of_core(machine.cores, other)
            of_core = OfCore(*(mine / its for mine, its in zip(now, then, strict=True)))
            factor = of_core.lost * wanted / measured
            if own != other:  # what ranks and threads leave of each other's memory and clock is not known
                off_by = _SCALED_OFF_BY
                how = f", of {other[0]} x {other[1]} threads; --calibrate knows others"
            if is_busy(profile["tables"]):
                how += "; the machine was busy"

        if layout.nodes > 1 and machine.network_bytes_per_s is None:
            how, off_by = f"{how}, {ASSUMED_NETWORK}", OFF_BY

        def between(one: Any, whole: Any) -> float:
            return float(factor * (one + (whole - one) * share))

        def table(kind: str, name: str) -> list[tuple[float, float]]:
            whole = dict(every[kind][name])  # either may have left out the largest products
            return [(size, between(one, whole[size])) for size, one in core[kind][name] if size in whole]

        return cls(
            source=f"measured on this machine on {profile['date']}{how}",
            products={int(size): table("of_layers", size) for size in core["of_layers"]},
            plain={int(size): table("products", size) for size in core["products"]},
            small={int(size): between(rate, every["small"][size]) for size, rate in core["small"].items()},
            memory={kind: table("memory", kind) for kind in core["memory"]},
            sums={kept: table("sums", kept) for kept in core["sums"]},
            updates={states: between(rate, every["updates"][states]) for states, rate in core["updates"].items()},
            stage_bytes_per_s=between(core["stage"], every["stage"]),
            patch_bytes_per_s=core["patch"] * of_core.kernels,
            call_s=core["call_s"] / of_core.calls,
            socket_bytes_per_s=core["socket_bytes_per_s"] * of_core.kernels,
            of_core=now.kernels,
            network=estimated(machine, layout),
            off_by=off_by,
        )

    def matmul_s(self, batch: int, m: int, k: int, n: int, itemsize: int) -> float:
        smallest = min(m, k, n)
        # A product is as fast as a cube of its geometric mean, unless one side is very short.
        size = min((m * k * n) ** (1 / 3), 4.0 * smallest)
        rate = self.small[itemsize] if batch > 1 and size < 128 else interpolated(self.products[itemsize], size)
        return 2.0 * batch * m * k * n / rate

    def memory_s(self, operation: str, tensor_bytes: int, moved_bytes: float) -> float:
        return moved_bytes / interpolated(self.memory[_kind(operation)], max(1, tensor_bytes))

    def overhead_s(self, calls: float) -> float:
        return calls * self.call_s

    def sum_s(self, itemsize: int, sources: int, numel: float) -> float:
        (few, of_few), (many, of_many) = self.sums["fp32" if itemsize == 4 else "bf16"]
        each_more_s = max(0.0, (1 / of_many - 1 / of_few) / (many - few))
        return numel * max(1 / of_few + (sources - few) * each_more_s, each_more_s)

    def update_s(self, states: States, numel: float, moved_bytes: float, in_one_pass: bool) -> float:
        return self.stage_s(moved_bytes) if in_one_pass else numel / self.updates[states]

    def stage_s(self, moved_bytes: float) -> float:
        return moved_bytes / self.stage_bytes_per_s

    def gloo_s(self, sent_bytes: float) -> float:
        return sent_bytes / (GLOO_BYTES_PER_S * self.of_core)

    def patch_s(self, weights_bytes: float) -> float:
        return weights_bytes / self.patch_bytes_per_s

    def wire_s(self, sent_bytes: float) -> float:
        return self.network.wire_s(sent_bytes)

    def local_s(self, sent_bytes: float) -> float:
        return sent_bytes / self.socket_bytes_per_s


def _kind(operation: str) -> str:
    if "softmax" in operation:
        return "softmax"
    if operation in ("convert", "permute", "transpose"):
        return operation
    if operation in ("tanh_backward", "sigmoid_backward"):
        return "add"  # of the result, which is kept
    operation = operation.removesuffix("_backward").removesuffix("_")
    if operation in ("tanh", "gelu", "erf"):
        return "tanh"
    if operation in ("silu", "exp", "sigmoid", "pow", "rsqrt"):
        return "silu"
    if operation in ("mean", "sum", "amax"):
        return "sum"
    return "copy" if operation in ("copy", "_to_copy", "clone", "cat", "zero", "fill") else "add"


def _nearest_quick(cpu: CpuFacts, layout: RankLayout) -> dict[str, Any] | None:
    """Of ranks whose threads come nearest to those of `layout`, measured while the machine was not busy if any was."""
    own = _path(cpu)
    found = [
        profile for path in own.parent.glob(f"{own.stem}-*.json") if (profile := _read(path, check_quick)) is not None
    ]

    def distance(profile: dict[str, Any]) -> tuple[bool, bool, int, int]:
        threads, ranks = profile["threads"] - layout.threads_per_rank, profile["ranks"] - layout.ranks_per_node
        return not _fresh(profile), is_busy(profile["tables"]), abs(threads), abs(ranks)

    return min(found, key=distance, default=None)


class OfCore(NamedTuple):
    """What a thread has of a core."""

    kernels: float
    calls: float  # of the one thread of a rank that makes them
    lost: float  # factor of all rates, beside the part that it has


def _of_core(cores: int, layout: tuple[int, int]) -> OfCore:
    """Of `layout`, so many ranks of so many threads."""
    lost = _OF_SHARED if math.prod(layout) > cores else 1.0
    calls = _CALLS_OF_SHARED * cores / layout[0] if layout[0] > cores else 1.0
    return OfCore(lost * min(1.0, cores / math.prod(layout)), calls, lost)


def _overtaken(thorough: dict[str, Any], quick: dict[str, Any], machine: Machine) -> bool:
    """Whether the machine has changed since it was measured thoroughly. A quick profile that left cores idle cannot
    tell: alone, a core is faster."""
    ranks, threads = quick["ranks"], quick["threads"]
    if (
        quick.get("at", 0.0) < thorough.get("at", 0.0)
        or is_busy(quick["tables"])
        or ranks * threads < thorough["cores"]
    ):
        return False
    then = Measured.of(thorough, machine, RankLayout(1, ranks, threads, "cpu"))
    ratio = ceiling(quick["tables"], 4) / max(rate for _, rate in then.plain[4])
    return not 1 / _APART < ratio < _APART


def _fresh(profile: dict[str, Any]) -> bool:
    return abs(time.time() - float(profile.get("at", 0.0))) < _FRESH_S  # a clock may have been set back


def is_busy(tables: Tables) -> bool:
    """Whether the machine had other work while they were measured."""
    return bool(tables["spread"] > _BUSY)


def _path(cpu: CpuFacts, ranks: int | None = None, threads: int | None = None) -> Path:
    name = hashlib.sha256(_identity(cpu).encode()).hexdigest()[:16]
    return cache_root() / "machines" / (f"{name}.json" if ranks is None else f"{name}-{ranks}x{threads}.json")


def _identity(cpu: CpuFacts) -> str:
    return f"{cpu.model}, {cpu.usable_cores} cores, torch {version('torch')}"


def _keep(path: Path, cpu: CpuFacts, values: dict[str, Any]) -> Path:
    now = time.time()
    date = datetime.datetime.fromtimestamp(now, datetime.UTC).date().isoformat()
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_text(
        path, json.dumps({"format": FORMAT, "at": now, "date": date, "machine": _identity(cpu), **values}, indent=1)
    )
    return path


def _read(path: Path, check: Callable[[Any], None]) -> dict[str, Any] | None:
    """None: there is none, it is another aliquot's, or nothing to plan by."""
    try:
        profile: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        check(profile)
    except (OSError, ValueError):
        return None
    return profile if profile["format"] == FORMAT else None
