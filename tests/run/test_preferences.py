"""Preference training as a person runs it, against a plain loop with a second, frozen model as the reference.

The example of preference training in miniature: a model learns from pairs of its own ends of stories.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import aliquot
from aliquot.config.evaluation_config import read_evaluation_config
from aliquot.core.errors import UserError
from aliquot.data.batches import Batches, objective_of
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import prepare
from aliquot.data.workload import batch_size
from aliquot.engines.base import EngineSpec
from aliquot.engines.host.host_engine import HostEngine
from aliquot.models.micro_batch import MicroBatch
from aliquot.run.evaluate import evaluate_model
from tests import plain
from tests.runs import WORDS, curve, killed_when, refused, trained, write_config

LORA = {"adapter": {"r": 3, "alpha": 12.0}}
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")


def write_pairs(folder: Path, count: int = 40) -> Path:
    draw = random.Random(3)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    records = [{"prompt": f"{words(4)} ", "chosen": words(9), "rejected": words(6)} for _ in range(count)]
    records.append({"prompt": "a ", "chosen": " ".join(WORDS * 4), "rejected": "b"})
    records.append({"prompt": "a ", "chosen": "the same", "rejected": "the same"})
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    plain.save_llama(folder / "model")
    write_pairs(folder)
    return folder


def write(folder: Path, name: str, train: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Path:
    """The config of a run on the pairs, of which each optimizer step takes an uneven number."""
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "model"), "config": None},
        "data": {"path": str(folder / "pairs.jsonl"), "document": None, "sequence_length": 64},
        "train": {"objective": "dpo", "beta": 0.3, "learning_rate": 1e-2, **(train or {})},
        "checkpoint": {"every": 2, "keep": 9, "export": False},
    }
    for section, values in sections.items():
        defaults.setdefault(section, {}).update(values)
    return write_config(folder, name, **defaults)


def answer_logprobs(model: nn.Module, batch: MicroBatch) -> Tensor:
    """[pairs, 2], of answers fed one by one, and [pairs, 2] numbers of their tokens."""
    sums, lengths = [], []
    for start, stop in pairwise(batch.edges):
        labels = batch.labels[start:stop]
        if bool((labels != -100).any()):
            logits = model(input_ids=batch.input_ids[None, start:stop]).logits[0]
            sums.append(-F.cross_entropy(logits, labels, reduction="sum"))
            lengths.append((labels != -100).sum())
    return torch.stack([torch.stack(sums), torch.stack(lengths)]).view(2, -1, 2)


def plain_curve(file: Path, steps: int) -> tuple[list[float], float]:
    """Losses of a loop with a frozen copy of the model, and the loss on held-out pairs at the end."""
    config = aliquot.read_config(file)
    train = config.train
    model, reference = plain.model_and_reference(config)
    data = prepare(config.data, Path(str(config.model.path)), model.config.vocab_size)
    objective = objective_of(train)
    assert objective is not None

    def loss(model: nn.Module, batch: MicroBatch | None) -> Tensor:
        assert batch is not None
        logprobs, lengths = answer_logprobs(model, batch)
        with torch.no_grad():
            before = answer_logprobs(reference, batch)[0]
        if train.objective == "orpo":
            means = logprobs / lengths
            odds = means.exp() / (1 - means.exp())
            return (-means[:, 0] - train.beta * F.logsigmoid((odds[:, 0] / odds[:, 1]).log())).sum()
        if train.objective == "simpo":
            means = logprobs / lengths
            return -F.logsigmoid(train.beta * (means[:, 0] - means[:, 1]) - train.simpo_gamma).sum()
        ratios = logprobs - before
        return -F.logsigmoid(train.beta * (ratios[:, 0] - ratios[:, 1])).sum()

    size = batch_size(train, 1)
    batches = Batches.of(data, config.data, config.run.seed, size, None).with_objective(objective)
    losses = plain.train(model, batches, train, steps, loss)
    held_out = EvalBatches.of(data, config.data, size)[""].with_objective(objective)
    with torch.no_grad():
        evaluated = sum(float(loss(model, batch)) for batch in held_out.micro_batches(0, 1)) / held_out.predicted
    return losses, evaluated


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, str]:
    """The directory of a run, and what the run printed."""
    best = {"eval_steps": 1, "metric_for_best_model": "rewards/accuracies"}
    file = write(folder, "whole", best, launch={"ranks": 2}, shard={"engine": "host"}, checkpoint={"best": True})
    return folder / "whole", trained(file)


def check_curve(file: Path) -> None:
    directory = file.with_suffix("")
    losses, evaluated = plain_curve(file, 6)
    assert list(curve(directory).values()) == pytest.approx(losses, rel=1e-5)
    assert curve(directory, "eval_loss")[6] == pytest.approx(evaluated, rel=1e-5)
    assert all(set(curve(directory, metric)) == set(range(1, 7)) for metric in METRICS)
    assert all(6 in curve(directory, f"eval_{metric}") for metric in METRICS)


def test_the_curve_is_that_of_a_plain_loop(whole: tuple[Path, str]) -> None:
    check_curve(whole[0].with_suffix(".yaml"))


def test_evaluate_prints_the_metrics_of_the_run(folder: Path, whole: tuple[Path, str]) -> None:
    directory, _ = whole
    checkpoint, file, text = directory / "checkpoints/step-00000006", f"{directory}.yaml", f"{folder}/pairs.jsonl"
    evaluation = evaluate_model(read_evaluation_config(checkpoint, file, ["launch.ranks=1"]))[""]
    metrics = {"loss": evaluation.loss, **evaluation.preferences}
    logged = {name: curve(directory, f"eval_{name}")[6] for name in metrics}
    assert metrics == pytest.approx(logged, rel=1e-5, abs=1e-7) and {"loss", *METRICS} <= metrics.keys()
    assert evaluation.perplexity is None
    plain_text = ["train.precision=fp32", "train.beta=0.3", "data.sequence_length=64", "launch.ranks=1"]
    printed = {}
    for objective, base in (("dpo", str(folder / "model")), ("simpo", None)):
        config = read_evaluation_config(checkpoint, text, [f"train.objective={objective}", *plain_text], base)
        (printed[objective],) = evaluate_model(config).values()
    assert {name.partition("/")[0] for name in printed["simpo"].preferences} == {"rewards", "logps"}
    assert printed["dpo"].preferences["logps/chosen"] == pytest.approx(printed["simpo"].preferences["logps/chosen"])
    assert printed["dpo"].preferences["rewards/margins"] != pytest.approx(
        printed["simpo"].preferences["rewards/margins"], rel=0.1
    )
    with pytest.raises(UserError, match=r"dpo compares MODEL with the model before training: .* --base, or give"):
        read_evaluation_config(checkpoint, text, ["train.objective=dpo"])


def test_the_checkpoint_of_highest_accuracy_is_the_best(whole: tuple[Path, str]) -> None:
    directory, _ = whole
    losses, accuracies = (curve(directory, f"eval_{metric}") for metric in ("loss", "rewards/accuracies"))
    best = max(accuracies, key=lambda step: accuracies[step])
    assert best != min(losses, key=lambda step: losses[step]), "the data do not tell the metrics apart"
    assert (directory / "checkpoints" / "best").readlink() == Path(f"step-{best:08d}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "engine", "sections"),
    [
        (1, "host", {"data": {"packing": False}}),
        (3, "host", {"train": {"objective": "orpo"}}),
        (2, "host", LORA),
        (1, "fsdp", {"train": {"objective": "simpo", "beta": 2.0}}),
        (2, "fsdp", LORA),
        (3, "fsdp", {"data": {"packing": False}}),
        (2, "fsdp", {"train": {"gradient_checkpointing": "full"}}),
        (2, "host", {"train": {"compile": "layers"}}),
        (2, "host", {"shard": {"offload": "disk"}}),
    ],
)
def test_every_engine_has_the_curve_of_a_plain_loop(
    folder: Path, ranks: int, engine: str, sections: dict[str, Any]
) -> None:
    name = f"{engine}-{ranks}-{'-'.join(sections)}"
    shard = {"engine": engine, **sections.get("shard", {})}
    file = write(folder, name, **{**deepcopy(sections), "launch": {"ranks": ranks}, "shard": shard})
    trained(file)
    check_curve(file)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_curve_is_that_of_trl(folder: Path, ranks: int) -> None:
    """With 31 pairs in one batch. If a token spans prompt and answer, TRL begins both answers of the pair there."""
    records = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()[:31]]
    for record in records:  # the space begins the answers
        record |= {"prompt": record["prompt"].strip(), **{key: f" {record[key]}" for key in ("chosen", "rejected")}}
    (folder / "few.jsonl").write_text("\n".join(map(json.dumps, records)))
    train = {"max_steps": 5, "global_batch_size": 31, "lr_scheduler_type": "constant", "warmup_steps": 0}
    train["adam_epsilon"] = 1e-4  # a smaller one amplifies the rounding of gradients near 0
    data = {"path": str(folder / "few.jsonl"), "packing": False, "eval_fraction": 0.0}
    file = write(folder, f"trl-{ranks}", train, launch={"ranks": ranks}, data=data, checkpoint={"every": 0})
    trained(file)
    logged = plain.trl_log("DPO", aliquot.read_config(file), records)
    for name in ("loss", *METRICS):
        ours = list(curve(folder / f"trl-{ranks}", name).values())
        assert ours == pytest.approx([line[name] for line in logged], rel=1e-5, abs=1e-6), name


def test_a_run_goes_on_with_the_reference_of_its_beginning(folder: Path, whole: tuple[Path, str]) -> None:
    """At another world size and with another engine, which has gathered the weights of the reference, computed again
    where it is lost or damaged, when it gets those of the checkpoint."""
    directory, output = whole
    assert "1 x a pair of two equal answers, left out" in output
    assert "1 pair is longer than data.sequence_length 64, left out" in output
    reference = sorted((directory / "reference").iterdir())
    assert len(reference) == 2  # of training data, and of held-out data
    values = [np.frombuffer(file.read_bytes()[32:], np.float32) for file in reference]
    assert sorted(int(np.isnan(numbers).sum()) for numbers in values) == [0, 2]  # the long pair has none
    shutil.copytree(directory, folder / "moved", symlinks=True)
    for step in (4, 6):
        shutil.rmtree(folder / "moved" / "checkpoints" / f"step-{step:08d}")
    lost, damaged = (folder / "moved" / "reference" / file.name for file in reference)
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"abcd")
    assert "resuming from" in trained(write(folder, "moved", launch={"ranks": 1}, shard={"engine": "fsdp"}))
    assert curve(folder / "moved") == pytest.approx(curve(directory), rel=1e-5)
    for file, numbers in zip((lost, damaged), values, strict=True):
        again = np.frombuffer(file.read_bytes()[32:], np.float32)
        np.testing.assert_allclose(again, numbers, rtol=1e-5)


def test_reference_is_of_the_model_and_without_dropout(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same file name with values of another model, an edited config.json, and other weights under a checkpoint."""
    shutil.copytree(folder / "model", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.4}))
    model, steps = {"path": str(tmp_path / "model")}, {"max_steps": 1, "global_batch_size": 20}
    data = {"path": str(folder / "pairs.jsonl"), "eval_fraction": 0.0}
    file = write(tmp_path, "run", steps, model=model, data=data, checkpoint={"every": 0})
    directory = tmp_path / "run"

    def first_loss() -> float:
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
        aliquot.train(aliquot.read_config(file))
        assert "dropout of model and adapter is off" in capsys.readouterr().out
        return curve(directory)[1]

    assert first_loss() == pytest.approx(math.log(2), abs=1e-6)
    (reference,) = (directory / "reference").iterdir()
    values = reference.read_bytes()[32:]
    reference.write_bytes(hashlib.sha256(values).digest() + values)  # of a file of another name
    assert first_loss() == pytest.approx(math.log(2), abs=1e-6)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.1}))
    assert first_loss() == pytest.approx(math.log(2), abs=1e-6)
    assert len(list((directory / "reference").iterdir())) == 2
    others = (np.frombuffer(values, np.float32) - np.linspace(0, 9, len(values) // 4, dtype=np.float32)).tobytes()
    shutil.rmtree(directory / "checkpoints")
    for path in (directory / "reference").iterdir():
        path.write_bytes(hashlib.sha256(path.name.encode() + others).digest() + others)
    with pytest.raises(UserError, match="in the reference, which is of another model"):
        aliquot.train(aliquot.read_config(file))


@pytest.mark.long
def test_other_base_weights_are_refused_before_their_reference(folder: Path, whole: tuple[Path, str]) -> None:
    shutil.copytree(whole[0], folder / "rebased", symlinks=True)
    shutil.copytree(folder / "model", folder / "other")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "other")
    before = sorted((folder / "rebased" / "reference").iterdir())
    file = write(folder, "rebased", {"max_steps": 8}, model={"path": str(folder / "other")})
    assert "model (hash of samples) was" in refused(file)
    assert sorted((folder / "rebased" / "reference").iterdir()) == before


@pytest.mark.long
def test_killed_run_has_the_curve_of_an_undisturbed_run(tmp_path: Path) -> None:
    """SIGKILL to two ranks: while they compute the reference, and between steps."""
    plain.save_llama(tmp_path / "model")
    write_pairs(tmp_path, count=1500)
    whole, killed = (write(tmp_path, name, {"max_steps": 60}, launch={"ranks": 2}) for name in ("whole", "killed"))
    trained(whole)
    directory, expected = tmp_path / "killed", tmp_path / "whole"
    killed_when(lambda: any((directory / "reference").glob("*.bin")), killed)
    (half,) = (directory / "reference").glob("*.bin")
    logprobs = np.frombuffer(half.read_bytes()[32:], np.float32)
    assert 2 < np.isnan(logprobs).sum() < len(logprobs), "the reference was complete"
    killed_when((directory / "checkpoints/step-00000004/manifest.json").exists, killed)
    assert 4 <= len(curve(directory)) < 60, "the run was over"
    assert "resuming from" in trained(killed)
    for metric in ("loss", "eval_loss", *METRICS):
        assert curve(directory, metric) == curve(expected, metric)
    for file in (expected / "reference").iterdir():
        assert (directory / "reference" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.long
def test_layers_that_are_copied_for_each_use_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reference, training, evaluation, resuming and a sample, with the CPU as the second device."""
    plain.save_llama(tmp_path / "model", layers=5)
    write_pairs(tmp_path)
    copied: list[Any] = []

    def outcome(name: str) -> tuple[Any, ...]:
        file = write(
            tmp_path, name, {"max_steps": 6, "eval_steps": 2}, checkpoint={"export": True}, shard={"engine": "host"},
            observe={"sample_prompt": "a ", "console": "plain"},
        )  # fmt: skip
        aliquot.train(aliquot.read_config(file))
        return (
            [curve(tmp_path / name, metric) for metric in ("loss", "eval_loss", *METRICS)],
            re.findall("sample.*", capsys.readouterr().out),
            (tmp_path / name / "export" / "model.safetensors").read_bytes(),
        )

    def build(_: type[HostEngine], meta: nn.Module, spec: EngineSpec, topology: Any) -> HostEngine:
        engine: HostEngine = resident(meta, replace(spec, copies_weights=True, copied_layers=4), topology)
        copied.append(engine._components.device_weights)
        return engine

    expected, resident = outcome("resident"), HostEngine.build
    monkeypatch.setattr(HostEngine, "build", classmethod(build))
    assert outcome("copied") == expected and expected[1]
    for folder in ("checkpoints/step-00000004", "checkpoints/step-00000006", "reference"):
        shutil.rmtree(tmp_path / "copied" / folder)
    assert outcome("copied") == expected
    assert min(weights.copied_bytes for weights in copied[1::2]) > 20 * copied[1].size_bytes


@pytest.mark.long
def test_plain_text_has_no_preferences(folder: Path) -> None:
    text = {"path": str(folder / "text.txt"), "document": "line"}
    assert "needs pairs of answers" in refused(write(folder, "no", data=text))


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_a_model_learns_from_pairs_of_its_own_ends(shared: Path, tmp_path: Path) -> None:
    model, stories = shared / "models" / "stories15M", shared / "data" / "tinystories-train-head.txt"

    def example(what: str, directory: Path) -> str:
        script = str(ROOT / "examples" / "happy_endings.py")
        command = [sys.executable, script, what, str(directory), str(stories), "--prompts", "12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    pairs = example("pairs", model)
    records = [json.loads(line) for line in pairs.splitlines()]
    assert records and all(record["chosen"] != record["rejected"] for record in records)
    (tmp_path / "pairs.jsonl").write_text(pairs)
    trained(
        ROOT / "examples" / "happy_endings.yaml", f"model.path={model}", f"data.path={tmp_path}/pairs.jsonl",
        f"run.directory={tmp_path}/run", "train.num_train_epochs=3", "train.learning_rate=5e-5",
        "train.global_batch_size=4", "launch.ranks=1",
    )  # fmt: skip
    losses = list(curve(tmp_path / "run").values())
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # the model still equals its reference
    assert losses[-1] < 0.6
    assert re.fullmatch(r"\d+\.\d% of 48 ends are happy\n", example("rate", tmp_path / "run" / "export"))
