"""`aliquot evaluate --tasks` on tasks of local files; lm-eval is no part of `dev`: it brings 33 packages of 330 MB."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from aliquot.cli.main import app
from tests.tools.docs_pages import ROOT

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
