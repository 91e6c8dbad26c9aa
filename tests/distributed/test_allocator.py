from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from aliquot.distributed.allocator_preload import with_allocator
from aliquot.machine.allocator import VARIABLE
from aliquot.machine.kernels import matmul_kernel


def install(root: Path, name: str) -> Path:
    file = root / "usr/lib" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


def test_an_installed_allocator_is_preloaded_once(tmp_path: Path) -> None:
    jemalloc = install(tmp_path, "libjemalloc.so.2")
    assert with_allocator({}, tmp_path)["LD_PRELOAD"] == str(jemalloc)
    tcmalloc = install(tmp_path, "libtcmalloc_minimal.so.4")
    environ = with_allocator({"LD_PRELOAD": "/other.so"}, tmp_path)
    assert environ["LD_PRELOAD"] == f"{tcmalloc}:/other.so"
    assert environ["TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES"] == "8388608"
    own = {"TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES": "1"}
    assert with_allocator(own, tmp_path)["TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES"] == "1"
    assert with_allocator(environ, tmp_path) == environ


def test_a_persons_choice_stands(tmp_path: Path) -> None:
    install(tmp_path, "libtcmalloc.so.4")
    for chosen in ({"LD_PRELOAD": "/opt/libjemalloc.so.2"}, {"LD_PRELOAD": "/libmimalloc.so"}, {VARIABLE: "none"}):
        assert with_allocator(chosen, tmp_path) == chosen


def test_without_one_nothing_is_preloaded(tmp_path: Path) -> None:
    assert "LD_PRELOAD" not in with_allocator({}, tmp_path)


def test_a_process_restarts_itself_once_with_its_arguments() -> None:
    code = (
        "import os, sys; from aliquot.distributed.allocator_preload import restart_with_allocator as r; r();"
        "print(os.getpid(), sys.argv[1:], os.environ.get('LD_PRELOAD', ''))"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", VARIABLE)}
    process = subprocess.Popen([sys.executable, "-c", code, "a b"], stdout=subprocess.PIPE, text=True, env=environ)
    output = process.communicate(timeout=60)[0]
    assert output.split(" ", 1) == [str(process.pid), f"['a b'] {with_allocator(environ).get('LD_PRELOAD', '')}\n"]


def test_the_kernel_is_what_onednn_reports(capfd: object) -> None:
    kernel = matmul_kernel("bf16")
    assert kernel and "onednn" not in kernel
    print("standard output is back")
    assert "standard output is back" in capfd.readouterr().out  # type: ignore[attr-defined]
