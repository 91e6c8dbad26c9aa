"""The recipes' own commands on a real pretrained model and real text, in the order of the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.runs import curve
from tests.test_docs import place_configs
from tests.tools import warm
from tests.tools.docs_pages import ROOT, blocks

PAGE = ROOT / "docs" / "guides" / "recipes.md"
# So that each run takes seconds: the model knows 512 positions, and its texts are short.
SMALL = ["data.sequence_length=128", "data.document=block", "train.precision=fp32", "train.global_batch_size=4"]
MINE = [*SMALL, "train.max_steps=20"]
STEPS = {
    "mine.yaml": MINE,
    "adapter.yaml": [*SMALL, "train.max_steps=300"],
    "loop.yaml": [*SMALL, "train.max_steps=40", "train.eval_steps=10", "train.lr_scheduler_kwargs.num_decay_steps=10"],
    "examples/finetune.yaml": [*MINE, "model.config=null", "model.path=path/to/model", "data.path=texts"],
    "examples/chats.yaml": [],
}


@pytest.fixture(scope="module")
def place(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the page says the reader has."""
    folder = tmp_path_factory.mktemp("recipes")
    place_configs(PAGE, folder)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "model").symlink_to(shared / "models" / "stories260K")
    for name, texts in {"texts": ("wikitext2-raw-valid", "tinyshakespeare"), "other-texts": ("austen-train",)}.items():
        (folder / name).mkdir()
        for text in texts:
            (folder / name / f"{text}.txt").write_text((shared / "data" / f"{text}.txt").read_text()[:60_000])
    (folder / "book.txt").write_text((shared / "data" / "austen-train.txt").read_text()[:40_000])
    (folder / "prompts.txt").write_text("There was\nLily saw\n")
    return folder


def commands(*words: str) -> Iterator[list[str]]:
    """Those of the page that begin so, of blocks that a reader with a model and texts can run."""
    for block in blocks(PAGE):
        if block.language == "sh" and block.needs <= {"data", "minutes"}:
            yield from (command for command in block.commands() if command[: len(words)] == list(words))


def run(place: Path, command: list[str]) -> str:
    arguments = [*command[1:], *(STEPS.get(command[2], []) if command[1] == "train" else [])]
    if "--sequence-length" in arguments:
        arguments[arguments.index("--sequence-length") + 1] = "256"
    elif command[1] == "evaluate":
        arguments += SMALL[:3]
    done = warm.run("-m", "aliquot", *arguments, cwd=place)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@pytest.mark.long
def test_adapter(place: Path) -> None:
    for command in islice((c for c in commands("aliquot") if "adapter" in " ".join(c)), 3):
        run(place, command)
    losses = curve(place / "runs" / "adapter")
    assert len(losses) == 300 and sum(list(losses.values())[-20:]) < 0.9 * sum(list(losses.values())[:20])
    assert (place / "merged" / "model.safetensors").is_file()


@pytest.mark.long
def test_loop_and_evaluate(place: Path) -> None:
    run(place, ["aliquot", "train", "loop.yaml"])
    assert (place / "runs" / "loop" / "checkpoints" / "best").is_symlink()
    of_adapter = "runs/adapter/export"
    told = [run(place, command) for command in commands("aliquot", "evaluate") if of_adapter not in command]
    assert len(told) == 3 and "perplexity" in told[0] and "perplexity" in told[1]
    assert json.loads(told[2])["perplexity"] > 1


@pytest.mark.long
def test_mine_then_new_tokens_then_words(place: Path) -> None:
    (plain,) = (c for c in commands("aliquot", "train") if c[2:] == ["mine.yaml"])
    run(place, plain)
    (again,) = (c for c in commands("aliquot", "train", "mine.yaml") if any("add_tokens" in word for word in c))
    run(place, [*again, "run.name=tokens", "run.directory=runs/tokens"])
    added = json.loads((place / "runs" / "tokens" / "export" / "tokenizer.json").read_text())["added_tokens"]
    assert {"<think>", "</think>", "<|turn|>"} <= {token["content"] for token in added}
    said = [run(place, command) for command in commands("aliquot", "generate", "runs/mine/export")]
    assert any("There was" in text and "Lily saw" in text for text in said)


@pytest.mark.long
def test_chats_in_several_sources_then_chat(place: Path) -> None:
    assert "learned >" in run(place, ["aliquot", "data", "show", "examples/chats.yaml"])
    run(place, ["aliquot", "train", "examples/chats.yaml"])
    lines = [json.loads(line) for line in (place / "runs" / "chats" / "metrics.jsonl").read_text().splitlines()]
    assert any("loss_pairs" in line for line in lines) and any("eval_held-out-chats_loss" in line for line in lines)
    assert any(commands("aliquot", "chat"))
    run(place, ["aliquot", "chat", "runs/chats/export"])  # nobody says anything
