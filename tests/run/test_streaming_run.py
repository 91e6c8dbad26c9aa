"""A run that tokenises during training has one curve at any world size, through a kill, and from object storage."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from aliquot.stores.store import open_store
from tests import runs
from tests.data.stores import byte_level
from tests.stores.s3_server import BUCKET, s3_server
from tests.tools import warm


def corpus(folder: Path, files: int = 12) -> Path:
    draw = random.Random(3)
    (folder / "corpus").mkdir(parents=True)
    byte_level().save_pretrained(folder / "tokenizer")
    for number in range(files):
        lines = [" ".join(draw.choices(runs.WORDS, k=draw.randint(3, 30))) for _ in range(20)]
        (folder / f"corpus/{number:02}.txt").write_text("\n".join(lines))
    return folder / "corpus"


def config(folder: Path, name: str, path: str, steps: int = 12, **sections: dict[str, object]) -> Path:
    data: dict[str, object] = {
        "path": path, "streaming": True, "shuffle_buffer": 16, "tokenizer": str(folder.parent / "tokenizer"),
        "tokenizer_vocab_size": None, "eval_fraction": 0.0, "cache_directory": str(folder / "cache"),
    }  # fmt: skip
    checkpoint: dict[str, object] = {"every": 4, "export": False}
    sections = {"data": data, "train": {"max_steps": steps}, "checkpoint": checkpoint, **sections}
    return runs.write_config(folder, name, **sections)


def test_streamed_run_at_two_ranks(tmp_path: Path) -> None:
    printed = runs.trained(
        config(tmp_path / "runs", "run", str(corpus(tmp_path, files=4)), steps=3, launch={"ranks": 2})
    )
    assert "data: streamed; all these numbers are of its beginning, about " in printed
    assert sorted(runs.curve(tmp_path / "runs/run")) == [1, 2, 3]


@pytest.mark.long
def test_streamed_run_is_killed_and_resumed_at_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(corpus(tmp_path))
    runs.trained(config(tmp_path / "whole", "whole", path))
    with s3_server(monkeypatch):
        store = open_store(f"s3://{BUCKET}/corpus")
        for file in Path(path).iterdir():
            store.put(file.name, file.read_bytes())
        remote = config(tmp_path / "killed", "killed", f"s3://{BUCKET}/corpus/", launch={"ranks": 2})
        train = warm.Warm(["-m", "aliquot", "train", str(remote)], text=True, start_new_session=True)
        while not (tmp_path / "killed/killed/checkpoints/step-00000004/manifest.json").exists():
            assert train.poll() is None
            time.sleep(0.02)
        os.killpg(train.pid, signal.SIGKILL)
        train.wait()
        copied = len(list((tmp_path / "killed/cache/remote").iterdir()))
        assert copied < 12, "files are copied when they are needed"
        printed = runs.trained(remote)
    assert "resuming from" in printed
    whole, resumed = (runs.curve(tmp_path / name / name) for name in ("whole", "killed"))
    assert resumed == pytest.approx(whole, rel=1e-5)
    assert sorted(whole) == list(range(1, 13))
