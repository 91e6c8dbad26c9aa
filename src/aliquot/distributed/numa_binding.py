"""NUMA binding: divide a machine's cores among its ranks, pin a rank to its cores, and prefer memory of their node.

The kernel gives a pinned thread pages of the thread's NUMA node as long as that node has free pages. The memory policy
applies to the calling thread and to threads that the calling thread starts later. The policy covers private memory, and
pages of shared memory that these threads touch first. The policy is a preference, not a strict binding: on a full node,
a strict binding would get the process killed, whereas pages of another node are only slower.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from aliquot.machine.cpu import CpuFacts, numa_nodes

# Numbers of the system calls for memory policies, because glibc has no wrapper functions for these calls.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_MASK_BITS = 1024


def core_sets(cpu: CpuFacts, local_ranks: int, threads: int) -> list[tuple[int, ...]]:
    """Return the logical CPUs to pin each local rank to; all sets are empty if ranks are not to be pinned.

    Usually the sets are disjoint and have one CPU per physical core. A single rank is not pinned. Ranks get no
    exclusive cores if the machine has fewer cores than ranks or threads. Ranks under a CPU quota get none either,
    because all containers with a quota would pin their ranks to the same first cores. Ranks without exclusive cores are
    pinned to all CPUs of one NUMA node, if there are several nodes and enough ranks for all nodes.
    """
    if local_ranks == 1:
        return [()]
    shares = _ranks_per_node(cpu, local_ranks)
    if not cpu.is_throttled and len(cpu.cores) >= local_ranks:
        sets = cores_per_rank(cpu, local_ranks)
        if threads <= min(map(len, sets)):
            return sets
    if len(shares) == 1:
        return [()] * local_ranks
    node_cpus = [tuple(sorted(number for core in cores for number in core)) for cores in cpu.cores_by_node]
    return [cpus for cpus, share in zip(node_cpus, shares, strict=True) for _ in range(share)]


def cores_of_single_rank(cpu: CpuFacts, threads: int) -> tuple[int, ...]:
    """Return one CPU per physical core, for a rank to which another program has given all these cores.

    An empty tuple means that the rank is not to be pinned.
    """
    (cores,) = cores_per_rank(cpu, 1)
    return cores if threads <= len(cores) and not cpu.is_throttled else ()


def cores_per_rank(cpu: CpuFacts, local_ranks: int) -> list[tuple[int, ...]]:
    """Divide the physical cores among the ranks, one logical CPU per core. `local_ranks` is at most the cores."""
    shares = _ranks_per_node(cpu, local_ranks)
    nodes = cpu.cores_by_node if len(shares) > 1 else [list(cpu.cores)]
    sets = []
    for cores, share in zip(nodes, shares, strict=True):
        edges = [i * len(cores) // share for i in range(share + 1)]
        sets += [tuple(core[0] for core in cores[edges[i] : edges[i + 1]]) for i in range(share)]
    return sets


def _ranks_per_node(cpu: CpuFacts, local_ranks: int) -> list[int]:
    """Return the number of ranks on every NUMA node, in proportion to the node's cores.

    If there are more nodes than ranks, the only element is `local_ranks`.
    """
    sizes = [len(cores) for cores in cpu.cores_by_node]
    if local_ranks < len(sizes):
        return [local_ranks]
    shares = [1] * len(sizes)
    for _ in range(local_ranks - len(sizes)):  # every further rank goes to the node with the most cores per rank
        shares[max(range(len(sizes)), key=lambda node: sizes[node] / (shares[node] + 1))] += 1
    return shares


def pin_process(cores: tuple[int, ...]) -> None:
    """Pin all threads of this process to the logical CPUs `cores`, including threads that libraries have started."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(task.name), cores)


def bind_memory(cpus: Collection[int], root: Path = Path("/")) -> bool:
    """Prefer memory of the NUMA node of `cpus`. Return whether that policy is now set.

    No policy is set if the machine has one NUMA node, if `cpus` lie on several nodes, if the container forbids a
    policy, or if the user has chosen a policy with numactl.
    """
    node_of = numa_nodes(root)
    nodes = {node_of.get(cpu) for cpu in cpus} - {None}
    if len(set(node_of.values())) < 2 or len(nodes) != 1 or has_memory_policy():
        return False
    return set_preferred_node(nodes.pop())


def has_memory_policy() -> bool:
    """Whether this thread has a memory policy other than the kernel's default."""
    number, mode = _GET_MEMPOLICY.get(platform.machine()), ctypes.c_int(_MPOL_DEFAULT)
    if number is not None:
        ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return mode.value != _MPOL_DEFAULT


def set_preferred_node(node: int | None) -> bool:
    """Set this thread's preferred NUMA node, or the default policy for None. Return False if the kernel refuses."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None)
    if node is None:
        return int(libc.syscall(number, _MPOL_DEFAULT, None, ctypes.c_ulong(0))) == 0
    words = (ctypes.c_ulong * (_MASK_BITS // 64))()
    words[node // 64] = 1 << (node % 64)
    return int(libc.syscall(number, _MPOL_PREFERRED, words, ctypes.c_ulong(_MASK_BITS))) == 0
