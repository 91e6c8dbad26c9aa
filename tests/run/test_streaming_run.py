"""A run that tokenises during training has one curve at any world size, through a kill, and from object storage."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from aliquot.stores.store import open_store
from tests import runs
from tests.data.stores import byte_level
from tests.run.hub_repository import Repository
from tests.stores.s3_server import BUCKET, STALL, S3Server


def corpus(folder: Path, files: int = 12, lines: int = 20) -> Path:
    draw = random.Random(3)
    (folder / "corpus").mkdir(parents=True)
    byte_level().save_pretrained(folder / "tokenizer")
    for number in range(files):
        texts = [" ".join(draw.choices(runs.WORDS, k=draw.randint(3, 30))) for _ in range(lines)]
        (folder / f"corpus/{number:02}.txt").write_text("\n".join(texts))
    return folder / "corpus"


def config(
    folder: Path, name: str, path: str | list[dict[str, object]], steps: int = 12, **sections: dict[str, object]
) -> Path:
    """`path`: of the data, or several sources."""
    data: dict[str, object] = {
        "path": path, "streaming": True, "shuffle_buffer": 16, "tokenizer": str(folder.parent / "tokenizer"),
        "tokenizer_vocab_size": None, "eval_fraction": 0.0, "cache_directory": str(folder / "cache"),
    }  # fmt: skip
    if not isinstance(path, str):
        data |= {"sources": path, "path": None, "document": None}
    checkpoint: dict[str, object] = {"every": 4, "export": False}
    sections = {"data": data, "train": {"max_steps": steps}, "checkpoint": checkpoint, **sections}
    return runs.write_config(folder, name, **sections)


def test_streamed_run_at_two_ranks(tmp_path: Path) -> None:
    """What is left out of a later segment is reported when a batch needs the segment, and at the end."""
    path = corpus(tmp_path, files=4)
    (path / "01.txt").write_text("the first line\na line\0with NUL\n")
    printed = runs.trained(config(tmp_path / "runs", "run", str(path), steps=9, launch={"ranks": 2}))
    assert "data: streamed; all these numbers are of its beginning, about " in printed
    left_out = f"1 x a text with NUL characters, left out (the first: {path}/01.txt:2: a NUL byte"
    events = [json.loads(line) for line in (tmp_path / "runs/run/events.jsonl").read_text().splitlines()]
    (step,) = [event["step"] for event in events if event.get("text", "").startswith(f"data: {left_out}")]
    assert step < 9 and f"data: in all segments {left_out}" in printed
    assert sorted(runs.curve(tmp_path / "runs/run")) == list(range(1, 10))


@pytest.mark.parametrize(
    ("fault", "reason", "ranks"),
    [
        ("503 Slow Down", "GetObject: ", 1),
        pytest.param("503 Slow Down", "GetObject: ", 2, marks=pytest.mark.long),
        pytest.param(STALL, "cannot be reached: Read timeout on endpoint URL", 2, marks=pytest.mark.long),
    ],
)
def test_store_that_fails_in_mid_stream_ends_the_run_saved(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, reason: str, ranks: int
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    path = corpus(tmp_path, files=2, lines=60)
    store = open_store(f"s3://{BUCKET}/corpus")
    for file in path.iterdir():
        store.put(file.name, file.read_bytes())
    remote = _remote_run(tmp_path, f"s3://{BUCKET}/corpus/", ranks)
    s3.fault = lambda environ: fault if environ["PATH_INFO"].endswith("01.txt") else None
    line = _ended_saved(remote)
    assert line.startswith(f"aliquot: s3://{BUCKET}/corpus/01.txt: {reason}")
    s3.fault = lambda environ: None
    _same_curve_when_continued(remote, _remote_run(tmp_path, str(path), ranks))


@pytest.mark.long
def test_hub_that_stalls_in_mid_stream_ends_the_run_saved(
    hub: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    path = corpus(tmp_path, files=2, lines=60)
    hub.files |= {file.name: file.read_bytes() for file in path.iterdir()}
    remote = _remote_run(tmp_path, "hf://datasets/owner/name/*.txt", ranks=2)
    hub.stalled = {"01.txt"}
    line = _ended_saved(remote, cold=True)
    assert line.startswith("aliquot: hf://datasets/owner/name/01.txt: ReadTimeout: ")
    hub.stalled.clear()
    _same_curve_when_continued(remote, _remote_run(tmp_path, str(path), ranks=2), cold=True)


def _remote_run(folder: Path, url: str, ranks: int) -> Path:
    """The config of a run over two files; the first file has more than the 64 sequences of a plan."""
    return config(
        folder / ("remote" if "://" in url else "local"), "run", url, launch={"ranks": ranks},
        checkpoint={"every": 100, "export": False}, train={"max_steps": 20, "global_batch_size": 10},
    )  # fmt: skip


def _ended_saved(run: Path, cold: bool = False) -> str:
    """Return the line with which the run has ended, after it has saved its last step."""
    ended = runs.command("train", run, cold=cold)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "is saved: start again to continue" in line]
    assert line.endswith("[storage]")
    (saved,) = (run.parent / "run/checkpoints").glob("step-*")
    assert f"step {int(saved.name.removeprefix('step-'))} is saved" in line
    return line


def _same_curve_when_continued(run: Path, local: Path, cold: bool = False) -> None:
    runs.trained(run, cold=cold)  # the hub's client reads its environment when it is imported
    runs.trained(local)
    assert runs.curve(run.parent / "run") == pytest.approx(runs.curve(local.parent / "run"), rel=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("s3")
def test_streamed_run_is_killed_and_resumed_at_two_ranks(tmp_path: Path) -> None:
    path = str(corpus(tmp_path))
    runs.trained(config(tmp_path / "whole", "whole", path))
    store = open_store(f"s3://{BUCKET}/corpus")
    for file in Path(path).iterdir():
        store.put(file.name, file.read_bytes())
    remote = config(tmp_path / "killed", "killed", f"s3://{BUCKET}/corpus/", launch={"ranks": 2})
    runs.killed_when((tmp_path / "killed/killed/checkpoints/step-00000004/manifest.json").exists, remote)
    copied = len(list((tmp_path / "killed/cache/remote").iterdir()))
    assert copied < 12, "files are copied when they are needed"
    printed = runs.trained(remote)
    assert "resuming from" in printed
    whole, resumed = (runs.curve(tmp_path / name / name) for name in ("whole", "killed"))
    assert resumed == pytest.approx(whole, rel=1e-5)
    assert sorted(whole) == list(range(1, 13))
