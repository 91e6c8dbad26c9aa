"""A run resumes from its mirror on the same curve after the disk is lost, and after a kill during an upload."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import aliquot
from aliquot.checkpoint.remote_checkpoint import complete_steps
from aliquot.config.read_config import read_config
from aliquot.core.errors import DamagedCheckpoint, ResumeError
from aliquot.stores.store import open_store
from aliquot.tensor_io.manifest import verify
from tests import runs
from tests.stores.s3_server import BUCKET, S3Server
from tests.tools import warm

URL = f"s3://{BUCKET}/runs"


def settings(**checkpoint: Any) -> dict[str, Any]:
    return {"checkpoint": {"every": 2, "mirror": URL, "export": False, **checkpoint}, "launch": {"ranks": 2}}


@pytest.mark.long
def test_run_with_lost_disk_continues_from_mirror_exactly(tmp_path: Path, s3: S3Server) -> None:
    runs.trained(runs.write_config(tmp_path, "whole", **settings(mirror=None)))
    config = runs.write_config(tmp_path, "run", **settings())
    printed = runs.trained(config, "train.num_train_epochs=1", "checkpoint.every=3", "train.max_steps=6")
    assert f"checkpoint: step 6 is in {URL}/run, copied in" in printed
    assert complete_steps(open_store(f"{URL}/run")) == ["step-00000003", "step-00000006"]
    store = open_store(f"{URL}/run")
    store.remove(["step-00000006/manifest.json"])  # as if it had been killed before
    shutil.rmtree(tmp_path / "run")
    printed = runs.trained(config, "launch.ranks=1", "train.per_device_train_batch_size=auto")
    assert read_config(tmp_path / "run" / "config.yaml").train.per_device_train_batch_size == 2  # as in the checkpoint
    assert "resuming from" in printed
    assert "step-00000003" in printed
    resumed, whole = runs.curve(tmp_path / "run"), runs.curve(tmp_path / "whole")
    assert sorted(resumed) == [4, 5, 6]
    assert resumed == pytest.approx({step: whole[step] for step in resumed}, rel=1e-6)
    result = runs.command("export", f"{URL}/run/step-00000006", tmp_path / "out", "--verify")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/model.safetensors").exists()
    refused = runs.refused(config, f"run.directory={tmp_path}/other", "checkpoint.resume=never")
    assert "holds step-00000006; choose another run.name" in refused
    begun = runs.trained(
        runs.write_config(tmp_path, "third", **settings(mirror=None)), f"checkpoint.resume={URL}/run/step-00000004"
    )
    assert "step-00000004" in begun


@pytest.mark.long
def test_rank_killed_in_upload_leaves_no_complete_checkpoint(tmp_path: Path, s3: S3Server) -> None:
    def slow(environ: dict[str, Any]) -> str | None:
        if environ["REQUEST_METHOD"] == "PUT" and "step-00000004" in environ["PATH_INFO"]:
            time.sleep(2)
        return None

    s3.fault = slow
    config = runs.write_config(tmp_path, "run", **settings())
    train = warm.Warm(["-m", "aliquot", "train", str(config), "train.max_steps=4"], text=True)
    while not any("PUT" in line and "step-00000004" in line for line in s3.seen):
        assert train.poll() is None
        time.sleep(0.05)
    ranks = psutil.Process(train.pid).children(recursive=True)
    os.kill(ranks[-1].pid, signal.SIGKILL)
    assert train.wait(60) != 0
    time.sleep(2)  # what the server has taken and not answered
    assert complete_steps(open_store(f"{URL}/run")) == ["step-00000002"]
    assert (tmp_path / "run/checkpoints/step-00000004/manifest.json").exists()
    s3.fault = lambda environ: None
    runs.trained(config, "train.max_steps=4")
    assert complete_steps(open_store(f"{URL}/run")) == ["step-00000002", "step-00000004"]


def damage(checkpoint: Path) -> None:
    """Damage files as a disk does, without changing sizes."""
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")


def test_damaged_newest_checkpoint_is_fetched_from_mirror(tmp_path: Path) -> None:
    checkpoint = {"mirror": f"file://{tmp_path}/mirror", "every": 2, "export": False}
    config, directory = runs.write_config(tmp_path, checkpoint=checkpoint), tmp_path / "run"
    aliquot.train(aliquot.read_config(config, ["train.max_steps=4"]))
    damage(directory / "checkpoints" / "step-00000004")
    aliquot.train(aliquot.read_config(config, ["train.max_steps=5"]))
    resumed = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in resumed if event["event"] == "resume"] == [4]
    verify(directory / "checkpoints" / "step-00000004")


@pytest.mark.long
def test_advice_for_run_without_complete_checkpoint_works(tmp_path: Path) -> None:
    """After the move the run begins anew, or from checkpoint.resume."""
    config = runs.write_config(tmp_path, checkpoint={"every": 2, "export": False}, train={"max_steps": 4})
    checkpoints = tmp_path / "run" / "checkpoints"
    aliquot.train(aliquot.read_config(config))
    whole = runs.curve(tmp_path / "run")
    checkpoint_copy = shutil.copytree(checkpoints / "step-00000002", tmp_path / "step-00000002")
    for name in ("step-00000002", "step-00000004"):
        damage(checkpoints / name)
    for overrides in ([], [f"checkpoint.resume={checkpoint_copy}"]):
        config_now = aliquot.read_config(config, overrides)
        with pytest.raises(
            ResumeError, match=f"^{checkpoints}: no checkpoint here is complete and undamaged: move this directory away"
        ):
            aliquot.train(config_now)
        moved = checkpoints.rename(tmp_path / "moved")
        aliquot.train(config_now)
        assert runs.curve(tmp_path / "run") == whole
        assert runs.curve(tmp_path / "run", "tokens").keys() == whole.keys()
        shutil.rmtree(checkpoints)
        moved.rename(checkpoints)
    with pytest.raises(
        DamagedCheckpoint, match=r"checkpoint\.resume names this checkpoint: choose another one, or auto"
    ):
        aliquot.train(aliquot.read_config(config, [f"checkpoint.resume={checkpoints}/step-00000004"]))
