"""Keys by the names that other trainers give them: each is answered by ours, or by why there is none.

Errors that are found after a config was read name the location of the value.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.config import key_hints
from aliquot.config.key_hints import known_keys
from aliquot.config.key_locations import locate_errors
from aliquot.config.read_config import read_config
from aliquot.config.schema import RunConfig, TrainSection
from aliquot.config.section import PATH
from aliquot.core.errors import ConfigError, DataError, UserError
from tests.config.test_read import failure

MINIMAL = "model: {path: some/model}\ndata: {path: text.txt}\n"
KEYS = {".".join(path) for path in known_keys()}


def told(folder: Path, *overrides: str, text: str = MINIMAL) -> str:
    file = folder / "run.yaml"
    file.write_text(text)
    return failure(file, *overrides)


def answered(message: str) -> bool:
    """By a key that exists, or by why there is none, in which every key exists."""
    if "; aliquot has no such key: " in message:
        reason = message.split("no such key: ")[1]
        named = re.findall(rf"(?:{'|'.join(RunConfig.model_fields)})\.[a-z_]+", reason)
        return len(reason.split()) > 2 and KEYS.issuperset(named)
    moved = re.search(r"\.(\w+); did you mean [a-z]+\.(\w+)\?$", message)  # the same key of another section
    found = re.search(r"; write ([a-z_.0-9]+)(: [^;]+)?$", message)
    return (moved is not None and moved[1] == moved[2]) or (found is not None and found[1] in KEYS)


@pytest.mark.parametrize(
    ("section", "library", "arguments"),
    [("train", "transformers", "TrainingArguments"), ("checkpoint", "transformers", "TrainingArguments"),
     ("train", "trl", "SFTConfig")],
)  # fmt: skip
def test_every_field_of_other_trainers_has_a_hint(tmp_path: Path, section: str, library: str, arguments: str) -> None:
    fields = dataclasses.fields(getattr(importlib.import_module(library), arguments))
    ours = TrainSection.model_fields.keys() | RunConfig.model_fields["data"].annotation.model_fields.keys()
    for name in sorted({field.name for field in fields} - ours):
        message = told(tmp_path, f"{section}.{name}=1")
        assert f"unknown key {section}.{name}" in message
        assert answered(message), message


def test_every_hint_names_a_known_key_or_a_reason() -> None:
    assert not key_hints.EQUIVALENTS.keys() & key_hints.UNSUPPORTED.keys()
    for name in (*key_hints.EQUIVALENTS, *key_hints.UNSUPPORTED):
        assert answered(f"; {key_hints.hint(name)}"), name


def test_hints_do_not_shadow_keys_of_aliquot() -> None:
    ours = {path[-1] for path in known_keys() if len(path) == 2}
    assert not ours & key_hints.UNSUPPORTED.keys()
    for name in ours & key_hints.EQUIVALENTS.keys():
        assert key_hints.EQUIVALENTS[name].endswith(f".{name}"), name


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr=1", "unknown key train.lr; write train.learning_rate"),
        ("lr=1", "expected section.key=value; write train.learning_rate=1"),
        ("learning_rate=1", "; write train.learning_rate=1"),
        ("train.bf16=true", "; write train.precision: bf16"),
        ("train.fp16=true", "aliquot has no such key: bf16 needs no loss scaling; use train.precision: bf16"),
        ("train.save_steps=5", "; write checkpoint.every"),
        ("train.save_step=5", "did you mean checkpoint.every?"),
        ("train.loraplus_lr_ratio=16", "; write adapter.loraplus_lr_ratio"),
        ("train.label_smoothing_factor=0.1", "; write train.label_smoothing"),
        ("train.push_to_hub=true", "; `aliquot export CHECKPOINT OUT --push-to-hub REPOSITORY` uploads a model"),
        (
            "train.max_prompt_length=5",
            "is cut into pieces; a pair of answers, or a rated answer, is left out",
        ),
        ("checkpoint.interval=5", "; write checkpoint.every"),
        ("train.seed=5", "; write run.seed"),
        ("observe.tensorboard=false", "unknown key observe.tensorboard; write observe.report_to"),
        ("train.ranks=5", "did you mean launch.ranks?"),
        ("train.save-steps=5", "; write checkpoint.every"),
        ("train.evaluation_strategy=steps", "; write train.eval_steps"),
        ("train.logging_dir=logs", "; write run.directory"),
        ("data.max_seq_length=5", "; write data.sequence_length"),
        (
            "train.gradient_checkpointing=true",
            "cannot be true: choose auto, none, selective, full",
        ),
        ("training.steps=5", "unknown key training; write train.max_steps for steps"),
        ("train.nobody_calls_it_so=1", "unknown key train.nobody_calls_it_so"),
        (
            "train.optimizer=adamw",
            "; aliquot has no such key: the optimizer is always AdamW; train.optimizer_states sets"
            " the dtype of its moments",
        ),
        ("model.name=x", "unknown key model.name; write model.path"),
        ("data.name=x", "unknown key data.name; write data.dataset"),
        ("data.type=x", "unknown key data.type"),
        ("run.size_gib=1", "unknown key run.size_gib; keys of run: name, directory, seed"),
        ("adapter=lora", "expected section.key=value, and adapter is a section; write adapter.type=lora"),
        ("model=some/model", "expected section.key=value, and model is a section; write model.path=some/model"),
        ("--train.learning_rate=1", "expected section.key=value; write train.learning_rate=1"),
        ("train.learning_rate:1", "expected section.key=value; write train.learning_rate=1"),
        ("--bf16=true", "expected section.key=value; write train.precision=bf16"),
    ],
)
def test_hints_for_common_mistakes(tmp_path: Path, override: str, expected: str) -> None:
    message = told(tmp_path, override)
    assert message.endswith(expected), message


def test_several_unknown_keys_in_a_line_are_named(tmp_path: Path) -> None:
    message = told(tmp_path, text=f"{MINIMAL}train: {{lr: 1, epochs: 2}}\n")
    assert message.endswith(
        "run.yaml:3: unknown key train.lr; write train.learning_rate; unknown key train.epochs; write"
        " train.num_train_epochs"
    )


def test_hint_for_a_foreign_section_names_our_keys(tmp_path: Path) -> None:
    text = f"{MINIMAL}training:\n  steps: 10\n  local_batch_size: 2\n  warmup_ratio: 0.1\n  unheard_of: 1\n"
    assert told(tmp_path, text=text).endswith(
        "run.yaml:3: unknown key training; write train.max_steps for steps, train.per_device_train_batch_size for"
        " local_batch_size, train.warmup_ratio for warmup_ratio"
    )


def test_suggestions_name_no_key_of_a_nested_or_optional_section(tmp_path: Path) -> None:
    """Such as cluster.huggingface_secret.name for model.name: no reader means it."""
    below = {path[-1] for path in known_keys() if len(path) > 2 or path[0] in ("adapter", "cluster")}
    for section in ("run", "model", "data", "train"):
        own = {path[1] for path in known_keys() if len(path) > 1 and path[0] == section}
        for name in sorted(below - own):
            message = told(tmp_path, f"{section}.{name}=1")
            assert not re.search(r"did you mean (cluster|adapter)|did you mean \w+\.\w+\.", message), message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adapter: lora", "adapter is 'lora', but adapter is a section: write adapter: {type: lora}"),
        ("adapter: true", "adapter is true, but adapter is a section: write its keys below the line `adapter:`"),
        ("train: fast", "train is 'fast', but train is a section: write its keys below the line `train:`"),
        ("train:\n  max_steps:3", "train is 'max_steps:3', but train is a section: put a space after the colon of"),
        ("train:\n  - max_steps: 3", "but train is a section: write the keys of train without dashes"),
        ("learning_rate: 3", "did you mean train.learning_rate? (indent a key below the name of its section)"),
        ("path: a", "unknown key path (indent a key below the name of its section)"),
    ],
)
def test_section_that_is_no_mapping(tmp_path: Path, text: str, expected: str) -> None:
    message = told(tmp_path, text=f"{MINIMAL}{text}\n")
    assert message.startswith(f"{tmp_path}/run.yaml:3: ") and expected in message, message


PLACES = {("train", "freeze"): "run.yaml:9", ("data", "path"): "run.yaml:4"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError("train.freeze: nothing is left to learn"), "run.yaml:9: train.freeze: nothing is left to learn"),
        (DataError("holds no document; data.path", "a.txt"), "a.txt: holds no document; data.path"),
        (ConfigError("train.compile: layers needs a compiler"), "train.compile: layers needs a compiler"),
    ],
    ids=["written", "says where", "default"],
)
def test_error_about_a_key_gets_its_location(error: UserError, expected: str) -> None:
    with pytest.raises(UserError) as caught, locate_errors(PLACES):
        raise error
    assert caught.value is error and str(error) == expected and error.line == f"{expected} [{error.id}]"


def test_contradiction_names_the_line_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  path: m\ndata:\n  path: text.txt\n")
    with pytest.raises(UserError, match=r"override 'launch.node_rank=2': launch.node_rank 2 is not below"):
        read_config(file, ["launch.node_rank=2"])
    file.write_text("model:\n  path: m\ndata:\n  path: text.txt\nlaunch:\n  nodes: 2\n  node_rank: 2\n")
    with pytest.raises(UserError, match=r"run.yaml:7: launch.node_rank 2 is not below launch.nodes 2"):
        read_config(file)


def test_commands_show_the_location(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  path: m\ndata:\n  path: text.txt\nlaunch:\n  device: cuda\n")
    ended = CliRunner().invoke(app, ["plan", str(file), "--instance", "c7i.8xlarge"])
    assert ended.exit_code == 2
    assert f"{file}:6: launch.device is cuda, but c7i.8xlarge has no GPU" in ended.output


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """`model` and all sections in it, also those of lists."""
    yield model
    for field in model.model_fields.values():
        kinds = [field.annotation, *get_args(field.annotation)]
        kinds += [inner for kind in kinds for inner in get_args(kind)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from sections(kind)


def test_every_path_key_is_declared_as_a_path() -> None:
    fields = [(each, name, field) for each in sections(RunConfig) for name, field in each.model_fields.items()]
    paths = [
        (each, name, field) for each, name, field in fields if Path in {field.annotation, *get_args(field.annotation)}
    ]
    assert {name for _, name, _ in paths} >= {"directory", "config", "offload_directory", "cache_directory"}
    assert [(each.__name__, name) for each, name, field in paths if PATH not in field.metadata] == []


def test_path_may_begin_with_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    file = tmp_path / "run.yaml"
    file.write_text(
        "run: {directory: ~/runs/x}\nmodel: {config: ~/c.json}\nshard: {offload_directory: ~/fast, "
        "deepspeed_config: ~/ds.json}\n"
        "data: {path: [~/a.txt, ~nobody-has-this-name/b.txt, c/~.txt], chat_template: '~{{ messages }}', "
        "tokenizer: ~/t, cache_directory: ~/cache}\ncheckpoint: {resume: ~/old}\n"
    )
    config = read_config(file)
    assert config.run.directory == tmp_path / "runs" / "x"
    assert config.model.config == tmp_path / "c.json"
    assert config.shard.offload_directory == tmp_path / "fast"
    assert config.data.path == [f"{tmp_path}/a.txt", "~nobody-has-this-name/b.txt", "c/~.txt"]
    assert config.data.chat_template == "~{{ messages }}"
    assert (config.data.tokenizer, config.data.cache_directory) == (f"{tmp_path}/t", tmp_path / "cache")
    assert config.checkpoint.resume == f"{tmp_path}/old"
