"""The cache of shapes and costs: it equals a new measurement, and needs no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import aliquot
from aliquot.cli.main import app
from aliquot.config.read_config import read_config
from aliquot.config.schema import RunConfig
from aliquot.core.errors import UserError
from aliquot.data.workload import Edges, Workload
from aliquot.planner import planned_model
from aliquot.planner.micro_batch_cost import MicroBatchCost, Step
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planned_model import PlannedModel, with_model_limits
from tests.data.stores import byte_level
from tests.planner.shapes import GEMMA2, LLAMA, planned_config
from tests.runs import write_config

EDGES = (0, 300, 512)
SERVER = Machine.from_numbers(64, 8, None)
STEP = Step("bf16", "none", "cpu", looks_up=True, head_gradient=False)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ALIQUOT_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"


def cost(config: RunConfig, found: PlannedModel | None = None) -> MicroBatchCost:
    return (found or PlannedModel(config)).cost(STEP, EDGES, 500)


def never(*arguments: object) -> None:
    raise AssertionError("the model was built")


@pytest.mark.parametrize("model", [LLAMA, GEMMA2], ids=lambda model: model["model_type"])
def test_cached_cost_equals_measured_cost(model: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    config = planned_config(model)
    first = PlannedModel(config)
    found = cost(config, first)
    monkeypatch.setattr("aliquot.models.shaped_model.shaped_model", never)
    again = PlannedModel(config)
    assert again.shape == first.shape
    assert cost(config, again) == found
    # One pass over the model tells what it costs compiled, too, and on GPUs with larger buffers than it fills.
    larger = [replace(STEP, logits_bytes=room) for room in (1 << 30, 1 << 34)]
    assert all(again.cost(step, EDGES, 500) == found for step in larger)
    compiled = again.cost(replace(STEP, compiled=True), EDGES, 500)
    assert compiled.saved_bytes == found.saved_bytes and compiled.forward["calls",] < found.forward["calls",]


def test_default_sequence_length_is_limited_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time the limit comes from the cache."""
    settings: dict[str, Any] = {"model": {"config": LLAMA | {"max_position_embeddings": 512}}}
    config = RunConfig.model_validate({**settings, "data": {"path": "stdlib"}, "train": {"global_batch_tokens": 4096}})
    limited = with_model_limits(config)
    assert (limited.data.sequence_length, limited.train.global_batch_size) == (512, 8)
    monkeypatch.setattr(planned_model, "resolve", never)
    assert with_model_limits(config) == limited
    assert config.with_positions(1024) is config.with_positions(None) is config
    pairs = RunConfig.model_validate({**settings, "data": {"path": "stdlib"}, "train": {"objective": "orpo"}})
    assert pairs.with_positions(300).data.sequence_length == 600
    longer = RunConfig.model_validate({**settings, "data": {"path": "stdlib", "sequence_length": 1024}})
    with pytest.raises(UserError, match=r"data.sequence_length is 1024, but the model has 512 positions"):
        aliquot.plan(longer, SERVER)
    assert aliquot.plan(config, SERVER).tokens_per_step == 4096


def test_cache_key_holds_model_and_software(monkeypatch: pytest.MonkeyPatch) -> None:
    config = planned_config(LLAMA)
    one, two = cost(config), cost(planned_config(LLAMA | {"num_hidden_layers": 8}))
    assert two.saved_bytes > one.saved_bytes
    monkeypatch.setattr(planned_model, "_software", lambda: ["changed"])
    monkeypatch.setattr("aliquot.models.shaped_model.shaped_model", never)
    with pytest.raises(AssertionError, match="built"):
        PlannedModel(config)


def test_changed_config_file_changes_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    rows = []
    for layers in (2, 3):
        file.write_text(json.dumps(LLAMA | {"num_hidden_layers": layers}))
        rows.append(PlannedModel(planned_config(file)).shape.layers)
    assert rows == [2, 3]
    file.unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        PlannedModel(planned_config(file))


def test_unreadable_cache_files_are_recomputed(own_cache: Path) -> None:
    config = planned_config(LLAMA)
    found = cost(config)
    for file in (own_cache / "plans").iterdir():
        file.write_text(file.read_text()[:-9])
    assert cost(config) == found


def test_unwritable_cache_only_costs_time(own_cache: Path) -> None:
    own_cache.write_text("not a directory")
    assert cost(planned_config(LLAMA)).saved_bytes > 0


def test_old_plans_go(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_model, "_CACHED_FILES", 2)
    for layers in (2, 3, 4):
        PlannedModel(planned_config(LLAMA | {"num_hidden_layers": layers}))
    assert len(list((own_cache / "plans").iterdir())) == 2


def test_plan_and_run_have_one_vocabulary_and_the_same_errors(tmp_path: Path) -> None:
    byte_level(vocabulary=290).save_pretrained(tmp_path / "tokenizer")
    file = write_config(tmp_path, train={"max_steps": 1}, launch={"ranks": 1})
    base = [f"data.tokenizer={tmp_path}/tokenizer", "data.tokenizer_vocab_size=null"]
    for change in ([], ["model.config.vocab_size=299"], ["model.add_tokens=[<a>]"]):
        config = read_config(file, [*base, *change, f"run.directory={tmp_path}/{len(change)}{change[-1:]}"])
        aliquot.train(config)
        exported = AutoModelForCausalLM.from_pretrained(Path(config.run.directory) / "export")
        assert exported.num_parameters() == aliquot.plan(config, SERVER).parameters, change
    for change, reason in (
        (["model.config.vocab_size=200"], "the tokenizer has 290 tokens and the model's embedding only 200 rows"),
        (["data.tokenizer=/nowhere"], "no such tokenizer file or directory"),
        (["data.chat_template=chatml"], "data.chat_template: chatml writes"),
        (["data.tokenizer=null", "data.tokenizer_vocab_size=200"], "data.tokenizer_vocab_size is 200; every byte"),
    ):
        config, errors = read_config(file, [*base, *change, f"run.directory={tmp_path}/bad"]), []
        for call in (aliquot.plan, aliquot.train):
            with pytest.raises(UserError, match=reason) as caught:
                call(config)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


def test_an_adapter_is_planned_without_weights() -> None:
    whole = PlannedModel(planned_config(LLAMA)).shape
    adapted = PlannedModel(planned_config(LLAMA, adapter={"r": 4})).shape
    assert 0 < adapted.learned_numel == adapted.numel - whole.numel


def test_the_second_plan_imports_no_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_config(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        app(["plan", str(file), "--instance", "c7i.8xlarge"])
    program = (
        "import sys; from aliquot.cli.main import app\n"
        f"try: app(['plan', {str(file)!r}, '--instance', 'm7i.4xlarge'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "m7i.4xlarge" in again and again.splitlines()[-1] == "False False"
    memory = [re.findall(r"^fits: ([\d.]+ GiB)", printed, re.MULTILINE) for printed in (capsys.readouterr().out, again)]
    assert memory[0] == memory[1] != []


@pytest.mark.long
def test_cost_has_bytes_of_heaviest_row_and_mean_work() -> None:
    length = 1024
    short, long, middling = (tuple(range(0, length + 1, size)) for size in (32, 1024, 512))
    model = PlannedModel(planned_config(LLAMA))

    def of_rows(*samples: Edges, sequences: int = 1, approximate: bool = False) -> MicroBatchCost:
        found = Workload(samples, length, length - 1, None, 0, "test")
        return model.cost_of(STEP, found, sequences, approximate)

    mixed, of_short, of_long, of_middling = (
        of_rows(short, short, long, middling),
        *map(of_rows, (short, long, middling)),
    )
    assert mixed.saved_bytes == of_long.saved_bytes == pytest.approx(of_short.saved_bytes, rel=0.01)
    multiplied = [flops(each) for each in (of_short, of_long, of_middling, mixed)]
    assert multiplied[0] < multiplied[2] < multiplied[1]
    assert multiplied[3] == pytest.approx((2 * multiplied[0] + multiplied[1] + multiplied[2]) / 4, rel=0.01)
    # Rows of many sequences that are extrapolated, whichever come first.
    for samples in ((short, long), (long, short), (long, short, short, long, short)):
        of_each = [multiplied[0] if each == short else multiplied[1] for each in samples]
        found = of_rows(*samples, sequences=32, approximate=True)
        assert flops(found) == pytest.approx(32 * sum(of_each) / len(samples), rel=0.02)


def test_extrapolation_counts_logits_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    config = planned_config(LLAMA | {"vocab_size": 32000}, data={"sequence_length": 256})
    model, found = PlannedModel(config), Workload.assumed(config)
    step = replace(STEP, logits_bytes=5 * 256 * 32000 * 2)
    exact = model.cost_of(step, found, 24)
    monkeypatch.setattr(planned_model, "_MOST_SEQUENCES", 8)
    extrapolated = PlannedModel(config).cost_of(step, found, 24)
    assert extrapolated.forward_bytes == pytest.approx(exact.forward_bytes, rel=0.03)
    assert flops(extrapolated) == pytest.approx(flops(exact), rel=0.03)


def test_an_evaluation_makes_no_gradients_of_the_head() -> None:
    config = planned_config(LLAMA | {"vocab_size": 32000})
    cost = PlannedModel(config).cost_of(STEP, Workload.assumed(config), 2)
    head = 2 * 32000 * LLAMA["hidden_size"] * (2 * config.data.sequence_length - 2)
    evaluating = flops(replace(cost, forward=cost.evaluation))
    assert flops(cost) - evaluating == pytest.approx(2 * head / 2, rel=0.05)


def test_short_rows_count_with_their_own_length() -> None:
    rows = ((0, 10), (0, 10), (0, 10), (0, 90))  # 30 tokens a row, 15 of which have a label
    model = PlannedModel(planned_config(LLAMA))
    found = model.cost_of(STEP, Workload(rows, 30.0, 15.0, None, 0, "test"), 1, approximate=False)
    shorter, longer = model.cost(STEP, rows[0], 5), model.cost(STEP, rows[-1], 45)
    assert found.saved_bytes == longer.saved_bytes
    assert flops(found) == pytest.approx((3 * flops(shorter) + flops(longer)) / 4, rel=0.03)
    calls = [cost.forward["calls",] for cost in (shorter, longer, found)]
    assert calls[2] == pytest.approx(calls[0], rel=0.3) == pytest.approx(calls[1], rel=0.3)


def flops(cost: MicroBatchCost) -> float:
    """Of all products, forward."""
    return sum(amount * key[1] * key[2] * key[3] * key[4] for key, amount in cost.forward.items() if key[0] == "matmul")
