"""KTO as a person runs it, against a plain loop with a frozen reference, and against TRL's KTOTrainer."""

from __future__ import annotations

import json
import random
import shutil
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aliquot
from aliquot.config.evaluation_config import read_evaluation_config
from aliquot.data.batches import Batches, objective_of
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import prepare
from aliquot.data.token_store import TokenStore
from aliquot.data.workload import batch_size
from aliquot.models.micro_batch import MicroBatch
from aliquot.run.evaluate import evaluate_model
from tests import plain
from tests.runs import WORDS, curve, refused, trained, write_config

METRICS = ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
TRAIN = {"objective": "kto", "beta": 0.3, "desirable_weight": 1.5, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kto")
    plain.save_llama(folder / "model")
    draw = random.Random(3)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(2, most)))

    prompts = [words(7) for _ in range(16)]
    prompts += prompts[:-1]  # as pairs are unpaired: first all desirable answers
    records = [{"prompt": prompt, "completion": f" {words(9)}", "label": at < 16} for at, prompt in enumerate(prompts)]
    (folder / "rated.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    unusable = [{"prompt": "a", "completion": " ".join(WORDS * 4), "label": True}]
    unusable += [{"prompt": "a", "completion": "b", "label": "good"}]
    (folder / "more.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records + unusable))
    return folder


def write(folder: Path, name: str, **sections: dict[str, Any]) -> Path:
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "model"), "config": None},
        "data": {"path": str(folder / "more.jsonl"), "document": None, "sequence_length": 64, "eval_fraction": 0.3},
        "train": dict(TRAIN),
        "checkpoint": {"every": 2, "keep": 9, "export": False},
    }
    for section, values in sections.items():
        defaults.setdefault(section, {}).update(values)
    return write_config(folder, name, **defaults)


def others(prompts: list[Any]) -> list[int]:
    """The record half the records further on, if those of a prompt are neighbours."""
    order = sorted(range(len(prompts)), key=lambda number: prompts.index(prompts[number]))
    return [order[(order.index(number) + len(order) // 2) % len(order)] for number in range(len(order))]


class PlainLoss:
    """The summed loss of a micro-batch; the divergence is that of the global batch to which the micro-batch belongs."""

    def __init__(self, reference: nn.Module, store: TokenStore, config: aliquot.RunConfig) -> None:
        assert store.mask is not None and store.desirable is not None
        self.reference, self.train, self.length = reference, config.train, config.data.sequence_length
        self.documents = [store.tokens[a:b].tolist() for a, b in pairwise(store.offsets)]
        self.begins = [1 + store.mask[a + 1 : b].tolist().index(1) for a, b in pairwise(store.offsets)]
        self.desirable = store.desirable.tolist()
        self.others = others([document[:begin] for document, begin in zip(self.documents, self.begins, strict=True)])
        self.numbers = {tuple(ids): number for number, ids in enumerate(self.documents)}
        assert len(self.numbers) == len(self.documents)
        self.divergence = 0.0
        self.global_batches: Any = iter(())
        self.left = 0

    def ratio(self, model: nn.Module, ids: list[int], begin: int) -> Tensor:
        def logprob(model: nn.Module) -> Tensor:
            logits = model(input_ids=torch.tensor([ids])).logits[0, begin - 1 : -1]
            return -nn.functional.cross_entropy(logits, torch.tensor(ids[begin:]), reduction="sum")

        with torch.no_grad():
            before = logprob(self.reference)
        return logprob(model) - before

    def members(self, batch: MicroBatch) -> list[int]:
        rows = [tuple(batch.input_ids[a:b].tolist()) for a, b in pairwise(batch.edges)]
        return [self.numbers[row] for row in rows if row in self.numbers]

    def set_divergence(self, model: nn.Module, batches: list[MicroBatch]) -> None:
        ratios = []
        for number in [number for batch in batches for number in self.members(batch)]:
            other = self.others[number]
            prompt, answer = self.documents[number][: self.begins[number]], self.documents[other][self.begins[other] :]
            with torch.no_grad():
                ratios.append(float(self.ratio(model, (prompt + answer)[: self.length], len(prompt))))
        self.divergence = max(0.0, sum(ratios) / len(ratios))

    def __call__(self, model: nn.Module, batch: MicroBatch | None) -> Tensor:
        assert batch is not None
        if self.left == 0 and (batches := next(self.global_batches, None)) is not None:
            self.set_divergence(model, batches)
            self.left = len(batches)
        self.left -= 1
        losses = []
        for number in self.members(batch):
            above = self.train.beta * (self.ratio(model, self.documents[number], self.begins[number]) - self.divergence)
            weights = self.train.undesirable_weight, self.train.desirable_weight
            sign = 1 if self.desirable[number] else -1
            losses.append(weights[self.desirable[number]] * torch.sigmoid(-sign * above))
        return torch.stack(losses).sum()


def plain_curve(file: Path, steps: int) -> tuple[list[float], float]:
    """Losses of a plain loop, and the loss on held-out answers at the end."""
    config = aliquot.read_config(file)
    model, reference = plain.model_and_reference(config)
    data = prepare(config.data, Path(str(config.model.path)), model.config.vocab_size)
    objective, size = objective_of(config.train), batch_size(config.train, 1)
    assert objective is not None
    batches = Batches.of(data, config.data, config.run.seed, size, None).with_objective(objective)
    loss = PlainLoss(reference, data.open_train()[""], config)
    loss.global_batches = (batches.step_batch(step, 0, 1).micro_batches for step in range(steps))
    losses = plain.train(model, batches, config.train, steps, loss)
    held_out = EvalBatches.of(data, config.data, size)[""].with_objective(objective)
    loss = PlainLoss(reference, data.open_eval()[""], config)
    rows = [row for row in held_out.micro_batches(0, 1) if row is not None]
    loss.set_divergence(model, rows)
    with torch.no_grad():
        return losses, sum(float(loss(model, row)) for row in rows) / held_out.predicted


def check_curve(file: Path) -> None:
    directory = file.with_suffix("")
    losses, evaluated = plain_curve(file, 6)
    assert list(curve(directory).values()) == pytest.approx(losses, rel=1e-5)
    assert curve(directory, "eval_loss")[6] == pytest.approx(evaluated, rel=1e-5)
    assert any(value > 0 for value in curve(directory, "kl").values())
    assert all(curve(directory, metric) for metric in METRICS)


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, str]:
    """The config of a run, and what the run printed."""
    file = write(folder, "whole", launch={"ranks": 2}, shard={"engine": "host"})
    return file, trained(file)


def test_the_curve_is_that_of_a_plain_loop(whole: tuple[Path, str]) -> None:
    file, output = whole
    assert "1 x a record whose label is neither true nor false, left out" in output
    assert "1 answer is longer than data.sequence_length 64, left out" in output
    check_curve(file)
    directory = file.with_suffix("")
    model = next(directory.glob("checkpoints/step-*6"))
    evaluation = evaluate_model(read_evaluation_config(model, file, ["launch.ranks=1"]))[""]
    metrics = {"loss": evaluation.loss, **evaluation.preferences}
    logged = {name: curve(directory, f"eval_{name}")[6] for name in metrics}
    assert metrics == pytest.approx(logged, rel=1e-5, abs=1e-6) and "kl" in metrics


@pytest.mark.long
@pytest.mark.usefixtures("whole")
def test_a_run_goes_on_at_another_world_size(folder: Path) -> None:
    shutil.copytree(folder / "whole", folder / "moved")
    for step in (4, 6):
        shutil.rmtree(folder / "moved" / "checkpoints" / f"step-{step:08d}")
    assert "resuming from" in trained(write(folder, "moved", launch={"ranks": 1}))
    assert curve(folder / "moved") == pytest.approx(curve(folder / "whole"), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "engine", "sections"),
    [
        (1, "host", {"data": {"packing": False}}),
        (3, "host", {"train": {**TRAIN, "per_device_train_batch_size": 2}}),
        (2, "host", {"adapter": {"r": 3, "alpha": 12.0}}),
        (1, "fsdp", {}),
        (2, "fsdp", {"data": {"packing": False}}),
        (3, "fsdp", {"train": {**TRAIN, "gradient_checkpointing": "full"}}),
    ],
)
def test_every_engine_has_the_curve_of_a_plain_loop(
    folder: Path, ranks: int, engine: str, sections: dict[str, Any]
) -> None:
    name = f"{engine}-{ranks}-{'-'.join(sections)}"
    file = write(folder, name, launch={"ranks": ranks}, shard={"engine": engine}, **deepcopy(sections))
    trained(file)
    check_curve(file)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_curve_is_that_of_trl(folder: Path, ranks: int) -> None:
    """With all 31 records in one batch, in an order in which TRL makes the same mismatched answers."""
    train = {**TRAIN, "max_steps": 5, "global_batch_size": 31, "lr_scheduler_type": "constant", "warmup_steps": 0}
    data = {"path": str(folder / "rated.jsonl"), "packing": False, "eval_fraction": 0.0}
    file = write(folder, f"trl-{ranks}", launch={"ranks": ranks}, data=data, train=train, checkpoint={"every": 0})
    trained(file)
    records = [json.loads(line) for line in (folder / "rated.jsonl").read_text().splitlines()]
    # In TRL, the mismatched answer of record i of a batch is that of record i - 1.
    order, mismatched = [0], others([record["prompt"] for record in records])
    while len(order) < len(records):
        order.append(mismatched.index(order[-1]))
    logged = plain.trl_log(
        "KTO", aliquot.read_config(file), [records[number] for number in order], desirable_weight=1.5
    )
    for name in ("loss", *METRICS):
        ours = list(curve(folder / f"trl-{ranks}", name).values())
        assert ours == pytest.approx([line[name] for line in logged], rel=1e-5, abs=1e-6), name


@pytest.mark.long
def test_kto_needs_ratings_of_answers_to_several_prompts(folder: Path) -> None:
    text = {"path": str(folder / "text.txt"), "document": "line"}
    assert "needs rated answers" in refused(write(folder, "no", data=text))
    records = [{"prompt": "a", "completion": f" {word}", "label": True} for word in WORDS]
    (folder / "alike.jsonl").write_text("\n".join(map(json.dumps, records)))
    line = refused(write(folder, "alike", data={"path": str(folder / "alike.jsonl")}))
    assert "a source has only one prompt: give more, also for evaluation" in line
