"""Runs on several sources and evaluation sets: their description, their losses, and one curve at any world size.

A pretrained model that needs a bos token, or that does not know the text, causes a warning.

`aliquot data show` says what the run says of its data, and refuses what the run refuses.
"""

from __future__ import annotations

import json
import random
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import aliquot
from aliquot.config.read_config import read_config
from aliquot.core.errors import UserError
from aliquot.data.batches import Batches
from aliquot.data.prepare import prepare
from aliquot.data.workload import BatchSize
from aliquot.engines.deepspeed.deepspeed_setup import missing_tools
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.logits_gradient import IGNORE
from aliquot.observe.run_directory import RunDirectory
from aliquot.run.data_sanity import with_prefix
from aliquot.run.resolved_run import lay_out, model_source, prepare_data
from tests import plain
from tests.conftest import REPOSITORY
from tests.data.stores import byte_level
from tests.runs import WORDS, command, curve, refused, trained, write_config, write_text

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


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip


def test_prefix_precedes_documents_and_is_not_predicted() -> None:
    labels = torch.tensor([6, IGNORE, 8, 9, IGNORE])
    batch = MicroBatch(torch.tensor([5, 6, 7, 8, 9]), labels, torch.tensor([0, 1, 0, 1, 2]), (0, 2, 5))
    prefixed = with_prefix(batch, [1])
    assert prefixed.input_ids.tolist() == [1, 5, 1, 7, 8], "as long as they were: a model may know no more positions"
    assert prefixed.labels.tolist() == [IGNORE, 6, IGNORE, 8, 9]
    assert prefixed.position_ids.tolist() == [0, 1, 0, 1, 2] and prefixed.edges == (0, 2, 5)


@pytest.mark.long
def test_bad_first_loss_warns_with_advice(tmp_path: Path) -> None:
    """The model has learned a text by positions, and without bos every position is off by one."""
    words = random.Random(0).choices(["the", "a", "rank", "waits"], k=12)
    text = tmp_path / "song.txt"
    text.write_text((" ".join(words) + "\n") * 40)
    data = {"path": str(text), "eval_fraction": 0.0, "tokenizer_vocab_size": 290}
    train = {"max_steps": 60, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "warmup_steps": 0}
    taught = write_config(tmp_path, "taught", model={"config": GPT2}, data=data, train=train)
    trained(taught)
    export = tmp_path / "taught" / "export"
    again = {**data, "tokenizer_vocab_size": None}
    model = {"config": None, "path": str(export)}
    tuned = write_config(tmp_path, "tuned", model=model, data={**again, "add_bos": False}, train={"max_steps": 1})
    run_output = command("train", tuned)
    assert run_output.returncode == 0 and "set data.add_bos=true" in run_output.stdout + run_output.stderr
    right = command("train", write_config(tmp_path, "right", model=model, data=again, train={"max_steps": 1}))
    assert right.returncode == 0 and "begin at a loss" not in right.stdout + right.stderr

    weights = load_file(export / "model.safetensors")
    save_file({name: -3 * values for name, values in weights.items()}, export / "model.safetensors")
    worse = command("train", write_config(tmp_path, "worse", model=model, data=again, train={"max_steps": 1}))
    assert "guessing gives" in worse.stdout + worse.stderr


EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
LONG = " ".join(WORDS * 4)
PAIR = {"prompt": "a ", "chosen": LONG, "rejected": "b"}
UNANSWERED: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": "a"}]}]
STREAM = {"max_steps": 1}
RATED = {"prompt": "a ", "completion": LONG, "label": True}


@pytest.mark.few(1)
@pytest.mark.parametrize("example", sorted(EXAMPLES, key=lambda path: path.stem != "happy_endings"))
def test_data_show_says_what_the_run_says(tmp_path: Path, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each example, with a tiny model and tiny texts in the place of those that are not here."""
    monkeypatch.chdir(REPOSITORY)
    config = read_config(example)
    overrides = [f"run.directory={tmp_path}/run", "train.max_steps=2", "checkpoint.export=false", "launch.nodes=1",
                 "launch.device=cpu", "shard.offload=none", "launch.ranks=1", f"data.cache_directory={tmp_path}/cache",
                 "train.compile=none", "train.precision=fp32", "observe.console=plain"]  # fmt: skip
    if config.data.sources is None:
        overrides += ["data.dataset=null", "data.dataset_config=null", f"data.path={write_text(tmp_path)}"]
        overrides += ["data.document=line", *(["data.eval_fraction=0.2"] if config.data.eval_fraction else [])]
    if config.train.objective == "dpo":
        pairs = [{"prompt": "a ", "chosen": " ".join(WORDS[:n]), "rejected": "b"} for n in range(1, 20)]
        (tmp_path / "text.txt").unlink()
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, [*pairs, PAIR])))
        overrides += [f"data.path={tmp_path}/pairs.jsonl", "data.document=null", "data.sequence_length=128"]
    if config.model.path is not None or config.run.name == "finetune":
        plain.save_llama(tmp_path / "model")
        byte_level().save_pretrained(tmp_path / "model")
        overrides += ["model.config=null", f"model.path={tmp_path}/model"]
        overrides += [] if config.train.objective == "dpo" else ["data.sequence_length=64"]
    shown = command("data", "show", example, *overrides)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    printed = trained(example, *overrides).splitlines()
    marks = ("example ", "learned > ", "        | ", "tokenising", "training the tokenizer")
    told = [line for line in shown.stdout.splitlines() if line.strip() and not line.startswith(marks)]
    assert len(told) >= 3 and [line for line in told if line not in printed] == []
    if config.train.objective == "dpo":
        assert any("or an answer than the model's 64 positions, left out" in line for line in told)


@pytest.mark.parametrize(
    ("records", "settings", "message"),
    [
        (
            [PAIR] * 3,
            {"objective": "dpo"},
            r"3 pairs are longer than data.sequence_length 48 \(the first: .*l:1\), left",
        ),
        ([{**PAIR, "rejected": LONG}, PAIR], {"objective": "simpo"}, r"1 pair is longer .*; 1 x a pair of two equal"),
        ([RATED] * 2, {"objective": "kto"}, "2 answers are longer than data.sequence_length 48"),
        ([{**RATED, "completion": "b"}], {"objective": "kto"}, "kto compares answers to different prompts"),
        ([{"text": " "}], {}, "usable document: 1 x a blank record, left out"),
        (UNANSWERED, {}, r"usable document: 1 x a record without an answer.*l:1\)"),
        (UNANSWERED, STREAM, r"usable document: 1 x a record without an answer.*l:1\)"),
    ],
)
def test_counted_reason_is_the_reason_given(
    tmp_path: Path, records: list[dict[str, Any]], settings: dict[str, Any], message: str
) -> None:
    plain.save_llama(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = {"path": str(tmp_path / "x.jsonl"), "document": None, "tokenizer_vocab_size": None, "sequence_length": 48,
            "eval_fraction": 0.0, "chat_template": "zephyr", "streaming": settings == STREAM}  # fmt: skip
    model = {"path": str(tmp_path / "model"), "config": None}
    config = read_config(write_config(tmp_path, model=model, data=data, train=settings))
    with pytest.raises(UserError, match=message) as caught:
        source = model_source(config)
        prepared = prepare_data(config, source, RunDirectory(config.run.directory).day(), None)
        lay_out(config, source, prepared, 1)
    assert "tokens/" not in str(caught.value) and "\n" not in str(caught.value)
