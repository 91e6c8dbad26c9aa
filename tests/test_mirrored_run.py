"""A run whose disk is lost goes on from its mirror, on the same curve; one that is killed while it copies does, too."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aliquot.checkpoint.mirrored import complete_steps
from aliquot.stores.open_store import open_store
from tests import runs, warm
from tests.stores.s3_server import BUCKET, S3Server, s3_server

URL = f"s3://{BUCKET}/runs"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as started:
        yield started


def settings(**checkpoint: Any) -> dict[str, Any]:
    return {"checkpoint": {"every": 2, "mirror": URL, "export": False, **checkpoint}, "launch": {"ranks": 2}}


@pytest.mark.long
def test_a_run_whose_disk_is_lost_goes_on_on_the_same_curve(tmp_path: Path, server: S3Server) -> None:
    runs.trained(runs.write_config(tmp_path, "whole", **settings(mirror=None)))
    config = runs.write_config(tmp_path, "run", **settings())
    printed = runs.trained(config, "train.num_train_epochs=1", "checkpoint.every=3", "train.max_steps=6")
    assert f"checkpoint: step 6 is in {URL}/run, copied in" in printed
    assert complete_steps(open_store(f"{URL}/run")) == ["step-00000003", "step-00000006"]
    store = open_store(f"{URL}/run")
    store.remove(["step-00000006/manifest.json"])  # as if it had been killed before
    shutil.rmtree(tmp_path / "run")
    printed = runs.trained(config, "launch.ranks=1")
    assert "resuming from" in printed
    assert "step-00000003" in printed
    found, whole = runs.curve(tmp_path / "run"), runs.curve(tmp_path / "whole")
    assert sorted(found) == [4, 5, 6]
    assert found == pytest.approx({step: whole[step] for step in found}, rel=1e-6)
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
def test_a_rank_that_is_killed_while_it_copies_leaves_nothing_that_looks_complete(
    tmp_path: Path, server: S3Server
) -> None:
    def slow(environ: dict[str, Any]) -> str | None:
        if environ["REQUEST_METHOD"] == "PUT" and "step-00000004" in environ["PATH_INFO"]:
            time.sleep(2)
        return None

    server.fault = slow
    config = runs.write_config(tmp_path, "run", **settings())
    train = warm.Warm(["-m", "aliquot", "train", str(config), "train.max_steps=4"], text=True)
    while not any("PUT" in line and "step-00000004" in line for line in server.seen):
        assert train.poll() is None
        time.sleep(0.05)
    ranks = psutil.Process(train.pid).children(recursive=True)
    os.kill(ranks[-1].pid, signal.SIGKILL)
    assert train.wait(60) != 0
    time.sleep(2)  # what the server has taken and not answered
    assert complete_steps(open_store(f"{URL}/run")) == ["step-00000002"]
    assert (tmp_path / "run/checkpoints/step-00000004/manifest.json").exists()
    server.fault = lambda environ: None
    runs.trained(config, "train.max_steps=4")
    assert complete_steps(open_store(f"{URL}/run")) == ["step-00000002", "step-00000004"]
