"""`aliquot evaluate` agrees with the run of an export or a checkpoint, and with transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import aliquot
from aliquot.config.evaluation_config import read_evaluation_config
from aliquot.config.read_config import read_config
from aliquot.core.errors import UserError
from aliquot.run.evaluate import evaluate_model
from tests.runs import command, curve, write_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run that has ended, with the default length of sequences."""
    config = write_config(tmp_path_factory.mktemp("evaluate"), "run", checkpoint={"every": 3}, train={"eval_steps": 3})
    config.write_text(config.read_text().replace("  sequence_length: 32\n", ""))
    aliquot.train(aliquot.read_config(config))
    return config


@pytest.mark.parametrize(("model", "step"), [("export", 6), ("checkpoints/step-00000003", 3)])
def test_evaluate_agrees_with_the_run(run: Path, model: str, step: int) -> None:
    directory = run.parent / "run"
    evaluation = evaluate_model(read_evaluation_config(str(directory / model), str(run), []))[""]
    assert evaluation.loss == pytest.approx(curve(directory, "eval_loss")[step], rel=1e-6)
    assert evaluation.perplexity == pytest.approx(curve(directory, "eval_perplexity")[step], rel=1e-6)
    assert evaluation.bits_per_byte == pytest.approx(curve(directory, "eval_bits_per_byte")[step], rel=1e-6)
    assert (evaluation.ranks, evaluation.sequence_length) == (1, 64)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_text_as_transformers_reads_it(run: Path, tmp_path: Path, ranks: int) -> None:
    """Every line is a document shorter than a sequence."""
    lines = ["the rank gathers every weight", "another layer waits", "it drops a gradient of one"] * 3
    text, export = tmp_path / "text.txt", run.parent / "run" / "export"
    text.write_text("\n".join(lines) + "\n")
    asked = ["--json", "--sequence-length", "32", "--ranks", str(ranks), "data.document=line", "train.precision=fp32"]
    result = command("evaluate", export, text, *asked, "launch.device=cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    printed = json.loads(result.stdout)

    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    prefix = json.loads((export / "aliquot.json").read_text())["prefix"]
    nats, predicted = 0.0, 0
    for line in lines:
        ids = [*prefix, *tokenizer.encode(line, add_special_tokens=False), tokenizer.eos_token_id]
        row = torch.tensor([ids])
        with torch.no_grad():
            nats += float(model(input_ids=row, labels=row).loss) * (len(ids) - 1)
        predicted += len(ids) - 1
    assert (printed["predicted_tokens"], printed["documents"], printed["ranks"]) == (predicted, len(lines), ranks)
    assert printed["loss"] == pytest.approx(nats / predicted, rel=1e-5)
    assert printed["bits_per_byte"] == pytest.approx(nats / math.log(2) / sum(map(len, lines)), rel=1e-5)


def test_sequences_are_no_longer_than_the_model_can_read(run: Path) -> None:
    """The default is 1024 tokens, but this model has 64 positions."""
    assert read_config(run.parent / "run" / "config.yaml").data.sequence_length == 64
    shown = command("data", "show", run)
    assert " of 64, packed" in shown.stdout, shown.stdout + shown.stderr
    text = str(run.parent / "text.txt")
    evaluation = evaluate_model(read_evaluation_config(str(run.parent / "run" / "export"), text, ["launch.ranks=1"]))[
        ""
    ]
    assert evaluation.sequence_length == 64 and math.isfinite(evaluation.loss)


@pytest.mark.long
def test_cuts_that_may_not_be_exact_are_told(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ab" * 150_000 + "\n")
    result = command("evaluate", run.parent / "run" / "export", text, "--sequence-length", "64", "--ranks", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 x a stretch of text without an exact place for a cut" in result.stdout


def test_the_config_of_a_run_on_a_stream(tmp_path: Path) -> None:
    data = {"path": "text.jsonl", "tokenizer_vocab_size": None, "document": None, "eval_fraction": 0.0}
    data |= {"streaming": True, "shuffle_buffer": 16, "eval_sources": [{"name": "other", "dataset": "owner/name"}]}
    config = read_evaluation_config("model", str(write_config(tmp_path, data=data)), [])
    assert not config.data.streaming and config.data.dataset == "owner/name"


def test_the_config_of_a_run_on_nodes_that_come_and_go(run: Path) -> None:
    launch = ["launch.nodes='1:4'", "train.global_batch_size=4"]
    read = read_evaluation_config(str(run.parent / "run" / "export"), str(run), launch)
    assert read.launch.nodes == 1


@pytest.mark.parametrize(
    ("model", "data", "overrides", "expected"),
    [
        ("nowhere", "text.txt", [], "no such directory"),
        ("run/export", "nowhere.txt", [], "no such file"),
        ("run/export", "text.txt", ["data.sequence_length=128"], "64 positions"),
        ("run/export", "text.txt", ["data.seq_len=16"], "write data.sequence_length"),
        ("run/export", "run.yaml", ["data.eval_fraction=0"], "no evaluation data"),
        ("run/export", "text.txt", ["data.eval_path=null"], "the argument DATA sets the text"),
        (
            "run/export",
            "text.txt",
            ["data.path=other.txt"],
            "override 'data.path=other.txt' has no effect: the argument DATA",
        ),
        (
            "run/export",
            "text.txt",
            ["data.eval_fraction=0.5"],
            "'data.eval_fraction=0.5' has no effect: the argument DATA",
        ),
        ("run/export", "text.txt", ["data.streaming=true"], "has no effect: an evaluation reads all data first"),
        (
            "run/export",
            "run.yaml",
            ["data.tokenizer=x"],
            "has no effect: the argument MODEL sets the model, with its to",
        ),
        ("run/export", "text.txt", ["model.path=null", "model.config={model_type: llama}"], "the argument MODEL sets"),
        ("run", "run.yaml", [], "no config.json here; the model of this run is .*/run/export"),
    ],
)
def test_bad_input_is_one_line(run: Path, model: str, data: str, overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        evaluate_model(read_evaluation_config(str(run.parent / model), str(run.parent / data), overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [("", "MODEL is empty"), ("a\0b", "MODEL has characters that no text file can hold")],
)
def test_adapter_on_model_without_targets_is_one_line(run: Path, model: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_evaluation_config(model, str(run), [])
