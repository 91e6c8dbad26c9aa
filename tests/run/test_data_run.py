"""Runs on several sources and evaluation sets: their description, their losses, and one curve at any world size."""

from __future__ import annotations

import json
import random
import shutil
from datetime import date
from pathlib import Path

import pytest

import aliquot
from aliquot.core.errors import UserError
from aliquot.data.batches import Batches
from aliquot.data.prepare import prepare
from aliquot.data.workload import BatchSize
from aliquot.engines.deepspeed.deepspeed_setup import missing_tools
from aliquot.observe.run_directory import RunDirectory
from tests.runs import WORDS, command, curve, refused, trained, write_config

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_chats(folder: Path) -> Path:
    draw = random.Random(1)
    records = [
        {"messages": [{"role": "user", "content": " ".join(draw.choices(WORDS, k=4))},
                      {"role": "assistant", "content": " ".join(draw.choices(WORDS, k=8))}]}
        for _ in range(30)
    ]  # fmt: skip
    records += [{"messages": records[0]["messages"][:1]}, {"messages": []}]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    chats = str(write_chats(folder))
    text = str(write_config(folder).with_name("text.txt"))
    data = {
        "path": None, "document": None, "eval_fraction": 0.0, "chat_template": TEMPLATE, "sequence_length": 64,
        "sources": [
            {"name": "tiny-text", "path": text, "document": "line", "weight": 0.6},
            {"name": "chats", "path": chats, "weight": 0.4},
        ],
        "eval_sources": [{"name": "lines", "path": text, "document": "line"}, {"name": "talks", "path": chats}],
    }  # fmt: skip
    return write_config(folder, "alone", data=data, checkpoint={"every": 3, "export": False, "keep": 9})


@pytest.fixture(scope="module")
def alone(config: Path) -> tuple[Path, str]:
    return config.with_suffix(""), trained(config)


def test_data_is_described_before_training(alone: tuple[Path, str]) -> None:
    _, output = alone
    assert "tiny-text: 60 texts; " in output
    assert "chats: 31 chats (messages); " in output
    assert " tokens are learned (" in output
    assert "of the tokens of this run, " in output
    assert "chats: 1 x a blank record, left out; 1 x a record without an answer, left out" in output
    assert "evaluation, talks: 31 chats (messages); " in output
    assert "evaluation, talks: 1 x a blank record, left out; 1 x a record without an answer, left out" in output
    assert "an epoch: " in output
    assert "example 2 of chats: " in output
    lines = output[output.index("example 1 of chats") :].splitlines()
    assert lines[1].startswith("        | <user>")
    assert lines[2].startswith("        | <assistant>")
    assert lines[3].startswith("learned > ")
    assert lines[3].endswith("<|eos|>")


def test_each_source_and_each_set_has_its_loss(config: Path, alone: tuple[Path, str]) -> None:
    directory, output = alone
    section = aliquot.read_config(config).data
    batches = Batches.of(prepare(section, None, 1 << 20), section, 5, BatchSize(total=5, micro=2), None)
    for step, loss in curve(directory).items():
        batch = batches.step_batch(step - 1, 0, 1)
        parts = [curve(directory, f"loss_{name}").get(step, 0.0) for name in ("tiny-text", "chats")]
        summed = sum(loss * predicted for loss, predicted in zip(parts, batch.predicted_of, strict=True))
        assert summed / batch.predicted == pytest.approx(loss, rel=1e-6)
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert last.keys() == {
        "step", "eval_lines_loss", "eval_lines_perplexity", "eval_lines_bits_per_byte", "eval_talks_loss",
        "eval_talks_perplexity",
    }  # fmt: skip
    assert "evaluation lines: loss " in output
    assert "evaluation talks: loss " in output
    page = (directory / "report.html").read_text()
    assert all(title in page for title in ("Training loss of each source", "Perplexity of each evaluation set"))


@pytest.mark.long
def test_a_mixture_goes_on_at_another_world_size(config: Path, alone: tuple[Path, str]) -> None:
    directory, _ = alone
    again = [f"run.directory={config.parent / 'again'}", f"checkpoint.resume={directory}/checkpoints/step-00000003"]
    heavier = 'data.sources=[{"name": "tiny-text", "path": "%s", "document": "line", "weight": 0.7}, ' % (
        config.parent / "text.txt"
    ) + '{"name": "chats", "path": "%s", "weight": 0.4}]' % (config.parent / "chats.jsonl")
    assert "data.sources, tiny-text: weight was 0.6 and is 0.7" in refused(config, *again, heavier)
    trained(config, *again, "launch.ranks=2")
    for key in ("loss", "loss_chats", "eval_talks_loss"):
        expected = {step: value for step, value in curve(directory, key).items() if step > 3}
        assert curve(config.parent / "again", key) == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_the_other_engines_see_the_same_batches(config: Path, alone: tuple[Path, str], engine: str) -> None:
    """Compare the losses of every source and evaluation set on two ranks."""
    directory, _ = alone
    shard = [f"shard.engine={engine}"]
    if engine == "deepspeed":
        pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
        if missing_tools():
            pytest.skip(f"DeepSpeed on CPUs needs {' and '.join(missing_tools())}")
    trained(config, f"run.directory={config.parent / engine}", "launch.ranks=2", *shard)
    for key in ("loss", "loss_chats", "loss_tiny-text", "tokens", "eval_lines_loss", "eval_talks_loss"):
        expected = curve(directory, key)
        assert expected
        assert curve(config.parent / engine, key) == pytest.approx(expected, rel=1e-4)


def test_the_data_are_shown_without_training(config: Path) -> None:
    shown = command("data", "show", config, "train.max_steps=null", "train.num_train_epochs=1")
    assert shown.returncode == 0, shown.stderr
    for expected in (
        "example 1 of tiny-text: ", "example 2 of chats: ", "example 1 of talks (evaluation): ", "learned > ",
        "chats: 31 chats (messages); ", "this run has only ",
    ):  # fmt: skip
        assert expected in shown.stdout
    whole = command("data", "show", config, "data.train_on=all").stdout
    learned = whole[whole.index("example 1 of chats") :].splitlines()
    assert learned[1].startswith("        | <")
    assert learned[2].startswith("learned > "), "the prompt, but for its first token"
    wrong = command("data", "show", config, "data.chat_template=absent.jinja")
    assert (wrong.returncode, wrong.stderr.strip()) == (
        2, "aliquot: absent.jinja: data.chat_template cannot be read: No such file or directory. Give a file, a"
        " template or one of chatml, gemma, llama3, mistral, qwen, zephyr [tokenizer]",
    )  # fmt: skip


def test_the_day_of_a_run_is_kept(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.day() == date.today()
    directory.write_day(None)
    assert not list(tmp_path.iterdir())
    directory.write_day("2024-02-03")
    assert directory.day() == date(2024, 2, 3)
    directory.chat_template_date.write_text("yesterday")
    with pytest.raises(UserError, match=r"chat-template-date\.txt: holds no date .*: write one as 2026-01-31"):
        directory.day()


@pytest.mark.long
def test_a_run_goes_on_with_the_day_on_which_it_began(tmp_path: Path) -> None:
    """The run resumes on another day, on a machine without the cache."""
    data = {
        "path": str(write_chats(tmp_path)), "document": None, "eval_fraction": 0.0, "sequence_length": 64,
        "chat_template": "{{ strftime_now('%A %d %B') }}" + TEMPLATE, "cache_directory": str(tmp_path / "cache"),
    }  # fmt: skip
    config = write_config(tmp_path, data=data, checkpoint={"every": 1, "export": False}, train={"max_steps": 1})
    output = trained(config, "data.chat_template_date=2024-02-03")
    assert "the chat template writes a date: today is 2024-02-03 for all of this run" in output
    assert "Saturday 03 February" in output
    assert (tmp_path / "run" / "chat-template-date.txt").read_text() == "2024-02-03\n" != f"{date.today()}\n"
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "run" / "chat-template-date.txt").write_text("2024-02-13\n")  # damaged; checkpoints have it, too
    assert "today is 2024-02-03" in trained(config, "train.max_steps=2")
    another = refused(config, "train.max_steps=3", "data.chat_template_date=2024-02-04")
    assert "data.chat_template_date was '2024-02-03' and is '2024-02-04'" in another
