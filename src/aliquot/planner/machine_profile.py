"""Machine profiles: measured rates of this machine, stored in the cache directory.

A profile is specific to processor, cores, version of torch, ranks and threads. The speed of a shared machine changes by
half within a day. Therefore a quick profile is valid for an hour, and a run without a valid profile measures a new one.
A thorough profile (`aliquot plan --calibrate`) is valid until a new measurement replaces it. A profile of the busy
machine is never valid: the next run measures again. A plan with such rates states a larger error.
"""

from __future__ import annotations

import datetime
import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter

from aliquot.core.decode import publish_checked_json, read_checked_json
from aliquot.core.small_files import cache_root
from aliquot.distributed.topology import RankLayout
from aliquot.machine.cpu import CpuFacts, read_cpu
from aliquot.planner.measure_rates import QUICK, THOROUGH, Effort, Measurement, measure_rates, median_measurement
from aliquot.planner.planned_machine import Machine
from aliquot.planner.rates import ASSUMED_NETWORK, GLOO_BYTES_PER_S, OFF_BY, Rates, network_bytes_per_s

FORMAT = 10
_BUSY = 0.1  # spread of matrix product times above which the next run measures again
_FRESH_S = 3600.0
_MEASURED_OFF_BY = 1.15  # error of the time model itself; see docs/explanation/planning.md
# Error of rates that are old, of a busy machine (times 1 + spread), or scaled to other numbers of threads: eight
# threads are 5 to 8 times as fast as one.
_OTHER_OFF_BY = 1.5

_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class MachineProfile:
    """The content of a profile file. pydantic validates every value, because anybody may have written the cache."""

    format: int
    at: FiniteFloat  # seconds since 1970
    date: str
    ranks: _Count
    threads: _Count  # threads of each rank
    thorough: bool
    rates: Measurement

    @property
    def is_valid(self) -> bool:
        return not self.is_busy and (self.thorough or abs(time.time() - self.at) < _FRESH_S)  # clocks may be set back

    @property
    def is_busy(self) -> bool:
        """Whether the machine had other work during the measurement."""
        return self.rates.spread > _BUSY

    def ceiling(self, itemsize: int) -> float:
        """Return the FLOP/s of a rank in its fastest plain matrix products.

        fp32 products count for bf16, too, because a processor may lack bf16 instructions.
        """
        return max(rate for size in {itemsize, 4} for _, rate in self.rates.products[size])

    def scaled(self, machine: Machine, layout: RankLayout) -> Rates:
        """Return the rates of a rank of `layout`, scaled by cores per rank if `layout` was not measured."""
        then, now = (self.ranks, self.threads), (layout.ranks_per_node, layout.threads_per_rank)
        cores_then, cores = (min(threads, machine.cores / ranks) for ranks, threads in (then, now))
        factor, is_sure = cores / cores_then, then == now and self.is_valid
        off_by = (_MEASURED_OFF_BY if is_sure else _OTHER_OFF_BY) * (1 + self.is_busy * self.rates.spread)
        how = "" if self.thorough else " in a second; --calibrate takes its time"
        if then != now:
            how = f", of {self.ranks} x {self.threads} threads, scaled"
        how += "; the machine was busy" if self.is_busy else ""
        if layout.nodes > 1 and machine.network_bytes_per_s is None:
            how, off_by = f"{how}, {ASSUMED_NETWORK}", max(off_by, OFF_BY)
        rates = self.rates
        shared, shared_then = (max(1.0, ranks / machine.cores) for ranks, _ in (now, then))

        def curves(table: dict[Any, Any]) -> dict[Any, Any]:
            return {key: tuple((size, factor * rate) for size, rate in curve) for key, curve in table.items()}

        return Rates(
            source=f"measured on this machine on {self.date}{how}",
            products=curves(rates.products),
            memory=curves(rates.memory),
            call_s=rates.call_s * shared / shared_then,  # one thread of each rank makes the calls
            socket_bytes_per_s=rates.socket_bytes_per_s * shared_then / shared,
            gloo_bytes_per_s=GLOO_BYTES_PER_S * cores / layout.threads_per_rank,
            network_bytes_per_s=network_bytes_per_s(machine),
            off_by=off_by,
            is_sure=not self.is_busy,
        )


_PROFILE = TypeAdapter(MachineProfile)


def measured_rates(machine: Machine, layout: RankLayout) -> Rates | None:
    """Return rates from the most similar profile of this machine; None for another machine, GPUs, or no profile."""
    profile = _nearest(machine, layout)
    return None if profile is None else profile.scaled(machine, layout)


def is_measured(machine: Machine, layout: RankLayout) -> bool:
    """Whether a plan for `layout` needs no measurement first."""
    profile = _nearest(machine, layout)
    return machine.cpu is None or layout.device != "cpu" or (profile is not None and profile.is_valid)


def recent(cpu: CpuFacts, ranks: int, threads: int) -> MachineProfile | None:
    """Return a valid profile of exactly these ranks and threads, or None."""
    profile = _read(_path(cpu, ranks, threads))
    return profile if profile is not None and profile.is_valid else None


def keep(cpu: CpuFacts, ranks: int, threads: int, rates: dict[str, Any], thorough: bool = False) -> Path:
    """Write a profile of `ranks` of this machine with `threads` each, and return its path. Raises OSError.

    A profile of the busy machine does not replace a profile of the idle machine.
    """
    path, profile = _path(cpu, ranks, threads), profile_of(ranks, threads, rates, thorough)
    previous = _read(path)
    if previous is None or previous.is_busy or not profile.is_busy:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_checked_json(path, {**_PROFILE.dump_python(profile, mode="json"), "machine": _identity(cpu)}, indent=1)
    return path


def profile_of(ranks: int, threads: int, rates: dict[str, Any], thorough: bool = False) -> MachineProfile:
    """Make a profile from `rates` that were measured just now, without storing it."""
    now = datetime.datetime.now(datetime.UTC)
    return _PROFILE.validate_python({
        "format": FORMAT, "at": now.timestamp(), "date": now.date().isoformat(),
        "ranks": ranks, "threads": threads, "thorough": thorough, "rates": rates,
    })  # fmt: skip


def calibrate() -> Path:
    """Measure this machine for half a minute, store two profiles and return their directory. Raises OSError.

    One profile is for a rank per core, the other for a single rank with a thread per core.
    """
    cpu, directory = read_cpu(), cache_root() / "machines"
    directory.mkdir(parents=True, exist_ok=True)
    for ranks, threads in dict.fromkeys(((cpu.usable_cores, 1), (1, cpu.usable_cores))):
        keep(cpu, ranks, threads, _measure(cpu, ranks, threads, THOROUGH), thorough=True)
    return directory


def ensure_measured(machine: Machine, layout: RankLayout) -> None:
    """Measure this machine quickly for the ranks of one node of `layout`, unless a profile is still valid."""
    if machine.cpu is None or is_measured(machine, layout):
        return
    ranks, threads = layout.ranks_per_node, layout.threads_per_rank
    rates = _measure(machine.cpu, ranks, threads, QUICK)
    with suppress(OSError):  # the plan estimates instead
        keep(machine.cpu, ranks, threads, rates)


def _measure(cpu: CpuFacts, ranks: int, threads: int, effort: Effort) -> dict[str, Any]:
    """Measure with a thread of this process in place of each rank, and return the median over these ranks."""
    import torch

    threads_before = torch.get_num_threads()
    begin, done = threading.Barrier(ranks), threading.Barrier(ranks)
    numbers = [0.0] * ranks

    def measure_rank(rank: int) -> dict[str, Any]:
        torch.set_num_threads(threads)  # of this Python thread

        def agree(value: float) -> float:
            numbers[rank] = value
            begin.wait()
            largest = max(numbers)
            done.wait()  # no rank writes before all ranks have read
            return largest

        return asdict(measure_rates(agree, effort, min(1.0, cpu.usable_cores / (ranks * threads))))

    try:
        with ThreadPoolExecutor(ranks) as pool:
            return median_measurement(list(pool.map(measure_rank, range(ranks))))
    finally:
        torch.set_num_threads(threads_before)


def _nearest(machine: Machine, layout: RankLayout) -> MachineProfile | None:
    """Return the profile with the most similar threads and ranks. Valid profiles of an idle machine come first."""
    if machine.cpu is None or layout.device != "cpu":
        return None
    paths = (cache_root() / "machines").glob(f"{_name(machine.cpu)}-*.json")
    profiles = [profile for profile in map(_read, paths) if profile is not None]

    def distance(profile: MachineProfile) -> tuple[bool, bool, int, int]:
        threads, ranks = profile.threads - layout.threads_per_rank, profile.ranks - layout.ranks_per_node
        return not profile.is_valid, profile.is_busy, abs(threads), abs(ranks)

    return min(profiles, key=distance, default=None)


def _read(path: Path) -> MachineProfile | None:
    """Read a profile; None if the file is missing, damaged, or of another version of aliquot."""
    try:
        profile = _PROFILE.validate_python(read_checked_json(path))
    except ValueError:
        return None
    return profile if profile.format == FORMAT else None


def _path(cpu: CpuFacts, ranks: int, threads: int) -> Path:
    return cache_root() / "machines" / f"{_name(cpu)}-{ranks}x{threads}.json"


def _name(cpu: CpuFacts) -> str:
    return hashlib.sha256(_identity(cpu).encode()).hexdigest()[:16]


def _identity(cpu: CpuFacts) -> str:
    return f"{cpu.model}, {cpu.usable_cores} cores, torch {version('torch')}"
