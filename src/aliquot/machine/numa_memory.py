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

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # glibc has no function for it; libnuma's is this call
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_MASK_BITS = 1024


def bind_memory(cpus: Collection[int], root: Path = Path("/")) -> bool:
    """Prefer memory of the one NUMA node that all `cpus` are on; else, and without `cpus`, take the default back.

    True: there is a preference now. A machine with one node needs none, and a container may forbid it.
    """
    node_of = numa_nodes(root)
    own = {node_of.get(cpu) for cpu in cpus} - {None}
    if len(set(node_of.values())) < 2:
        return False
    if len(own) != 1:
        prefer_node(None)
        return False
    return prefer_node(own.pop())


def prefer_node(node: int | None) -> bool:
    """Set this thread's memory policy; False where the kernel refuses."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if node is None:
        return int(libc.syscall(number, _MPOL_DEFAULT, None, ctypes.c_ulong(0))) == 0
    words = (ctypes.c_ulong * (_MASK_BITS // 64))()
    words[node // 64] = 1 << (node % 64)
    return int(libc.syscall(number, _MPOL_PREFERRED, words, ctypes.c_ulong(_MASK_BITS))) == 0
