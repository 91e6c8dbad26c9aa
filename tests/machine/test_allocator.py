"""The allocator: preloaded once, bounded in what it keeps, and freed memory goes back to the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aliquot.machine import allocator
from aliquot.machine.allocator import ALLOCATOR_VARIABLE, allocator_environment, training_allocator
from aliquot.machine.memory import private_bytes
from tests.tools import warm

MIB = 1 << 20
GPU_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def test_periodic_release_waits_for_steps_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(allocator.time, "monotonic", lambda: now)
    freed = allocator.PeriodicRelease(7)
    now += 1e6
    assert not freed.is_due(56)  # steps of hours
    assert freed.is_due(57)
    freed.release(57)
    now += 119
    assert not freed.is_due(5000)  # steps of milliseconds
    now += 1
    assert freed.is_due(5000)


def test_release_free_memory_returns_pages() -> None:
    freed = allocator.PeriodicRelease(0)
    blocks = [torch.ones(MIB // 8) for _ in range(200)]  # half a MiB each
    held = private_bytes()
    del blocks
    freed.release(1)
    assert held - private_bytes() > 50 * MIB


# Blocks of 1 MiB, each between two small ones that stay: freed, they cannot be given back from the end of the heap.
CODE = """
import ctypes, os, sys
from aliquot.machine.allocator import tune_glibc
from aliquot.machine.allocator import FreeMemoryLimit
from aliquot.machine.memory import private_bytes
MIB = 1 << 20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
tune_glibc()
os.environ.update(word.split("=") for word in sys.argv[2:])
kept = FreeMemoryLimit(int(sys.argv[1]) * MIB)
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
    clean = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", ALLOCATOR_VARIABLE)}
    command = [sys.executable, "-c", CODE, str(most_mib), *environ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
    return [int(word) for word in done.stdout.split()]


def test_free_memory_limit_releases_a_large_heap() -> None:
    used, freed, left = held(100)
    assert 195 <= used <= 210
    assert freed >= 195  # glibc keeps it
    assert left <= 15


def test_free_memory_limit_leaves_small_or_unmanaged_heaps() -> None:
    assert held(400)[2] >= 195
    assert held(100, f"{ALLOCATOR_VARIABLE}=none")[2] >= 195


def install(root: Path, name: str) -> Path:
    file = root / "usr/lib" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


def test_an_installed_allocator_is_preloaded_once(tmp_path: Path) -> None:
    jemalloc = install(tmp_path, "libjemalloc.so.2")
    assert allocator_environment({}, tmp_path)["LD_PRELOAD"] == str(jemalloc)
    tcmalloc = install(tmp_path, "libtcmalloc_minimal.so.4")
    environ = allocator_environment({"LD_PRELOAD": "/other.so"}, tmp_path)
    assert environ["LD_PRELOAD"] == f"{tcmalloc}:/other.so"
    assert environ["TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES"] == "8388608"
    own = {"TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES": "1"}
    assert allocator_environment(own, tmp_path)["TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES"] == "1"
    assert allocator_environment(environ, tmp_path) == environ


def test_chosen_allocator_is_kept(tmp_path: Path) -> None:
    install(tmp_path, "libtcmalloc.so.4")
    for chosen in (
        {"LD_PRELOAD": "/opt/libjemalloc.so.2"},
        {"LD_PRELOAD": "/libmimalloc.so"},
        {ALLOCATOR_VARIABLE: "none"},
    ):
        assert allocator_environment(chosen, tmp_path) == chosen


def test_no_installed_allocator_means_no_preload(tmp_path: Path) -> None:
    assert "LD_PRELOAD" not in allocator_environment({}, tmp_path)


def test_training_allocator_is_the_chosen_or_installed_one(tmp_path: Path) -> None:
    assert training_allocator({}, tmp_path) == "glibc"
    install(tmp_path, "libtcmalloc_minimal.so.4")
    assert training_allocator({}, tmp_path) == "tcmalloc"
    assert training_allocator({ALLOCATOR_VARIABLE: "none"}, tmp_path) == "glibc"
    assert training_allocator({ALLOCATOR_VARIABLE: "libjemalloc.so.2"}, tmp_path) == "jemalloc"


@pytest.mark.parametrize("environ", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": ""}])
@pytest.mark.parametrize("kernel", ["6.8.0-1021-aws", "6.6.87-microsoft-standard-WSL2"])
def test_gpu_memory_is_expandable_unless_the_user_or_wsl_forbids_it(environ: dict[str, str], kernel: str) -> None:
    """Also after torch has read its settings, as the first rank does when it reads the facts of its machine."""
    code = (
        "import platform, torch; from aliquot.machine.allocator import use_expandable_segments as use;"
        f"platform.release = lambda: {kernel!r}; settings = torch._C._accelerator_getAllocatorSettings;"
        "settings(); use(); print(settings())"
    )
    clean = {name: value for name, value in os.environ.items() if name not in GPU_VARIABLES}
    done = warm.run("-c", code, env=clean | environ)
    expected = "".join(environ.values()) if environ or "WSL" in kernel else "expandable_segments:True"
    assert done.stdout == f"{expected}\n", done.stderr


def test_restart_with_allocator_happens_once_with_arguments() -> None:
    code = (
        "import os, sys; from aliquot.machine.allocator import restart_with_allocator as r; r();"
        "print(os.getpid(), sys.argv[1:], os.environ.get('LD_PRELOAD', ''))"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", ALLOCATOR_VARIABLE)}
    process = subprocess.Popen([sys.executable, "-c", code, "a b"], stdout=subprocess.PIPE, text=True, env=environ)
    output = process.communicate(timeout=60)[0]
    assert output.split(" ", 1) == [
        str(process.pid),
        f"['a b'] {allocator_environment(environ).get('LD_PRELOAD', '')}\n",
    ]
