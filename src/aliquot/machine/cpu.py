"""The CPU as this process may use it: physical cores, NUMA nodes, quota, and the instructions that matter."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from aliquot.machine.cgroup import groups, read

ISA = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
_BF16 = {"amx_bf16", "avx512_bf16"}
# bf16 and fp32 FLOP a cycle and core, a multiply-add counted as two, from the makers' optimisation manuals:
# AMX: TDPBF16PS is 16 x 16 x 32 multiply-adds in 16 cycles (Intel 64 and IA-32 Optimization Reference Manual, 20.2).
# AVX-512 with bf16: one VDPBF16PS of 32 multiply-adds, and fp32 one FMA of 16 lanes, as Zen 4 has; Zen 5 has two.
# SVE bf16: Neoverse V1 and V2, four 128-bit BFMMLA of 16 multiply-adds (Arm Neoverse V1 Software Optimization Guide).
# Without instructions for bf16: oneDNN converts it within its kernels for AVX-512 (half of fp32, an assumption); else
# torch multiplies number by number: 0.7 a cycle were measured on Zen 3.
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
    model: str
    cores: tuple[tuple[int, ...], ...]  # a physical core: the logical CPUs of it that are allowed; in NUMA order
    quota: float | None  # CPUs' worth of time that the control group grants, None: no limit
    numa_nodes: int  # that have an allowed CPU
    isa: tuple[str, ...]  # of ISA, those this CPU has
    node_of_core: tuple[int, ...] = ()  # NUMA node of each of `cores`; empty: all on one

    @property
    def cores_by_node(self) -> list[list[tuple[int, ...]]]:
        """`cores`, a list a NUMA node."""
        node_of_core = self.node_of_core or (0,) * len(self.cores)
        return [
            [core for core, own in zip(self.cores, node_of_core, strict=True) if own == node]
            for node in dict.fromkeys(node_of_core)
        ]

    @property
    def usable_cores(self) -> int:
        """Threads that can compute at full speed at once."""
        if self.quota is None:
            return len(self.cores)
        return min(len(self.cores), max(1, math.floor(self.quota)))

    @property
    def multiplies_bf16(self) -> bool:
        """By instructions, or it is not known: of ARM's no names are read."""
        return not self.isa or bool(_BF16.intersection(self.isa))

    @property
    def throttled(self) -> bool:
        """The quota, not the set of CPUs, is the limit: the CPUs are shared with others, so they are not ours."""
        return self.usable_cores < len(self.cores)


def read_cpu(root: Path = Path("/"), allowed: Collection[int] | None = None) -> CpuFacts:
    """Read the facts under `root`; `allowed` are the logical CPUs to consider, by default this process's affinity."""
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    node_of = numa_nodes(root)
    cores = {siblings(cpu, root) & set(allowed) for cpu in allowed}
    ordered = sorted((tuple(sorted(core)) for core in cores), key=lambda core: (node_of.get(core[0], 0), core))
    model, flags = cpuinfo(root)
    return CpuFacts(
        model=model,
        cores=tuple(ordered),
        quota=cpu_quota(root),
        numa_nodes=len({node_of.get(cpu, 0) for cpu in allowed}),
        isa=tuple(name for name in ISA if name in flags),
        node_of_core=tuple(node_of.get(core[0], 0) for core in ordered),
    )


def siblings(cpu: int, root: Path) -> frozenset[int]:
    """The logical CPUs of the physical core that holds `cpu`, itself included."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second name is that of kernels before 5.2
        text = read(topology / name)
        if text:
            return frozenset(parse_cpu_list(text)) | {cpu}
    return frozenset({cpu})


def numa_nodes(root: Path) -> dict[int, int]:
    """NUMA node of each logical CPU; empty where the kernel tells none."""
    node_of = {}
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in parse_cpu_list(read(directory / "cpulist") or ""):
            node_of[cpu] = int(directory.name.removeprefix("node"))
    return node_of


def cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time of the tightest control group, or None."""
    quotas = []
    for group in groups("cpu", root):
        version_2 = read(group / "cpu.max")
        if version_2 is not None:
            quota, period = version_2.split()
        else:
            quota, period = read(group / "cpu.cfs_quota_us") or "-1", read(group / "cpu.cfs_period_us") or "100000"
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cpuinfo(root: Path) -> tuple[str, frozenset[str]]:
    """Model name and flags of the first CPU."""
    fields: dict[str, str] = {}
    for line in (read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name", platform.machine()), frozenset(fields.get("flags", "").split())


def parse_cpu_list(text: str) -> list[int]:
    """`0-2,5` -> [0, 1, 2, 5]."""
    cpus: list[int] = []
    for item in text.split(","):
        if item.strip():
            first, _, last = item.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def format_cpu_list(cpus: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> `0-2,5`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
