"""Memory of a rank on its own NUMA node: the kernel's policy for pages that its threads touch first.

A thread that stays on its cores gets pages of their node anyway, as long as the node has any. The policy is that of the
calling thread and of those that it starts from then on, for private memory and for its pages of shared memory. It is a
preference: when the node is full, pages of another one are slower, but a binding would have the process killed.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Collection
from pathlib import Path

from aliquot.machine.cpu import numa_nodes

# glibc has no functions for them; libnuma's are these calls.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_MASK_BITS = 1024


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
