"""Signals in the last step and after it: the weights are kept, and the last line is true."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import aliquot
from aliquot.checkpoint import save
from aliquot.core.errors import StorageError
from aliquot.distributed.signals import Terminated
from aliquot.observe.recorder import Recorder
from aliquot.run import export_run, shutdown
from aliquot.run.shutdown import StopPoll
from tests.runs import curve, has_steps, other_text, wait_for, write_config


def stopped_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Send SIGTERM after the ranks have exchanged their reports of that step."""
    end = Recorder.end

    def ended(self: Recorder, *arguments: Any) -> None:
        end(self, *arguments)
        if self._done == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until it is heard

    monkeypatch.setattr(Recorder, "end", ended)


def run(file: Path, *overrides: str) -> aliquot.Result:
    return aliquot.train(aliquot.read_config(file, list(overrides)))


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("step-*"))


def test_signal_saves_weights_that_only_an_export_would_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_config(tmp_path, train={"max_steps": 3}, checkpoint={"every": 0, "last": False})
    with monkeypatch.context() as signals:
        stopped_after(signals, 3)
        with pytest.raises(Terminated, match="after step 3, which is saved"):
            run(file)
    assert saved(tmp_path / "run") == ["step-00000003"]
    assert not (tmp_path / "run" / "export").exists()
    assert run(file).export == tmp_path / "run" / "export"
    assert list(curve(tmp_path / "run")) == [1, 2, 3]


@pytest.mark.parametrize("engine", ["host", "fsdp"])
def test_signal_within_a_step_saves_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The resumed run repeats the step. Steps have three micro-batches, so that ranks ask twice a step."""
    sections = {"train": {"max_steps": 3, "global_batch_size": 6}, "shard": {"engine": engine}}
    run(write_config(tmp_path, "undisturbed", **sections))
    file, ask, calls = write_config(tmp_path, **sections), StopPoll.__call__, count(1)

    def asked(self: StopPoll, at_once: bool = False) -> int:
        if next(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until it is heard
        return ask(self, at_once)

    with monkeypatch.context() as signals:
        signals.setattr(StopPoll, "__call__", asked)
        signals.setattr(shutdown, "_POLL_INTERVAL_S", 0)  # asks before each micro-batch
        with pytest.raises(Terminated, match="after step 1, which is saved"):
            run(file)
    assert saved(tmp_path / "run") == ["step-00000001"]
    run(file)
    assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")


@pytest.mark.long
@pytest.mark.parametrize("engine", ["host", "fsdp"])
def test_two_ranks_stop_within_a_long_step(tmp_path: Path, engine: str) -> None:
    sections = {"train": {"max_steps": 3, "global_batch_size": 2000}, "shard": {"engine": engine}}
    run(write_config(tmp_path, "undisturbed", **sections))
    command = ["aliquot", "train", str(write_config(tmp_path, **sections, launch={"ranks": 2}))]
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: has_steps(tmp_path / "run", 1), process)
    process.send_signal(signal.SIGTERM)
    assert "after step 1, which is saved" in process.communicate(timeout=60)[1] and process.returncode == 143
    assert subprocess.run([sys.executable, "-m", *command], check=False).returncode == 0
    assert curve(tmp_path / "run") == pytest.approx(curve(tmp_path / "undisturbed"), rel=1e-5)


def test_failed_export_saves_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_config(tmp_path, train={"max_steps": 3}, checkpoint={"every": 0, "last": False})

    def full(*_: object) -> None:
        raise StorageError("needs more than is free", tmp_path)

    with monkeypatch.context() as disk:
        disk.setattr(export_run, "_export", full)
        with pytest.raises(StorageError, match="needs more than is free"):
            run(file)
    assert saved(tmp_path / "run") == ["step-00000003"]
    assert run(file).export == tmp_path / "run" / "export"
    assert list(curve(tmp_path / "run")) == [1, 2, 3], "nothing is trained again"


def test_failed_save_is_not_reported_as_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_config(tmp_path, train={"max_steps": 6}, checkpoint={"every": 2, "on_error": "warn"})
    stopped_after(monkeypatch, 3)
    space = save.check_space

    def full(partial: Path, needed_bytes: int) -> None:
        if "step-00000004" in partial.name:
            raise StorageError("needs more than is free", partial.parent)
        space(partial, needed_bytes)

    monkeypatch.setattr(save, "check_space", full)
    with pytest.raises(Terminated, match="after step 4; saved is step 2, because it could not be saved"):
        run(file)
    assert saved(tmp_path / "run") == ["step-00000002"]


@pytest.mark.long
def test_skipped_last_evaluation_is_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal has prevented the evaluation of the last weights: the next start makes up for it, once."""
    data = {"eval_path": str(other_text(tmp_path)), "eval_fraction": 0.0}
    file = write_config(
        tmp_path, train={"max_steps": 2, "eval_steps": 2, "learning_rate": 1e-3}, data=data, checkpoint={"best": True}
    )
    run(file)
    with monkeypatch.context() as signals:
        stopped_after(signals, 4)
        with pytest.raises(Terminated, match="after step 4, which is saved"):
            run(file, "train.max_steps=4", "train.eval_steps=9")
    assert list(curve(tmp_path / "run", "eval_loss")) == [2]
    for _ in range(2):
        run(file, "train.max_steps=4", "train.eval_steps=9")
        assert list(curve(tmp_path / "run", "eval_loss")) == [2, 4]
    evaluated = curve(tmp_path / "run", "eval_loss")
    assert evaluated[4] < evaluated[2]
    assert json.loads((tmp_path / "run" / "export" / "aliquot.json").read_text())["step"] == 4


@pytest.mark.long
def test_checkpoint_saved_again_keeps_its_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start has fewer epochs than are done, so its data do not contain the step."""
    epochs = {"max_steps": None, "num_train_epochs": 2, "global_batch_size": 7, "eval_steps": 50}
    data = {"eval_path": str(other_text(tmp_path)), "eval_fraction": 0.0}
    file = write_config(tmp_path, train=epochs, data=data, checkpoint={"best": True})
    with monkeypatch.context() as signals:
        stopped_after(signals, 4)
        with pytest.raises(Terminated, match="which is saved"):
            run(file)
    (checkpoint,) = saved(tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / checkpoint / "state.json"
    position = json.loads(state.read_text())["position"]
    assert run(file, "train.num_train_epochs=0.1").steps == 5  # the signal was heard of in the next step
    assert list(curve(tmp_path / "run", "eval_loss")) == [5]
    assert json.loads(state.read_text())["position"] == position
    run(file)


@pytest.mark.long
def test_export_only_start_leaves_the_ledger_unchanged(tmp_path: Path) -> None:
    file = write_config(tmp_path, train={"max_steps": 2})
    run(file)
    ledger = (tmp_path / "run" / "ledger.json").read_bytes()
    shutil.rmtree(tmp_path / "run" / "export")
    run(file)
    assert (tmp_path / "run" / "export").is_dir()
    assert (tmp_path / "run" / "ledger.json").read_bytes() == ledger


def test_removed_logs_do_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Recorder.end

    def ended(self: Recorder, *arguments: Any) -> None:
        end(self, *arguments)
        shutil.rmtree(self._run.directory.logs, ignore_errors=True)

    monkeypatch.setattr(Recorder, "end", ended)
    assert run(write_config(tmp_path, train={"max_steps": 2})).export == tmp_path / "run" / "export"
