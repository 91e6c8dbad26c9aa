from __future__ import annotations

import os
import subprocess
import sys

from aliquot.machine.allocator import VARIABLE

MIB = 1 << 20
# Blocks of 1 MiB, each between two small ones that stay: freed, they cannot be given back from the end of the heap.
CODE = """
import ctypes, os, sys
from aliquot.distributed.allocator_preload import tune
from aliquot.machine.kept_memory import KeptMemory
from aliquot.machine.memory import private_bytes
MIB = 1 << 20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
tune()
os.environ.update(word.split("=") for word in sys.argv[2:])
kept = KeptMemory(int(sys.argv[1]) * MIB)
before = private_bytes()
large = []
for _ in range(200):
    large.append(libc.malloc(MIB))
    ctypes.memset(large[-1], 1, MIB)
    libc.malloc(64)
kept.check()
used = private_bytes() - before
for block in large:
    libc.free(block)
freed = private_bytes() - before
kept.check()
print(used // MIB, freed // MIB, (private_bytes() - before) // MIB)
"""


def held(most_mib: int, *environ: str) -> list[int]:
    """MiB more than at first: with 200 in use, once they are free, and after a check. `environ`: set after tuning."""
    clean = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", VARIABLE)}
    command = [sys.executable, "-c", CODE, str(most_mib), *environ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
    return [int(word) for word in done.stdout.split()]


def test_what_became_too_much_is_given_back() -> None:
    used, freed, left = held(100)
    assert 195 <= used <= 210
    assert freed >= 195  # glibc keeps it
    assert left <= 15


def test_less_is_kept_and_nothing_where_nobody_may_touch_it() -> None:
    assert held(400)[2] >= 195
    assert held(100, f"{VARIABLE}=none")[2] >= 195
