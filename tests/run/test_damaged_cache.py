"""One wrong byte in every file of the caches: it is noticed, the cache is made again, and the losses are the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import plain, runs
from tests.data.stores import damage_every_file
from tests.run import test_streaming_run
from tests.run.test_preferences import write_pairs


def config(folder: Path, kind: str) -> Path:
    checkpoint = {"export": False}
    if kind == "stream":
        path = test_streaming_run.corpus(folder, files=4)
        return test_streaming_run.config(folder / "runs", "run", str(path), checkpoint=checkpoint)
    data: dict[str, object] = {"cache_directory": str(folder / "cache")}
    if kind == "sft":
        return runs.write_config(folder, data=data, checkpoint=checkpoint)
    plain.save_llama(folder / "model")
    data |= {"path": str(write_pairs(folder)), "document": None, "sequence_length": 64}
    model = {"path": str(folder / "model"), "config": None}
    return runs.write_config(folder, data=data, model=model, train={"objective": "dpo"}, checkpoint=checkpoint)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "dpo", "stream"])
def test_damaged_caches_give_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("ALIQUOT_CACHE", str(tmp_path / "plans"))  # with rates of the machine
    file = config(tmp_path, kind)
    directory = tmp_path / "runs" if kind == "stream" else tmp_path
    caches = [tmp_path / "plans", directory / "cache"]
    runs.trained(file)
    whole = runs.curve(directory / "run")
    for seed in range(4):
        assert sum(len(damage_every_file(cache, seed)) for cache in caches) > 9
        shutil.rmtree(directory / "run")
        repaired = runs.command("train", file)
        assert repaired.returncode == 0, repaired.stdout + repaired.stderr
        assert "it is made again" in repaired.stderr
        assert runs.curve(directory / "run") == whole
