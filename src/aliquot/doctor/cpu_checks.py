"""Checks of the CPU: instructions, kernels, cores, threads, pinning and NUMA."""

from __future__ import annotations

import ctypes
import os

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import UserError
from aliquot.core.number_format import count_of
from aliquot.distributed.auto_ranks import max_cpu_ranks
from aliquot.distributed.numa_binding import core_sets, has_memory_policy, set_preferred_node
from aliquot.distributed.topology import threads_per_rank
from aliquot.doctor.finding import Case, Finding, Subject, check, conclude
from aliquot.machine.cgroup import read_text
from aliquot.machine.cpu import faster_precision, format_cpu_list, numa_nodes, parse_cpu_list, sibling_cpus
from aliquot.machine.memory import memory_limit

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@check("isa", "instructions")
def check_isa(subject: Subject) -> Finding:
    """Check whether the CPU has fast instructions for matrix products."""
    cpu, fast = subject.cpu, faster_precision(subject.cpu.isa)
    return conclude(
        f"{cpu.model}: {', '.join(cpu.isa) or 'none of AMX, AVX-512, AVX2'}",
        Case(
            not cpu.isa,
            "problem",
            meaning="torch has no fast kernels for this CPU",
            fix="take a CPU with AVX2, AVX-512 or AMX",
        ),
        ok=f"products are fastest in {fast}: `train.precision: auto` is {fast}",
    )


@check("amx", "AMX permission")
def check_amx(subject: Subject) -> Finding:
    """Check that Linux permits AMX tiles, because the CPU flags do not show this permission."""
    if "amx_bf16" not in subject.cpu.isa:
        return Finding("ok", "no AMX on this CPU", meaning="nothing to permit")
    # Request permission for AMX tile data, as oneDNN does.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, ctypes.c_ulong(_XFEATURE_XTILEDATA)) == 0:
        return Finding("ok", "granted", meaning="bf16 products run in AMX tiles, several times AVX-512")
    return Finding(
        "problem",
        f"the CPU has AMX, the kernel refuses it: {os.strerror(ctypes.get_errno())}",
        meaning="oneDNN falls back to AVX-512, several times slower",
        fix="Linux 5.16 or newer, and no sandbox (gVisor, old seccomp profiles) that hides arch_prctl",
    )


@check("kernels", "matmul kernels")
def check_kernels(subject: Subject) -> Finding:
    """Compare the kernel that oneDNN reports for a bf16 product with the abilities of the CPU."""
    from aliquot.machine.matmul import matmul_kernel

    kernel, isa, limit = matmul_kernel("bf16"), subject.cpu.isa, subject.environ.get("ONEDNN_MAX_CPU_ISA")
    observed = f"bf16 {kernel}, fp32 {matmul_kernel('fp32')}"
    best = "amx" if "amx_bf16" in isa else "avx512_core_bf16" if "avx512_bf16" in isa else None
    is_slow = best is not None and best not in kernel and "amx" not in kernel
    meaning = f"the CPU has {best}, and torch does not use it"
    return conclude(
        observed,
        Case(
            is_slow and limit,
            "warning",
            meaning,
            fix="unset ONEDNN_MAX_CPU_ISA",
            state=f"{observed} (ONEDNN_MAX_CPU_ISA={limit})",
        ),
        Case(is_slow, "warning", meaning, fix="install the torch of `pip install torch`; see `amx` for its permission"),
        ok="products run on the best kernel that this CPU has",
    )


@check("cores", "cores")
def check_cores(subject: Subject) -> Finding:
    """Check how many cores the process may use, by affinity (taskset, a cpuset) and by the quota of the cgroup."""
    cpu = subject.cpu
    online = parse_cpu_list(read_text(subject.root / "sys/devices/system/cpu/online") or "")
    hidden = (len(online) or os.cpu_count() or 1) - (allowed := sum(map(len, cpu.cores)))
    quota = "no CPU quota" if cpu.quota is None else f"a quota of {count_of(f'{cpu.quota:g}', 'CPU')}"
    meaning = f"{count_of(cpu.usable_cores, 'thread')} can compute at once"
    return conclude(
        f"{len(cpu.cores)} physical cores, {allowed} of {allowed + hidden} logical CPUs allowed, {quota}",
        Case(
            cpu.quota is not None and cpu.quota < 1,
            "problem",
            meaning="less than one CPU: training stalls most of the time",
            fix="raise the container's CPU limit",
        ),
        Case(
            hidden > 0,
            "warning",
            meaning=f"{count_of(hidden, 'CPU is', 'CPUs are')} not available to this process; {meaning}",
            fix="unless this is intended, start without taskset, or widen the cpuset",
        ),
        Case(
            cpu.is_throttled and cpu.quota is not None,
            "warning",
            meaning=f"{meaning}, and ranks are not pinned, because other containers use the same cores",
            fix="a whole number of CPUs, request = limit, and the kubelet's static CPU manager; or a node of its own",
        ),
        ok=meaning,
    )


@check("smt", "SMT")
def check_smt(subject: Subject) -> Finding:
    """Check whether other processes may use the second hardware threads of this process's cores."""
    cores = {sibling_cpus(cpu, subject.root) for cpu in subject.allowed}
    halves = sum(1 for core in cores if not core <= subject.allowed)
    return conclude(
        f"{count_of(max(map(len, cores)), 'hardware thread')} a core",
        Case(
            halves,
            "warning",
            meaning=f"{halves} of {len(cores)} cores are shared: a process on their second thread halves the speed",
            fix="give whole cores (the kubelet's full-pcpus-only), or an even number of CPUs with their siblings",
        ),
        ok="a matmul fills a core: ranks take one thread of each",
    )


@check("numa", "NUMA")
def check_numa(subject: Subject) -> Finding:
    """Check the NUMA nodes, and whether a process may prefer the memory of one node."""
    nodes = sorted(set(numa_nodes(subject.root).get(cpu, 0) for cpu in subject.allowed))
    if len(nodes) == 1:
        return Finding("ok", "one NUMA node", meaning="memory access is uniform")
    observed = f"{len(nodes)} NUMA nodes with {', '.join(str(len(cores)) for cores in subject.cpu.cores_by_node)} cores"
    if has_memory_policy():
        return Finding(
            "ok",
            f"{observed}, a memory policy is set (numactl?)",
            meaning="aliquot keeps the policy and does not choose a node for a rank's memory",
        )
    if not set_preferred_node(nodes[0]):
        return Finding(
            "warning",
            observed,
            meaning="the kernel refuses a memory policy: a rank's memory may lie on another node",
            fix="allow set_mempolicy (CAP_SYS_NICE, or a seccomp profile with it)",
        )
    set_preferred_node(None)
    return Finding(
        "ok",
        observed,
        meaning="ranks stay on one node, which has a copy of the weights; launch.ranks: auto starts at least one per"
        " node",
    )


@check("threads", "threads")
def check_threads(subject: Subject) -> Finding:
    """Compare the number of threads of all ranks with the number of cores."""
    cpu = subject.cpu
    ranks, _ = max_cpu_ranks(cpu, memory_limit(subject.root))
    try:
        threads, source = threads_per_rank(LaunchSection(), subject.environ, cpu, ranks)
    except UserError as error:
        return Finding("problem", str(error), meaning="no run starts", fix="correct or unset it")
    cores, used, fix = cpu.usable_cores, ranks * threads, f"unset {source}: threads are chosen to fill the cores"
    return conclude(
        f"{ranks} x {threads} threads for {cores} cores, from {source}",
        Case(
            source.endswith("_THREADS") and threads < cores and (threads == 1 or used < cores),
            "warning",
            meaning=f"{source}={threads}: a rank computes on {threads} of {cores} cores, however many ranks run",
            fix=fix,
        ),
        Case(
            used > cores,
            "warning",
            meaning="threads take turns on a core, and every operation waits for the slowest thread",
            fix=fix,
        ),
        ok="`launch.ranks: auto` starts these ranks, if there is work for all",
    )


@check("pinning", "pinning")
def check_pinning(subject: Subject) -> Finding:
    """Check whether each rank can be pinned to separate cores."""
    cpu = subject.cpu
    ranks, _ = max_cpu_ranks(cpu, memory_limit(subject.root))
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError as error:
        return Finding(
            "warning",
            f"refused: {error.strerror}",
            meaning="the kernel moves ranks between cores",
            fix="allow sched_setaffinity in the sandbox",
        )
    sets = core_sets(cpu, ranks, max(1, cpu.usable_cores // ranks))
    return conclude(
        f"cores {' | '.join(map(format_cpu_list, sets))}",
        Case(ranks == 1, "ok", state="one rank: no pinning needed", meaning="it may use every core"),
        Case(
            not sets[0],
            "warning",
            state="not possible under a CPU quota",
            meaning="ranks may meet on a core: a few percent, and uneven steps",
            fix="a whole number of CPUs, request = limit, and the kubelet's static CPU manager",
        ),
        ok="every rank has cores and caches of its own",
    )
