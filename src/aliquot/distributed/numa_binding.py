"""NUMA binding: which cores each rank of a machine gets, and keeping a rank and its memory on them.

A thread that stays on its cores gets pages of their node anyway, as long as the node has any. The policy is that of the
calling thread and of those that it starts from then on, for private memory and for its pages of shared memory. It is a
preference: when the node is full, pages of another one are slower, but a binding would have the process killed.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from aliquot.machine.cpu import CpuFacts, numa_nodes

# glibc has no functions for them; libnuma's are these calls.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_MASK_BITS = 1024


def core_sets(cpu: CpuFacts, local_ranks: int, threads: int) -> list[tuple[int, ...]]:
    """Sets of logical CPUs, one a local rank, as a rule disjoint and one CPU a physical core; all empty: do not pin.

    Ranks get no cores of their own where there is only one rank, where there are more ranks or threads than cores, and
    under a quota: other containers use the same cores, and all of them would crowd onto the first ones. On several
    NUMA nodes such ranks are still kept to all CPUs of one node each.
    """
    if local_ranks == 1:
        return [()]
    shares = _ranks_of_nodes(cpu, local_ranks)
    if not cpu.is_throttled and len(cpu.cores) >= local_ranks:
        own = divided_cores(cpu, local_ranks)
        if threads <= min(map(len, own)):
            return own
    if len(shares) == 1:
        return [()] * local_ranks
    whole = [tuple(sorted(number for core in cores for number in core)) for cores in cpu.cores_by_node]
    return [cpus for cpus, share in zip(whole, shares, strict=True) for _ in range(share)]


def first_cpus(cpu: CpuFacts, threads: int) -> tuple[int, ...]:
    """One CPU of every physical core, for a rank that has cores of its own; empty: do not pin."""
    (own,) = divided_cores(cpu, 1)
    return own if threads <= len(own) and not cpu.is_throttled else ()


def divided_cores(cpu: CpuFacts, local_ranks: int) -> list[tuple[int, ...]]:
    """The first CPU of every physical core, divided among at most as many ranks as there are cores."""
    shares = _ranks_of_nodes(cpu, local_ranks)
    nodes = cpu.cores_by_node if len(shares) > 1 else [list(cpu.cores)]
    sets = []
    for cores, share in zip(nodes, shares, strict=True):
        edges = [i * len(cores) // share for i in range(share + 1)]
        sets += [tuple(core[0] for core in cores[edges[i] : edges[i + 1]]) for i in range(share)]
    return sets


def _ranks_of_nodes(cpu: CpuFacts, local_ranks: int) -> list[int]:
    """How many ranks each NUMA node has, by its cores and at least one; a single number: too few ranks to divide."""
    sizes = [len(cores) for cores in cpu.cores_by_node]
    if local_ranks < len(sizes):
        return [local_ranks]
    shares = [1] * len(sizes)
    for _ in range(local_ranks - len(sizes)):  # each further one to the node with the most cores for it
        shares[max(range(len(sizes)), key=lambda node: sizes[node] / (shares[node] + 1))] += 1
    return shares


def pin(cores: tuple[int, ...]) -> None:
    """Confine this process, the threads that libraries have started already included, to these logical CPUs."""
    for thread in _threads():
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(thread, cores)


def _threads() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        yield int(task.name)


def bind_memory(cpus: Collection[int], root: Path = Path("/")) -> bool:
    """Prefer memory of the one NUMA node that all `cpus` are on. True: so it is from now on.

    A machine with one node needs no preference, a container may forbid it, and what a person has chosen by numactl
    stands.
    """
    node_of = numa_nodes(root)
    own = {node_of.get(cpu) for cpu in cpus} - {None}
    if len(set(node_of.values())) < 2 or len(own) != 1 or has_policy():
        return False
    return prefer_node(own.pop())


def has_policy() -> bool:
    """Whether this thread has a memory policy other than the kernel's default."""
    number, mode = _GET_MEMPOLICY.get(platform.machine()), ctypes.c_int(_MPOL_DEFAULT)
    if number is not None:
        ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return mode.value != _MPOL_DEFAULT


def prefer_node(node: int | None) -> bool:
    """Set this thread's memory policy, None: to the default; False where the kernel refuses."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None)
    if node is None:
        return int(libc.syscall(number, _MPOL_DEFAULT, None, ctypes.c_ulong(0))) == 0
    words = (ctypes.c_ulong * (_MASK_BITS // 64))()
    words[node // 64] = 1 << (node % 64)
    return int(libc.syscall(number, _MPOL_PREFERRED, words, ctypes.c_ulong(_MASK_BITS))) == 0
