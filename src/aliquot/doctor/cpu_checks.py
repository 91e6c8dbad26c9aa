"""Checks of the CPU: instructions, kernels, cores, threads, pinning and NUMA."""

from __future__ import annotations

import ctypes
import os
import platform

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import UserError
from aliquot.distributed.auto_ranks import max_cpu_ranks
from aliquot.distributed.numa_binding import core_sets, has_memory_policy, set_preferred_node
from aliquot.distributed.topology import threads_per_rank
from aliquot.doctor.finding import Finding, Level, Subject
from aliquot.machine.cgroup import read_text
from aliquot.machine.cpu import format_cpu_list, numa_nodes, parse_cpu_list, sibling_cpus
from aliquot.machine.memory import memory_limit

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def check_isa(subject: Subject) -> Finding:
    """Check the instructions for matrix products."""
    cpu, fp32 = subject.cpu, "set train.precision=fp32, or take a CPU with AVX-512 or AMX"
    observed = f"{cpu.model}: {', '.join(cpu.isa) or 'none of AMX, AVX-512, AVX2'}"
    if cpu.isa and cpu.has_bf16_instructions:
        return Finding("isa", "instructions", "ok", observed, "the CPU has instructions for bf16 products")
    if "avx512f" in cpu.isa or "avx2" in cpu.isa:
        meaning = "no bf16 instructions: bf16 products are converted to fp32 and are slower than fp32"
        return Finding("isa", "instructions", "warning", observed, meaning, fp32)
    if platform.machine() == "aarch64":
        return Finding("isa", "instructions", "ok", cpu.model, "an ARM CPU: `kernels` shows the kernels in use")
    return Finding("isa", "instructions", "problem", observed, "torch has no fast kernels for this CPU", fp32)


def check_amx(subject: Subject) -> Finding:
    """Check that the kernel permits AMX tiles, which the CPU flags do not say."""
    if "amx_bf16" not in subject.cpu.isa:
        return Finding("amx", "AMX permission", "ok", "no AMX on this CPU", "nothing to permit")
    refused = request_amx()
    if refused is None:
        meaning = "bf16 products run in AMX tiles, several times AVX-512"
        return Finding("amx", "AMX permission", "ok", "granted", meaning)
    observed = f"the CPU has AMX, the kernel refuses it: {refused}"
    meaning = "oneDNN falls back to AVX-512, several times slower"
    fix = "Linux 5.16 or newer, and no sandbox (gVisor, old seccomp profiles) that hides arch_prctl"
    return Finding("amx", "AMX permission", "problem", observed, meaning, fix)


def request_amx() -> str | None:
    """Request AMX tile data as oneDNN does. Return None if granted, otherwise the error of the kernel."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, ctypes.c_ulong(_XFEATURE_XTILEDATA)) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def check_kernels(subject: Subject) -> Finding:
    """Compare the kernel that oneDNN reports for a bf16 product with the abilities of the CPU."""
    from aliquot.machine.matmul import matmul_kernel

    kernel, isa = matmul_kernel("bf16"), subject.cpu.isa
    observed = f"bf16 {kernel}, fp32 {matmul_kernel('fp32')}"
    best = "amx" if "amx_bf16" in isa else "avx512_core_bf16" if "avx512_bf16" in isa else None
    if best is None or best in kernel or "amx" in kernel:
        meaning = (
            "products run on the best kernel that this CPU has" if best else "matrix products use the available kernel"
        )
        return Finding("kernels", "matmul kernels", "ok", observed, meaning)
    fix = "install the torch of `pip install torch`; see `amx` for its permission"
    if limit := subject.environ.get("ONEDNN_MAX_CPU_ISA"):
        observed, fix = f"{observed} (ONEDNN_MAX_CPU_ISA={limit})", "unset ONEDNN_MAX_CPU_ISA"
    return Finding(
        "kernels", "matmul kernels", "warning", observed, f"the CPU has {best}, and torch does not use it", fix
    )


def check_cores(subject: Subject) -> Finding:
    """Check the cores that affinity (taskset, a cpuset) and the quota of the control group allow."""
    cpu = subject.cpu
    online = len(parse_cpu_list(read_text(subject.root / "sys/devices/system/cpu/online") or "")) or (
        os.cpu_count() or 1
    )
    allowed = sum(map(len, cpu.cores))
    quota = "no CPU quota" if cpu.quota is None else f"a quota of {cpu.quota:g} CPUs"
    observed = f"{len(cpu.cores)} physical cores, {allowed} of {online} logical CPUs allowed, {quota}"
    level: Level = "ok"
    meaning, fix = f"{cpu.usable_cores} threads can compute at once", ""
    if cpu.quota is not None and cpu.quota < 1:
        level, meaning = "problem", "less than one CPU: training stalls most of the time"
        fix = "raise the container's CPU limit"
    elif allowed < online:
        level, meaning = "warning", f"{online - allowed} CPUs are not available to this process; {meaning}"
        fix = "unless this is intended, start without taskset, or widen the cpuset"
    elif cpu.is_throttled and cpu.quota is not None:
        level, meaning = "warning", f"{meaning}, and ranks are not pinned, because other containers use the same cores"
        fix = "a whole number of CPUs, request = limit, and the kubelet's static CPU manager; or a node of its own"
    return Finding("cores", "cores", level, observed, meaning, fix)


def check_smt(subject: Subject) -> Finding:
    """Check whether logical CPUs share cores with somebody else."""
    cores = {sibling_cpus(cpu, subject.root) for cpu in subject.allowed}
    threads = max(len(core) for core in cores)
    observed = f"{threads} hardware thread{'s' if threads > 1 else ''} a core"
    if threads == 1:
        return Finding("smt", "SMT", "ok", observed, "every logical CPU is a core of its own")
    halves = sum(1 for core in cores if not core <= subject.allowed)
    if halves:
        meaning = f"{halves} of {len(cores)} cores are shared: a process on their second thread halves the speed"
        fix = "give whole cores (the kubelet's full-pcpus-only), or an even number of CPUs with their siblings"
        return Finding("smt", "SMT", "warning", observed, meaning, fix)
    return Finding("smt", "SMT", "ok", observed, "a matmul fills a core: ranks take one thread of each")


def check_numa(subject: Subject) -> Finding:
    """Check the NUMA nodes, and whether a process may prefer memory of one."""
    nodes = sorted(set(numa_nodes(subject.root).get(cpu, 0) for cpu in subject.allowed))
    if len(nodes) == 1:
        return Finding("numa", "NUMA", "ok", "one NUMA node", "memory access is uniform")
    observed = f"{len(nodes)} NUMA nodes with {', '.join(str(len(cores)) for cores in subject.cpu.cores_by_node)} cores"
    meaning = "ranks stay on one node, which has a copy of the weights; launch.ranks: auto starts at least one per node"
    if has_memory_policy():
        observed += ", a memory policy is set (numactl?)"
        return Finding(
            "numa", "NUMA", "ok", observed, "aliquot keeps the policy and does not choose a node for a rank's memory"
        )
    if not set_preferred_node(nodes[0]):
        fix = "allow set_mempolicy (CAP_SYS_NICE, or a seccomp profile with it)"
        meaning = "the kernel refuses a memory policy: a rank's memory may lie on another node"
        return Finding("numa", "NUMA", "warning", observed, meaning, fix)
    set_preferred_node(None)
    return Finding("numa", "NUMA", "ok", observed, meaning)


def check_threads(subject: Subject) -> Finding:
    """Compare the threads of all ranks with the cores."""
    cpu = subject.cpu
    ranks, _ = max_cpu_ranks(cpu, memory_limit(subject.root))
    try:
        threads, source = threads_per_rank(LaunchSection(), subject.environ, cpu, ranks)
    except UserError as error:
        return Finding("threads", "threads", "problem", str(error), "no run starts", "correct or unset it")
    observed = f"{ranks} x {threads} threads for {cpu.usable_cores} cores, from {source}"
    used, fix = ranks * threads, f"unset {source}: threads are chosen to fill the cores"
    if source.endswith("_THREADS") and threads < cpu.usable_cores and (threads == 1 or used < cpu.usable_cores):
        meaning = (
            f"{source}={threads}: a rank computes on {threads} of {cpu.usable_cores} cores, however many ranks run"
        )
        return Finding("threads", "threads", "warning", observed, meaning, fix)
    if used > cpu.usable_cores:
        meaning = "threads take turns on a core, and every operation waits for the slowest thread"
        return Finding("threads", "threads", "warning", observed, meaning, fix)
    return Finding(
        "threads", "threads", "ok", observed, "`launch.ranks: auto` starts these ranks, if there is work for all"
    )


def check_pinning(subject: Subject) -> Finding:
    """Check whether ranks can be pinned to cores of their own."""
    cpu = subject.cpu
    ranks, _ = max_cpu_ranks(cpu, memory_limit(subject.root))
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError as error:
        fix = "allow sched_setaffinity in the sandbox"
        return Finding(
            "pinning", "pinning", "warning", f"refused: {error.strerror}", "the kernel moves ranks between cores", fix
        )
    sets = core_sets(cpu, ranks, max(1, cpu.usable_cores // ranks))
    if ranks == 1:
        return Finding("pinning", "pinning", "ok", "one rank: no pinning needed", "it may use every core")
    if not sets[0]:
        observed, meaning = (
            "not possible under a CPU quota",
            "ranks may meet on a core: a few percent, and uneven steps",
        )
        fix = "a whole number of CPUs, request = limit, and the kubelet's static CPU manager"
        return Finding("pinning", "pinning", "warning", observed, meaning, fix)
    observed = " | ".join(format_cpu_list(cpus) for cpus in sets)
    return Finding("pinning", "pinning", "ok", f"cores {observed}", "every rank has cores and caches of its own")
