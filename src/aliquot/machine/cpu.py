"""The CPU as this process may use it: physical cores, NUMA nodes, CPU quota, and vector and bf16 instructions."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from aliquot.machine.cgroup import control_groups, read_text

Precision = Literal["bf16", "fp32"]

# The flag of an instruction set in /proc/cpuinfo -> its key in FLOP_PER_CYCLE, the fastest first.
_FLAGS = {
    "amx_bf16": "amx_bf16", "avx512_bf16": "avx512_bf16", "avx512f": "avx512f", "avx2": "avx2",
    "bf16": "sve_bf16", "asimd": "neon",
}  # fmt: skip
# FLOP per cycle and core in bf16 and fp32, a multiply-add counted as two, from the optimisation manuals of the makers:
# AMX: TDPBF16PS is 16 x 16 x 32 multiply-adds in 16 cycles (Intel 64 and IA-32 Optimization Reference Manual, 20.2).
# AVX-512 with bf16: one VDPBF16PS of 32 multiply-adds and one fp32 FMA of 16 lanes (Zen 4; Zen 5 has two of both).
# SVE bf16: Neoverse V1 and V2, four 128-bit BFMMLA of 16 multiply-adds (Arm Neoverse V1 Software Optimization Guide).
# Without bf16 instructions, oneDNN converts within its AVX-512 kernels (assumed: half of the fp32 rate). On older CPUs,
# torch multiplies one number at a time: 0.7 FLOP per cycle, measured on Zen 3.
FLOP_PER_CYCLE = {
    "amx_bf16": (1024, 64),
    "avx512_bf16": (64, 32),
    "sve_bf16": (128, 32),
    "avx512f": (32, 64),
    "avx2": (1, 32),
    "avx": (1, 16),
    "neon": (1, 16),
}


@dataclass(frozen=True)
class CpuFacts:
    """The CPU of one machine, as far as this process may use it."""

    model: str
    cores: tuple[tuple[int, ...], ...]  # allowed logical CPUs of each physical core, in NUMA order
    quota: float | None  # CPU seconds per second that the control group grants; None: no limit
    numa_nodes: int  # nodes with an allowed CPU
    isa: tuple[str, ...]  # the instruction sets of this CPU, the fastest first: keys of FLOP_PER_CYCLE
    node_of_core: tuple[int, ...] = ()  # NUMA node of each core; empty: one node

    @property
    def cores_by_node(self) -> list[list[tuple[int, ...]]]:
        """The physical cores of each NUMA node."""
        node_of_core = self.node_of_core or (0,) * len(self.cores)
        return [
            [core for core, its_node in zip(self.cores, node_of_core, strict=True) if its_node == node]
            for node in dict.fromkeys(node_of_core)
        ]

    @property
    def usable_cores(self) -> int:
        """The number of threads that can compute at full speed at once."""
        if self.quota is None:
            return len(self.cores)
        return min(len(self.cores), max(1, math.floor(self.quota)))

    @property
    def is_throttled(self) -> bool:
        """Whether a CPU quota, not the set of CPUs, limits this process; other containers then run on the same CPUs."""
        return self.usable_cores < len(self.cores)


def faster_precision(isa: Iterable[str]) -> Precision:
    """Return the precision in which a CPU with these instruction sets multiplies matrices faster."""
    return "bf16" if any(bf16 > fp32 for bf16, fp32 in map(FLOP_PER_CYCLE.__getitem__, isa)) else "fp32"


def read_cpu(root: Path = Path("/"), allowed: Collection[int] | None = None) -> CpuFacts:
    """Read the facts under `root` for the `allowed` logical CPUs, by default those of this process's affinity."""
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    node_of = numa_nodes(root)
    cores = {sibling_cpus(cpu, root) & set(allowed) for cpu in allowed}
    ordered = sorted((tuple(sorted(core)) for core in cores), key=lambda core: (node_of.get(core[0], 0), core))
    fields = cpuinfo(root)
    flags = (fields.get("flags") or fields.get("Features", "")).split()  # ARM calls them features
    isa = tuple(name for flag, name in _FLAGS.items() if flag in flags)
    nodes = tuple(node_of.get(core[0], 0) for core in ordered)
    return CpuFacts(
        fields.get("model name", platform.machine()), tuple(ordered), cpu_quota(root),
        len({node_of.get(cpu, 0) for cpu in allowed}), isa, nodes,
    )  # fmt: skip


def sibling_cpus(cpu: int, root: Path) -> frozenset[int]:
    """Return the logical CPUs of the physical core that `cpu` belongs to, including `cpu`."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # kernels before 5.2 use the second name
        text = read_text(topology / name)
        if text:
            return frozenset(parse_cpu_list(text)) | {cpu}
    return frozenset({cpu})


def numa_nodes(root: Path) -> dict[int, int]:
    """Return the NUMA node of each logical CPU; empty if the kernel exposes no nodes."""
    return {
        cpu: int(directory.name.removeprefix("node"))
        for directory in (root / "sys/devices/system/node").glob("node[0-9]*")
        for cpu in parse_cpu_list(read_text(directory / "cpulist") or "")
    }


def cpu_quota(root: Path) -> float | None:
    """Return the CPU quota of the tightest control group in CPUs, or None without a quota."""
    quotas = []
    for group in control_groups("cpu", root):
        version_2 = read_text(group / "cpu.max")
        if version_2 is not None:
            quota, period = version_2.split()
        else:
            quota = read_text(group / "cpu.cfs_quota_us") or "-1"
            period = read_text(group / "cpu.cfs_period_us") or "100000"
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cpuinfo(root: Path = Path("/")) -> dict[str, str]:
    """Return the fields that the kernel shows of the first CPU."""
    fields: dict[str, str] = {}
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields


def parse_cpu_list(text: str) -> list[int]:
    """Parse a kernel CPU list: `0-2,5` becomes [0, 1, 2, 5]."""
    cpus: list[int] = []
    for item in text.split(","):
        if item.strip():
            first, _, last = item.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Format a kernel CPU list: [0, 1, 2, 5] becomes `0-2,5`."""
    # Within a run of successive numbers, the difference between a number and its index is constant.
    runs = [list(run) for _, run in groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs)
