"""Runs in several stages: more epochs, the best evaluation, early stopping."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import aliquot
from aliquot.checkpoint.save import Draft
from aliquot.core.errors import StorageFailureError, UserError
from aliquot.data.batches import Batches, Position
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import prepare
from aliquot.data.workload import batch_size
from aliquot.tensor_io.manifest import verify
from tests import plain
from tests.runs import OVERFITTING, command, curve, other_text, trained, write_config

EPOCHS = {"max_steps": None, "num_train_epochs": 1, "global_batch_size": 7, "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def epochs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A run of one epoch, then of two: the config, and the last step of both stages."""
    folder = tmp_path_factory.mktemp("epochs")
    config = write_config(folder, "epochs", train=EPOCHS, checkpoint={"every": 1, "keep": 99, "export": True})
    first = aliquot.train(aliquot.read_config(config)).steps
    second = aliquot.train(aliquot.read_config(config, ["train.num_train_epochs=2"])).steps
    return config, first, second


def state(directory: Path, step: int) -> dict[str, Any]:
    return json.loads((directory / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())


@pytest.mark.long
def test_more_epochs_continue_after_a_partial_batch(epochs: tuple[Path, int, int]) -> None:
    """The curve equals that of a plain loop over the same batches, with every sequence once in an epoch."""
    file, first, second = epochs
    config, directory = aliquot.read_config(file), file.parent / "epochs"
    data = prepare(config.data, None, 1 << 20)
    batches = Batches.of(data, config.data, config.run.seed, batch_size(config.train, 1), 1)
    sequences = batches.epoch_sequences
    assert sequences % 7 != 0, "the last batch of the first epoch is short"
    assert state(directory, first)["position"] == {"epoch": 1, "index": 0}
    assert (state(directory, first)["ends"], state(directory, second)["ends"]) == ([], [sequences])
    assert state(directory, second)["position"] == {"epoch": 2, "index": 0}

    batches.steps = Batches.of(data, config.data, config.run.seed, batch_size(config.train, 1), 2).steps
    batches = batches.continued_at(first, Position(1, 0), ())
    model = AutoModelForCausalLM.from_pretrained(directory / "export")  # for its shape
    model.load_state_dict(plain.initial_weights(model.config, config.run.seed), strict=False)
    losses = plain.train(model, batches, config.train, second)
    assert list(curve(directory)) == list(range(1, second + 1))
    assert list(curve(directory).values()) == pytest.approx(losses, rel=1e-5)
    assert curve(directory, "epoch")[first] == 1.0 and curve(directory, "epoch")[second] == 2.0


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_stage_is_resumed_exactly(epochs: tuple[Path, int, int], tmp_path: Path, ranks: int) -> None:
    file, first, second = epochs
    directory = file.parent / "epochs"
    shutil.copytree(directory, tmp_path / "run")
    for later in range(first + 2, second + 1):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{later:08d}")
    overrides = ["train.num_train_epochs=2", f"run.directory={tmp_path}/run", f"launch.ranks={ranks}"]
    trained(file, *overrides) if ranks > 1 else aliquot.train(aliquot.read_config(file, overrides))
    assert curve(tmp_path / "run") == (curve(directory) if ranks == 1 else pytest.approx(curve(directory), rel=1e-5))
    assert curve(tmp_path / "run", "tokens") == curve(directory, "tokens")
    assert state(tmp_path / "run", second)["ends"] == state(directory, second)["ends"]


@pytest.mark.long
def test_steps_may_follow_epochs_and_fewer_epochs_are_none(epochs: tuple[Path, int, int], tmp_path: Path) -> None:
    file, _, second = epochs
    shutil.copytree(file.parent / "epochs", tmp_path / "run")
    here = f"run.directory={tmp_path}/run"
    fewer = trained(file, here, "train.num_train_epochs=0.5")
    assert f"complete at step {second}: raise train.num_train_epochs" in fewer
    trained(file, here, f"train.max_steps={second + 2}")
    assert list(curve(tmp_path / "run"))[-2:] == [second + 1, second + 2]
    assert state(tmp_path / "run", second + 2)["position"]["index"] == 14
    assert f"complete at step {second + 2}: raise train.max_steps" in trained(file, here, f"train.max_steps={second}")


def overfitting(folder: Path, name: str, **sections: dict[str, Any]) -> Path:
    """The config of a run that memorises few documents: the evaluation loss falls, then rises."""
    expected = {
        "train": {"max_steps": 30, "eval_steps": 2, **OVERFITTING, **sections.pop("train", {})},
        "checkpoint": {"best": True, "keep": 1, **sections.pop("checkpoint", {})},
        "data": {"eval_path": str(other_text(folder)), "eval_fraction": 0.0},
    }
    return write_config(folder, name, **expected, **sections)


def evaluation_loss(export: Path, file: Path) -> float:
    """Compute the evaluation loss with transformers."""
    config = aliquot.read_config(file)
    data = prepare(config.data, None, 1 << 20)
    batches = EvalBatches.of(data, config.data, batch_size(config.train, 1))[""]
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    return float(torch.log(torch.tensor(plain.perplexity(model, batches.micro_batches(0, 1), batches.predicted))))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_best_is_kept_and_exported_and_patience_ends_run(tmp_path: Path, ranks: int) -> None:
    file = overfitting(tmp_path, "run", train={"early_stopping_patience": 3}, launch={"ranks": ranks})
    values, directory = trained(file), tmp_path / "run"
    losses = curve(directory, "eval_loss")
    best = min(losses, key=lambda step: losses[step])
    last = max(losses)
    assert last == best + 2 * 3 < 30, losses
    assert f"stopped early after step {last}: evaluation loss {losses[best]:.4f} after step {best}" in values
    retained = {path.name for path in (directory / "checkpoints").iterdir()}
    assert retained == {f"step-{best:08d}", f"step-{last:08d}", "best"}
    assert (directory / "checkpoints" / "best").readlink() == Path(f"step-{best:08d}")
    assert evaluation_loss(directory / "export", file) == pytest.approx(losses[best], rel=1e-5)
    assert f"step-{best:08d} to" in command("export", directory, tmp_path / "again").stdout
    events = [json.loads(line)["event"] for line in (directory / "events.jsonl").read_text().splitlines()]
    assert "stopped_early" in events and events[-1] == "end"

    again = trained(file, "train.max_steps=40")
    assert f"complete at step {last}: it stopped early" in again and "raise train.early_stopping_patience" in again
    assert max(curve(directory)) == last
    shutil.rmtree(directory / "export")
    if ranks == 2:
        trained(file)
        assert evaluation_loss(directory / "export", file) == pytest.approx(losses[best], rel=1e-5)
        trained(file, "train.early_stopping_patience=4", "launch.ranks=1")
        assert max(curve(directory)) == last + 2
        assert evaluation_loss(directory / "export", file) == pytest.approx(losses[best], rel=1e-5)


@pytest.mark.long
def test_best_on_other_data_is_forgotten(tmp_path: Path) -> None:
    file = overfitting(tmp_path, "run", train={"max_steps": 4})
    trained(file)
    (tmp_path / "else.txt").write_text("words that nobody has seen before\n" * 3)
    result = command("train", file, f"data.eval_path={tmp_path}/else.txt", "train.max_steps=6")
    assert result.returncode == 0 and "the best evaluation is forgotten" in result.stdout + result.stderr, result.stderr
    assert state(tmp_path / "run", 6)["evaluations"]["best_step"] == 6


@pytest.mark.long
def test_previous_best_remains_if_better_one_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"train": {"max_steps": 12}, "checkpoint": {"on_error": "warn"}}
    aliquot.train(aliquot.read_config(overfitting(tmp_path, "whole", **copy.deepcopy(sections))))
    losses = curve(tmp_path / "whole", "eval_loss")
    best = min(losses, key=lambda step: losses[step])
    assert 2 < best < 12
    write = Draft.write

    def full(draft: Draft, *arguments: Any) -> Any:
        if draft.target.name == f"step-{best:08d}":
            raise OSError(28, "No space left on device")
        return write(draft, *arguments)

    monkeypatch.setattr(Draft, "write", full)
    file, directory = overfitting(tmp_path, "full", **sections), tmp_path / "full"
    aliquot.train(aliquot.read_config(file))
    assert "could not be saved" in (directory / "events.jsonl").read_text()
    second = min(losses.keys() - {best}, key=lambda step: losses[step])
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {
        f"step-{second:08d}", "step-00000012", "best",
    }  # fmt: skip
    assert evaluation_loss(directory / "export", file) == pytest.approx(losses[second], rel=1e-5)


@pytest.mark.long
def test_first_evaluation_set_decides_best_and_mirror_gets_it_again(tmp_path: Path) -> None:
    """The last weights predict the second set best, because it is the training data."""
    file = overfitting(
        tmp_path, "run", train={"max_steps": 12}, checkpoint={"mirror": f"file://{tmp_path}/mirror", "export": False}
    )
    values = yaml.safe_load(file.read_text())
    names = {"others": values["data"].pop("eval_path"), "learned": values["data"]["path"]}
    values["data"]["eval_sources"] = [{"name": name, "path": path, "document": "line"} for name, path in names.items()]
    file.write_text(yaml.safe_dump(values))
    aliquot.train(aliquot.read_config(file))
    best, lowest = (
        min(losses, key=lambda step: losses[step])
        for losses in (curve(tmp_path / "run", f"eval_{name}_loss") for name in names)
    )
    assert best < lowest == 12
    assert (tmp_path / "run" / "checkpoints" / "best").readlink() == Path(f"step-{best:08d}")
    copies = tmp_path / "mirror" / "run"
    held = {path.name for path in copies.iterdir() if (path / "manifest.json").exists()}
    assert held == {f"step-{best:08d}", "step-00000012"}
    shutil.rmtree(copies / f"step-{best:08d}")  # as if the run had been killed before it was there
    aliquot.train(aliquot.read_config(file))
    assert {path.name for path in copies.iterdir() if (path / "manifest.json").exists()} == held


@pytest.mark.long
def test_without_patience_the_best_outlives_later_checkpoints(tmp_path: Path) -> None:
    file = overfitting(tmp_path, "run", checkpoint={"every": 3}, train={"eval_on_start": True})
    trained(file)
    directory = tmp_path / "run"
    losses = curve(directory, "eval_loss")
    assert list(losses) == list(range(0, 31, 2))
    best = min((step for step in losses if step), key=lambda step: losses[step])
    assert best < 26
    assert {path.name for path in (directory / "checkpoints").glob("step-*")} == {f"step-{best:08d}", "step-00000030"}
    assert load_file(directory / "export" / "model.safetensors").keys()
    assert evaluation_loss(directory / "export", file) == pytest.approx(losses[best], rel=1e-5)

    damage(directory / "checkpoints" / f"step-{best:08d}" / "model.safetensors")
    shutil.rmtree(directory / "export")
    again = command("train", file)
    assert again.returncode == 0, again.stderr
    assert "damaged" in again.stderr and "the last weights are exported, not those that" in again.stderr
    assert evaluation_loss(directory / "export", file) == pytest.approx(losses[30], rel=1e-5)


@pytest.mark.long
def test_damaged_best_checkpoint_is_fetched_from_mirror(tmp_path: Path) -> None:
    file = overfitting(tmp_path, "run", checkpoint={"mirror": f"file://{tmp_path}/mirror"})
    trained(file)
    directory = tmp_path / "run"
    losses = curve(directory, "eval_loss")
    best = min(losses, key=lambda step: losses[step])
    damage(directory / "checkpoints" / f"step-{best:08d}" / "model.safetensors")
    shutil.rmtree(directory / "export")
    trained(file)
    assert best < 30 and evaluation_loss(directory / "export", file) == pytest.approx(losses[best], rel=1e-5)


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def full_disk(path: Path, data: bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_file_server_failure_ends_run_like_a_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is not that of bad input, at which a job is given up."""

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "pwrite", stale)
    with pytest.raises(StorageFailureError, match=r"\.safetensors: cannot write: Stale file handle") as it:
        aliquot.train(aliquot.read_config(write_config(tmp_path, train={"max_steps": 1}, launch={"ranks": 1})))
    assert it.value.exit_code == 1


@pytest.mark.long
def test_export_holds_last_step_despite_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, directory = write_config(tmp_path, train={"max_steps": 2}), tmp_path / "run"
    export = directory / "export"

    def is_of(step: int) -> bool:
        held, expected = weights(export), weights(directory / "checkpoints" / f"step-{step:08d}")
        return all(torch.equal(values, expected[name]) for name, values in held.items())

    aliquot.train(aliquot.read_config(file))
    aliquot.train(aliquot.read_config(file, ["train.max_steps=4", "checkpoint.export=false"]))  # or is killed before it
    assert is_of(2)
    with monkeypatch.context() as patched:
        patched.setattr("aliquot.models.export.write_file", full_disk)
        with pytest.raises(UserError, match="No space left"):
            aliquot.train(aliquot.read_config(file, ["train.max_steps=4"]))
    assert is_of(2)  # better than none
    aliquot.train(aliquot.read_config(file, ["train.max_steps=4"]))
    assert is_of(4)
    values = json.loads((export / "aliquot.json").read_text())
    assert values.pop("step") == 4
    (export / "aliquot.json").write_text(json.dumps(values))  # as older exports are
    (export / "model.safetensors").write_bytes(b"")
    (export / "notes.txt").write_text("mine")
    aliquot.train(aliquot.read_config(file, ["train.max_steps=4"]))
    assert is_of(4) and (directory / "export-1" / "notes.txt").read_text() == "mine"


@pytest.mark.long
def test_evaluations_of_another_run_are_not_inherited(tmp_path: Path) -> None:
    """The second run begins from a URL. The best checkpoint returns from the mirror."""
    best, mirror = {"best": True, "keep": 1, "export": False}, f"file://{tmp_path}/mirror"
    first = overfitting(tmp_path, "first", train={"max_steps": 12}, checkpoint={**best, "mirror": mirror})
    aliquot.train(aliquot.read_config(first))
    best_step = state(tmp_path / "first", 12)["evaluations"]["best_step"]
    assert best_step < 12
    retained = tmp_path / "first" / "checkpoints" / f"step-{best_step:08d}"
    shutil.rmtree(retained)
    aliquot.train(aliquot.read_config(first))
    verify(retained)
    assert (retained.parent / "best").resolve() == retained

    url = f"{mirror}/first/step-00000012"
    second = overfitting(tmp_path, "second", train={"max_steps": 14}, checkpoint={**best, "resume": url})
    aliquot.train(aliquot.read_config(second))
    assert state(tmp_path / "second", 14)["evaluations"]["best_step"] in (12, 14)
    assert not (tmp_path / "second" / "checkpoints" / retained.name).exists()
    steps = curve(tmp_path / "second", "eval_loss")
    assert list(steps) == [12, 14], "the weights that it begins with are evaluated, too"


@pytest.mark.long
def test_an_export_that_is_a_link_stays_one(tmp_path: Path) -> None:
    """A person may move the export to a larger disk and leave a link."""
    config, directory = write_config(tmp_path, train={"max_steps": 2}), tmp_path / "run"
    trained(config)
    moved = shutil.move(directory / "export", tmp_path / "disk")
    before = (moved / "model.safetensors").read_bytes()
    (directory / "export").symlink_to(moved)
    trained(config, "train.max_steps=3")
    assert (directory / "export").readlink() == moved
    assert (moved / "model.safetensors").read_bytes() != before
    assert not list(tmp_path.glob("**/*trash*"))
