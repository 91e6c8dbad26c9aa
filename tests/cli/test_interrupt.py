"""Ctrl-C, and SIGTERM to the first process of a container, before a command has begun to do anything."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.runs import HEARS_CTRL_C, free_port, wait_until, write_config

STOPPED = "aliquot: stopped by SIGINT\n"
# As numpy does with its extension modules, whatever is raised in them.
SWALLOWS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except BaseException:
    pass
"""


@pytest.mark.parametrize("module", ["raise KeyboardInterrupt\n", SWALLOWS], ids=["as it is", "swallowed"])
def test_ctrl_c_during_imports_is_one_line(tmp_path: Path, module: str) -> None:
    (tmp_path / "typer.py").write_text(module)
    command = [*HEARS_CTRL_C, sys.executable, "-m", "aliquot", "--version"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", STOPPED)


TELLS = """
import pathlib, platform
node = platform.node
def told():
    pathlib.Path({file!r}).touch()
    return node()
platform.node = told
"""


def waiting_rank(folder: Path, *before: str) -> subprocess.Popen[str]:
    """One of two ranks, started by hand, that waits for the other: it has told its name."""
    environ = {
        **os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(folder),
    }  # fmt: skip
    now = folder / "now"
    (folder / "sitecustomize.py").write_text(TELLS.format(file=str(now)))
    command = [*HEARS_CTRL_C, *before, sys.executable, "-m", "aliquot", "train", str(write_config(folder))]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(now.exists)
    time.sleep(0.5)
    return process


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever it has heard; its ranks end with it."""
    try:
        yield
    finally:
        process.kill()


def test_ctrl_c_in_a_waiting_rank_is_one_line(tmp_path: Path) -> None:
    process = waiting_rank(tmp_path)
    with ended(process):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, STOPPED)


UNSHARED = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.mark.long
def test_process_1_of_a_container_obeys_sigterm(tmp_path: Path) -> None:
    """The kernel keeps from it what it has no handler for."""
    if shutil.which(UNSHARED[0]) is None or subprocess.run([*UNSHARED, "true"], check=False).returncode:
        pytest.skip("nobody gets the process number 1 here: for a namespace one must be root")
    process = waiting_rank(tmp_path, *UNSHARED)
    with ended(process):
        (child,) = psutil.Process(process.pid).children()
        child.terminate()
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (143, STOPPED.replace("SIGINT", "SIGTERM"))


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 2.5])
def test_ctrl_c_in_a_launcher_is_one_line(tmp_path: Path, after_s: float) -> None:
    """Ctrl-C, which all processes of a terminal's group get."""
    config = write_config(tmp_path, train={"max_steps": 100_000}, launch={"ranks": 2})
    process = subprocess.Popen(
        [*HEARS_CTRL_C, sys.executable, "-m", "aliquot", "train", str(config), "--quiet"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with ended(process):
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert errors.count("\n") == 1 and errors.startswith("aliquot: stopped by SIGINT"), errors
