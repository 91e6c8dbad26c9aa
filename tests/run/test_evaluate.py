"""`aliquot evaluate` agrees with the run of an export or a checkpoint, and with transformers.

`--tasks` on tasks of local files; lm-eval is no part of `dev`, because it brings 33 packages of 330 MB.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import aliquot
from aliquot.cli.main import app
from aliquot.config.evaluation_config import read_evaluation_config
from aliquot.config.read_config import read_config
from aliquot.core.errors import UserError
from aliquot.run.evaluate import evaluate_model
from tests.runs import command, curve, write_config
from tests.tools.docs_pages import ROOT


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


needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-evaluation-harness: pip install -e '.[eval]'"
)
FIXTURE = ROOT / "tests" / "fixtures" / "0.1.0"
CHECKPOINT = "checkpoints/step-00000003"
QUESTIONS = [
    {"question": question, "choices": choices, "answer": answer}
    for question, choices, answer in (
        ("the rank gathers", ["every weight", "one layer of", "a gradient"], 0),
        ("another layer", ["waits", "drops it"], 1),
        ("it drops", ["a weight", "every rank", "one"], 2),
        ("one sharded", ["gradient", "rank", "layer"], 1),
    )
]


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a multiple-choice task, a group of it, and a task whose data lie on the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task = {
        "task": "ranks",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    group = {"group": "all_ranks", "task": ["ranks"], "aggregate_metric_list": [{"metric": "acc"}]}
    remote = {**task, "task": "remote", "dataset_path": "owner/nowhere", "dataset_kwargs": {}}
    directory = tmp_path / "tasks"
    directory.mkdir()
    for name, content in (("ranks", task), ("group", group), ("remote", remote)):
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return directory


def accuracy(directory: Path) -> float:
    """The share of questions whose answer is likelier than the other choices, in a plain loop."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    right = 0
    for question in QUESTIONS:
        likelihoods = []
        for choice in question["choices"]:  # type: ignore[attr-defined]
            before, ids = (
                tokenizer.encode(text) for text in (question["question"], f"{question['question']} {choice}")
            )
            with torch.no_grad():
                logs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            likelihoods.append(sum(float(logs[at - 1, ids[at]]) for at in range(len(before), len(ids))))
        right += likelihoods.index(max(likelihoods)) == question["answer"]
    return right / len(QUESTIONS)


def evaluate(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@needs_harness
@pytest.mark.parametrize("model", ["export", CHECKPOINT])
def test_accuracy_is_that_of_a_plain_loop(tasks: Path, model: str) -> None:
    directory = FIXTURE / "model" / model
    code, output, errors = evaluate(directory, "--tasks", "all_ranks", "--include-path", tasks, "--json")
    assert code == 0, errors
    results = json.loads(output)
    expected = accuracy(directory)
    assert results["results"]["ranks"]["acc,none"] == expected == results["groups"]["all_ranks"]["acc,none"]
    assert results["n-samples"]["ranks"] == {"original": 4, "effective": 4}


@needs_harness
def test_an_adapter_and_a_table(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = FIXTURE / "model" / "export"
    options = ["--limit", "2", "--num-fewshot", "1", "--batch-size", "2", "--base", base]
    code, output, errors = evaluate(
        FIXTURE / "adapter" / CHECKPOINT, "--tasks", "rank*", "--include-path", tasks, *options
    )
    assert code == 0, errors
    row = next(line for line in output.splitlines() if line.startswith("|ranks"))
    assert [cell.strip() for cell in row.split("|")[4:6]] == ["1", "acc"]


@needs_harness
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tasks", "rankz"], "--tasks: 'rankz' is no task of lm-eval or --include-path; did you mean ranks"),
        (["--tasks", "remote"], "--tasks: the data of remote cannot be loaded: "),
        (["--tasks", "ranks", "--batch-size", "many"], "--batch-size is 'many': give a number, or auto"),
        (["--tasks", "ranks", "--apply-chat-template"], "--apply-chat-template: the tokenizer has no chat template"),
        (["--tasks", "ranks", "--num-fewshot", "9"], "--tasks: lm-eval cannot run these tasks: "),
    ],
)
def test_mistakes_are_one_line(tasks: Path, options: list[str], expected: str) -> None:
    code, _, errors = evaluate(FIXTURE / "model" / "export", "--include-path", tasks, *options)
    lines = errors.strip().splitlines()
    assert code == 2 and lines[-1].startswith(f"aliquot: {expected}"), errors
    assert sum(line.startswith("aliquot:") for line in lines) == 1 and "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "give DATA, a text file or the YAML of a run, or benchmarks with --tasks"),
        (["text.txt", "--tasks", "ranks"], "--tasks runs benchmarks: leave out DATA"),
        (["text.txt", "--limit", "3"], "need --tasks"),
    ],
)
def test_data_and_tasks_exclude_each_other(options: list[str], expected: str) -> None:
    code, _, errors = evaluate("model", *options)
    assert code == 2 and expected in errors


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_the_harness(tasks: Path) -> None:
    code, _, errors = evaluate(FIXTURE / "model" / "export", "--tasks", "ranks", "--include-path", tasks)
    assert (code, errors) == (
        2, "aliquot: --tasks needs lm-evaluation-harness: pip install 'aliquot[eval]' [missing-tool]\n",
    )  # fmt: skip
