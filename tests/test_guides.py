"""Commands of the guides and of the chat tutorial, on a small pretrained model and real texts, in the pages' order."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.runs import curve
from tests.test_docs import place_configs, write_configs
from tests.tools import warm
from tests.tools.docs_pages import ROOT, blocks

GUIDES = ROOT / "docs" / "guides"
OWN_TEXT, ADAPTERS, TOKENS = GUIDES / "own-text.md", GUIDES / "adapters.md", GUIDES / "new-tokens.md"
SCHEDULES, DATA, SERVING = GUIDES / "schedules-and-evaluation.md", GUIDES / "data.md", GUIDES / "serving.md"
TUTORIAL = ROOT / "docs" / "tutorials" / "chat-model.md"
HUB_MODEL = "meta-llama/Llama-3.1-8B-Instruct"
# So that each run takes seconds: the model knows 512 positions, and its texts are short.
FEW = ["data.sequence_length=128", "train.precision=fp32", "train.global_batch_size=4"]
SMALL = [*FEW, "data.document=block"]
EVALUATED = [*FEW[:2], "data.document=block"]
SETTINGS = {
    "mine.yaml": [*SMALL, "train.max_steps=20"],
    "tokens.yaml": [*SMALL, "train.max_steps=20"],
    "adapter.yaml": [*SMALL, "train.max_steps=300"],
    "loop.yaml": [*SMALL, "train.max_steps=40", "train.eval_steps=10", "train.lr_scheduler_kwargs.num_decay_steps=10"],
    "assistant.yaml": [*FEW, "train.eval_steps=4", "train.learning_rate=1e-3"],
}


@pytest.fixture(scope="module")
def place(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models, texts and chats of a reader."""
    folder = tmp_path_factory.mktemp("guides")
    place_configs(None, folder)
    for page in (OWN_TEXT, ADAPTERS, TOKENS, SCHEDULES, TUTORIAL):
        write_configs(page, folder)
    (folder / "path" / "to").mkdir(parents=True)
    model = shared / "models" / "stories260K"
    (folder / "path" / "to" / "model").symlink_to(model)
    instruct = folder / HUB_MODEL  # a directory that the config of the tutorial names like the model of the hub
    shutil.copytree(model, instruct)
    instruct.chmod(0o755)  # the shared directory cannot be written
    shutil.copy(ROOT / "src/aliquot/data/templates/zephyr.jinja", instruct / "chat_template.jinja")
    for name, texts in {"texts": ("wikitext2-raw-valid", "tinyshakespeare"), "other-texts": ("austen-train",)}.items():
        (folder / name).mkdir()
        for text in texts:
            (folder / name / f"{text}.txt").write_text((shared / "data" / f"{text}.txt").read_text()[:60_000])
    (folder / "book.txt").write_text((shared / "data" / "austen-train.txt").read_text()[:40_000])
    (folder / "prompts.txt").write_text("There was\nLily saw\n")
    (folder / "chats.jsonl").write_text("".join(map(chat, range(60))))
    return folder


def chat(number: int) -> str:
    messages = [
        {"role": "user", "content": f"What comes after {number}?"},
        {"role": "assistant", "content": f"{number + 1}, and then {number + 2}."},
    ]
    return f"{json.dumps({'messages': messages})}\n"


def commands(page: Path, *words: str) -> Iterator[list[str]]:
    """Yield the commands of `page` that begin with `aliquot` and `words`, and that need no cluster and no GPU."""
    for block in blocks(page):
        if block.language == "sh" and block.needs <= {"data", "minutes", "hub"}:
            yield from (command for command in block.commands() if command[: len(words) + 1] == ["aliquot", *words])


def run(place: Path, command: list[str]) -> str:
    config = next((word for word in command[2:] if word in SETTINGS), None)
    arguments = [*command[1:], *(SETTINGS[config] if config else [])]
    if "--sequence-length" in arguments:
        arguments[arguments.index("--sequence-length") + 1] = "256"
    elif command[1] == "evaluate" and config is None:
        arguments += EVALUATED
    done = warm.run("-m", "aliquot", *arguments, cwd=place)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@pytest.mark.long
def test_own_text_then_generate(place: Path) -> None:
    for command in islice(commands(OWN_TEXT), 3):
        printed = run(place, command)
    assert "Once upon" in printed


@pytest.mark.long
def test_adapter_is_trained_merged_and_evaluated(place: Path) -> None:
    for command in islice(commands(ADAPTERS), 4):
        run(place, command)
    losses = curve(place / "runs" / "adapter")
    assert len(losses) == 300 and sum(list(losses.values())[-20:]) < 0.9 * sum(list(losses.values())[:20])
    assert (place / "merged" / "model.safetensors").is_file()


@pytest.mark.long
def test_schedule_then_evaluation(place: Path) -> None:
    run(place, ["aliquot", "train", "loop.yaml"])
    assert (place / "runs" / "loop" / "checkpoints" / "best").is_symlink()
    others = {"--tasks", "preferences.yaml", "pairs.jsonl"}  # need the hub, or data of another guide
    evaluations = [command for command in commands(SCHEDULES, "evaluate") if others.isdisjoint(command)]
    printed = [run(place, command) for command in evaluations]
    assert len(printed) == 5 and all("perplexity" in text for text in printed)
    assert json.loads(printed[2])["perplexity"] > 1


@pytest.mark.long
def test_new_tokens_are_exported(place: Path) -> None:
    (command,) = commands(TOKENS)
    run(place, command)
    added = json.loads((place / "runs" / "tokens" / "export" / "tokenizer.json").read_text())["added_tokens"]
    assert {"<think>", "</think>", "<|turn|>"} <= {token["content"] for token in added}


@pytest.mark.long
def test_several_sources(place: Path) -> None:
    printed = [run(place, command) for command in commands(DATA)]
    assert "learned >" in printed[0]
    lines = [json.loads(line) for line in (place / "runs" / "chats" / "metrics.jsonl").read_text().splitlines()]
    assert any("loss_pairs" in line for line in lines) and any("eval_held-out-chats_loss" in line for line in lines)


@pytest.mark.long
def test_chat_tutorial_then_serving(place: Path) -> None:
    """All commands of the tutorial before its rehearsal, then those that talk to the model."""
    for command in commands(TUTORIAL):
        searches = "--optimize" in command  # for minutes
        if command[1] not in ("doctor", "export") and "examples/chats.yaml" not in command and not searches:
            run(place, command)
    assert (place / "runs" / "assistant" / "checkpoints" / "best").is_symlink()
    talk = [command for command in commands(SERVING) if command[1] in ("chat", "generate")]
    printed = [run(place, command) for command in talk]
    assert any("There was" in text and "Lily saw" in text for text in printed)
