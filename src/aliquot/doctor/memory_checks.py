"""Checks of memory and limits: memory, huge pages, allocator, /dev/shm, file descriptors, locked memory."""

from __future__ import annotations

import os
import re
import resource

from aliquot.core.number_format import gib
from aliquot.doctor.finding import Case, Finding, Subject, check, conclude
from aliquot.machine.allocator import ALLOCATOR_VARIABLE, allocator_environment
from aliquot.machine.cgroup import control_groups, read_text
from aliquot.machine.memory import kib_fields, memory_limit, too_little_lockable

_LEAST_BYTES, _GOOD_BYTES = 2 << 30, 6 << 30
_SHM_BYTES = 1 << 30


@check("memory", "memory")
def check_memory(subject: Subject) -> Finding:
    """Check the memory limit of this process, and the free memory below it."""
    ram = kib_fields(subject.root / "proc/meminfo")
    limit, left = memory_limit(subject.root), _available(subject, ram.get("MemAvailable", 0))
    source = "RAM" if limit == ram["MemTotal"] else "a control group"
    fix = "raise the container's memory limit, or end other processes that use memory"
    return conclude(
        f"{gib(limit)} by {source}, {gib(left)} of it free",
        Case(
            left < _LEAST_BYTES,
            "problem",
            meaning="too little for one rank: Python, torch and a small model take about 2 GiB",
            fix=fix,
        ),
        Case(left < _GOOD_BYTES, "warning", meaning="enough for small models with few ranks only", fix=fix),
        ok="16 bytes per parameter over all ranks, and activations, must fit",
    )


def _available(subject: Subject, ram_bytes: int) -> int:
    """Return the bytes that can still be allocated, of `ram_bytes` and within the limit of every control group."""
    free = [ram_bytes]
    for group in control_groups("memory", subject.root):
        for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, use = (read_text(group / name) for name in names)
            if limit not in (None, "max") and use is not None:
                # The kernel reclaims the page cache when memory is needed.
                statistics = read_text(group / "memory.stat") or ""
                cache = re.search(r"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)
                free.append(int(limit or 0) - int(use) + (int(cache[1]) if cache else 0))
    return max(0, min(free))


@check("huge-pages", "transparent huge pages")
def check_huge_pages(subject: Subject) -> Finding:
    """Check transparent huge pages, which save page faults for new tensors."""
    setting = re.search(r"\[(\w+)\]", read_text(subject.root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return conclude(
        setting[1] if setting else "not reported by this kernel",
        Case(
            setting and setting[1] == "never",
            "warning",
            meaning="pages of large tensors are faulted in 4 KiB at a time: the first steps are slower",
            fix="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, on the node",
        ),
        ok="the setting changes a step by a few percent at most",
    )


@check("allocator", "allocator")
def check_allocator(subject: Subject) -> Finding:
    """Check whether an allocator is installed that keeps freed memory for later tensors."""
    meaning = (
        "fresh pages cost a training step up to a fifth of its time; glibc is told to keep more, which helps partly"
    )
    environ = {name: value for name, value in subject.environ.items() if name != ALLOCATOR_VARIABLE}
    preloaded = allocator_environment(environ, subject.root).get("LD_PRELOAD", "")
    return conclude(
        f"ranks start with {preloaded}",
        Case(
            subject.environ.get(ALLOCATOR_VARIABLE) == "none",
            "warning",
            meaning,
            fix=f"unset {ALLOCATOR_VARIABLE}",
            state=f"{ALLOCATOR_VARIABLE}=none: left alone",
        ),
        Case(
            not re.search("tcmalloc|jemalloc|mimalloc", preloaded),
            "warning",
            meaning,
            fix="apt-get install libtcmalloc-minimal4, or dnf install gperftools-libs",
            state="neither tcmalloc nor jemalloc is installed",
        ),
        ok="the allocator keeps freed memory for the next step",
    )


@check("shm", "/dev/shm")
def check_shm(subject: Subject) -> Finding:
    """Check /dev/shm, which has 64 MiB in a pod unless more is mounted."""
    directory = subject.root / "dev/shm"
    needs = "aliquot's own ranks use anonymous shared memory and need none; DeepSpeed's and NCCL's do"
    fix = "mount an emptyDir with medium: Memory at /dev/shm (it counts against the memory limit); docker: --shm-size"
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return Finding("warning", "missing or not writable", meaning=needs, fix=fix)
    stat = os.statvfs(directory)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    return conclude(
        f"{gib(total)}, {gib(free)} free",
        Case(free < _SHM_BYTES, "warning", meaning=needs, fix=fix),
        ok="enough for DeepSpeed and NCCL; aliquot's own ranks need none",
    )


@check("open-files", "open files")
def check_open_files(subject: Subject) -> Finding:
    """Check the limit of file descriptors, for sockets to every rank, checkpoint files and shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = "ulimit -n 65536; in a service: LimitNOFILE=65536"
    return conclude(
        f"{soft} open files (up to {hard})",
        Case(
            soft < 256,
            "problem",
            meaning="a rank holds a socket to every other and a file a checkpoint shard: it fails while it starts or"
            " saves",
            fix=fix,
        ),
        Case(
            soft < 1024,
            "warning",
            meaning="enough for one machine; more nodes and more checkpoint shards need more",
            fix=fix,
        ),
        ok="enough for sockets and checkpoint files",
    )


@check("locked-memory", "locked memory")
def check_locked_memory(subject: Subject) -> Finding:
    """Check the limit of locked memory, which network cards with RDMA need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return conclude(
        "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:g} MiB",
        Case(
            too_little_lockable(subject.root) is not None,
            "problem",
            meaning="EFA and InfiniBand register memory and fail without",
            fix="ulimit -l unlimited; LimitMEMLOCK=infinity for the container runtime",
        ),
        ok="enough for RDMA, or no RDMA card",
    )
