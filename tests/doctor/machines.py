"""Machines laid out as files, for checks to find fault with."""

from __future__ import annotations

from pathlib import Path

from aliquot.doctor.finding import Finding, Subject

GIB_KB = 1 << 20


def machine(root: Path, cores: int = 4, flags: str = "avx2 avx512f avx512_bf16", threads: int = 1) -> Path:
    """One NUMA node, no control group, `threads` logical CPUs a core: core i is CPUs i, i + cores, ..."""
    count = cores * threads
    lay_out(
        root,
        {
            "proc/cpuinfo": f"model name\t: Some CPU\ncpu MHz\t\t: 2000.000\nflags\t\t: {flags}\n",
            "proc/meminfo": f"MemTotal: {64 * GIB_KB} kB\nMemAvailable: {60 * GIB_KB} kB\n",
            "proc/self/cgroup": "0::/pod\n",
            "sys/devices/system/cpu/online": f"0-{count - 1}\n",
            "sys/devices/system/node/node0/cpulist": f"0-{count - 1}\n",
        },
    )
    for cpu in range(count):
        siblings = ",".join(str(cpu % cores + thread * cores) for thread in range(threads))
        lay_out(root, {f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": f"{siblings}\n"})
    return root


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def subject(root: Path, cpus: int = 4, **environ: str) -> Subject:
    return Subject(root=root, environ=environ, allowed=frozenset(range(cpus)), run_directory=root)


def said(finding: Finding) -> str:
    return f"{finding.level} {finding.id}: {finding.found}; {finding.meaning}; {finding.fix}"
