"""Signals and kills during a slow save or export: a bounded end, one line, the right exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs import HEARS_CTRL_C, wait_until, write_config
from tests.slow_disk import slow_disk

pytestmark = pytest.mark.long

FOR_EVER_S = 600.0
STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """End the processes of a failed test."""
    yield
    while STARTED:
        STARTED.pop().kill()


def started(folder: Path, below: str, seconds: float, **sections: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a run, and return once the run waits for the disk."""
    config = write_config(folder, **sections)
    process = subprocess.Popen(
        [*HEARS_CTRL_C, sys.executable, "-m", "aliquot", "train", str(config)],
        env=slow_disk(folder, below, seconds), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    STARTED.append(process)
    wait_until((folder / "now").exists)
    return process


def stopped(process: subprocess.Popen[str], exit_code: int = 143) -> str:
    """Send SIGTERM to a run, which must end with this exit code, and return the errors that it printed."""
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == exit_code, errors
    return errors


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_in_the_export_loses_nothing(tmp_path: Path, ranks: int) -> None:
    process = started(tmp_path, "/.export.", FOR_EVER_S, launch={"ranks": ranks})
    errors = stopped(process)
    assert errors.count("\n") == 1 and "stopped by SIGTERM after step 6, the last, which is saved" in errors


@pytest.mark.parametrize("ranks", [1, 2])
def test_signal_in_sole_export_saves_a_checkpoint(tmp_path: Path, ranks: int) -> None:
    """Every file of the export takes a second, and the signal comes at the first."""
    checkpoint = {"last": False, "grace_s": 30}
    process = started(tmp_path, "/.export.", 1.0, launch={"ranks": ranks}, checkpoint=checkpoint)
    errors = stopped(process)
    assert "stopped by SIGTERM after step 6, which is saved: start again to continue" in errors
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000006"]
    assert not [path.name for path in (tmp_path / "run").iterdir() if "export" in path.name]


@pytest.mark.parametrize("ranks", [1, 2])
def test_signal_late_in_export_lets_export_finish(tmp_path: Path, ranks: int) -> None:
    process = started(tmp_path, "model.safetensors", 2.0, launch={"ranks": ranks}, checkpoint={"last": False})
    (tmp_path / "now").unlink()  # its header
    wait_until((tmp_path / "now").exists)
    errors = stopped(process)
    assert "stopped by SIGTERM after step 6, the last, which is exported" in errors
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


def test_short_grace_begins_no_second_save(tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "train": {"max_steps": 100_000, "lr_scheduler_type": "constant"},
        "checkpoint": {"every": 2, "grace_s": 16},
    }
    process = started(tmp_path, "/manifest.json", 10.0, **sections)
    errors = stopped(process)
    assert "saved is step 2, because checkpoint.grace_s was too short for another" in errors
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_hanging_save_ends_with_the_grace_period(tmp_path: Path) -> None:
    process = started(tmp_path, "checkpoints", FOR_EVER_S, checkpoint={"every": 2, "grace_s": 3})
    assert "not saved within checkpoint.grace_s = 3 s of SIGTERM" in stopped(process, 1)


def test_second_ctrl_c_ends_an_elastic_node(tmp_path: Path) -> None:
    """The ranks are in process groups of their own: the node signals them once, the leader a second time."""
    launch = {"ranks": 1, "nodes": "1:2"}
    process = started(tmp_path, "checkpoints", FOR_EVER_S, checkpoint={"every": 2, "grace_s": 300}, launch=launch)
    process.send_signal(signal.SIGINT)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130, errors
    assert "SIGINT: a second signal ends this node's ranks at once" in errors
    assert "SIGINT, told to stop again: this node's ranks are ended, saved or not" in errors


def test_rank_killed_while_its_save_hangs_is_named(tmp_path: Path) -> None:
    process = started(tmp_path, "checkpoints", FOR_EVER_S, checkpoint={"every": 2}, launch={"ranks": 2})
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in children if child.environ().get("RANK") == "1"]
    os.kill(ranks[0].pid, signal.SIGKILL)
    killed = time.monotonic()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and time.monotonic() - killed < 60  # the other rank has its grace
    assert "rank 1 was killed by SIGKILL" in errors, errors
