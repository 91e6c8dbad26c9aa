"""A run whose directory is removed, renamed or replaced ends, and touches no file of a new directory."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aliquot
from aliquot.checkpoint import save
from aliquot.checkpoint.remote_checkpoint import complete_steps
from aliquot.core.errors import RunDirectoryError
from aliquot.observe.recorder import Recorder
from aliquot.observe.run_directory import HEADER, RunDirectory
from aliquot.stores.store import open_store
from aliquot.tensor_io.manifest import verify
from tests.runs import curve, wait_for, write_config
from tests.tools import warm

ENDLESS = "launch.ranks=2", "train.max_steps=100000"


def contents(directory: Path) -> dict[str, str]:
    """Return the hash of every file by its path; directories have an empty string."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in directory.rglob("*")
    }


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    end = Recorder.end

    def ended(self: Recorder, *arguments: Any) -> None:
        end(self, *arguments)
        if self._done == step:
            act()

    monkeypatch.setattr(Recorder, "end", ended)


@pytest.mark.parametrize("step", [2, pytest.param(6, marks=pytest.mark.long)])  # of six
@pytest.mark.parametrize("what", ["removed", "renamed"])
def test_a_run_ends_with_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, step: int) -> None:
    """The run neither ends with success nor makes a new directory with a part of its files."""
    mirror = {"mirror": f"file://{tmp_path}/mirror", "every": 2, "on_error": "warn"}
    config, directory, moved = write_config(tmp_path, checkpoint=mirror), tmp_path / "run", tmp_path / "moved"
    with monkeypatch.context() as patched:
        after_step(patched, step, lambda: directory.rename(moved))
        with pytest.raises(RunDirectoryError, match=r"removed, renamed or replaced .* run\.directory set to") as caught:
            aliquot.train(aliquot.read_config(config))
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not directory.exists()
    mirrored = complete_steps(open_store(f"file://{tmp_path}/mirror/run")) if (tmp_path / "mirror").exists() else []
    assert len(mirrored) <= step // 2
    if what == "removed":
        shutil.rmtree(moved)
        return
    assert sorted(curve(moved)) == list(range(1, step + 1))  # what was logged before it was noticed
    aliquot.train(aliquot.read_config(config, [f"run.directory={moved}"]))
    assert sorted(curve(moved)) == list(range(1, 7))
    assert not directory.exists()


def test_run_that_took_the_directory_is_left_alone(tmp_path: Path) -> None:
    """The other run has checkpoints, logs, metrics and events of the same steps, and holds its lock."""
    settings = {"checkpoint": {"every": 1, "export": False}, "train": {"logging_steps": 1}}
    aliquot.train(aliquot.read_config(write_config(tmp_path, "other", **settings), ["train.max_steps=3"]))
    (tmp_path / "other" / "logs").mkdir(exist_ok=True)
    other = contents(tmp_path / "other")
    config = write_config(tmp_path, **settings)
    directory, moved = tmp_path / "run", tmp_path / "moved"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with warm.popen("-m", "aliquot", "train", config, *ENDLESS, **pipes) as process:
        wait_for((directory / "checkpoints" / "step-00000002").exists, process)
        directory.rename(moved)
        (tmp_path / "other").rename(directory)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    assert errors.strip().splitlines()[-1].endswith("[run-directory]"), errors
    assert contents(directory) == other
    newest = max((moved / "checkpoints").glob("step-*"))
    verify(newest)
    assert max(curve(moved)) >= int(newest.name.removeprefix("step-"))


def test_save_begun_in_another_runs_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run's directory takes the path after the check, and before the checkpoint's first file."""
    directory, other, begin = tmp_path / "run", tmp_path / "other", save.begin
    (other / "checkpoints").mkdir(parents=True)

    def begin_late(*arguments: Any) -> Path:
        directory.rename(tmp_path / "moved")
        other.rename(directory)
        return begin(*arguments)

    monkeypatch.setattr(save, "begin", begin_late)
    with pytest.raises(RunDirectoryError, match="removed, renamed or replaced"):
        aliquot.train(aliquot.read_config(write_config(tmp_path, checkpoint={"every": 1})))
    assert contents(directory) == {"checkpoints": ""}


def test_lock_replaced_by_another_process_is_lost(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with directory.lock.hold():
        (tmp_path / "run" / "config.yaml").write_text("")
        assert directory.lock.why_lost() is None
        (tmp_path / "run" / ".lock").unlink()
        (tmp_path / "run" / ".lock").touch()
        with pytest.raises(RunDirectoryError, match="no longer holds its lock"):
            directory.check_publish()
    directory.check_publish()  # a process that holds no lock has nothing to compare


@pytest.mark.few(1)
@pytest.mark.parametrize("left", [None, ""])
def test_run_without_config_is_recognised_by_checkpoints(tmp_path: Path, left: str | None) -> None:
    config, directory = write_config(tmp_path, checkpoint={"every": 2, "export": False}), tmp_path / "run"
    aliquot.train(aliquot.read_config(config, ["train.max_steps=2"]))
    (directory / "config.yaml").unlink()
    if left is not None:
        (directory / "config.yaml").write_text(left)
    aliquot.train(aliquot.read_config(config, ["train.max_steps=3"]))
    assert sorted(curve(directory)) == [1, 2, 3]
    assert (directory / "config.yaml").read_text().startswith(HEADER)
    (directory / "config.yaml").unlink()
    for manifest in directory.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    with pytest.raises(RunDirectoryError, match="is not a run of aliquot"):
        aliquot.train(aliquot.read_config(config))


@pytest.mark.long
def test_resume_with_another_engine_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, checkpoint={"every": 1, "export": False}, observe={"console": "quiet"})
    for engine, steps in (("host", 1), ("host", 2), ("fsdp", 3)):
        aliquot.train(aliquot.read_config(config, [f"shard.engine={engine}", f"train.max_steps={steps}"]))
        is_warned = "the engine is fsdp, but this checkpoint was saved by host" in capsys.readouterr().err
        assert is_warned == (engine == "fsdp")
