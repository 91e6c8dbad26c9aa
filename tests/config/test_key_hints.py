"""Keys by the names that other trainers give them: each is answered by ours, or by why there is none."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from aliquot.config import key_hints
from aliquot.config.key_hints import known_keys
from aliquot.config.read_config import read_config
from aliquot.config.schema import RunConfig, TrainSection
from aliquot.core.errors import UserError

MINIMAL = "model: {path: some/model}\ndata: {path: text.txt}\n"
KEYS = {".".join(path) for path in known_keys()}
# Fields of transformers' TrainingArguments that `train` has under the same name.
SAME = {
    name for name in TrainSection.model_fields if name in {each.name for each in dataclasses.fields(TrainingArguments)}
}


def told(folder: Path, *overrides: str, text: str = MINIMAL) -> str:
    file = folder / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_config(file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def answered(message: str) -> bool:
    """By a key that exists, or by why there is none."""
    if "; aliquot has none: " in message:
        return True
    moved = re.search(r"\.(\w+); did you mean [a-z]+\.(\w+)\?$", message)  # the same key of another section
    found = re.search(r"; it is ([a-z_.0-9]+)(: [^;]+)? here$", message)
    return (moved is not None and moved[1] == moved[2]) or (found is not None and found[1] in KEYS)


@pytest.mark.parametrize("section", ["train", "checkpoint"])
def test_every_field_of_training_arguments_has_a_hint(tmp_path: Path, section: str) -> None:
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {"learning_rate", "max_steps", "warmup_steps", "lr_scheduler_type"} <= SAME
    for name in sorted(names - SAME):
        message = told(tmp_path, f"{section}.{name}=1")
        assert f"unknown key {section}.{name}" in message
        assert answered(message), message


def test_every_field_of_trl_has_a_hint(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    names = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    for name in sorted(names - SAME - set(RunConfig.model_fields["data"].annotation.model_fields)):
        assert answered(told(tmp_path, f"train.{name}=1")), name


def test_every_hint_names_a_known_key_or_a_reason() -> None:
    assert not key_hints.EQUIVALENTS.keys() & key_hints.UNSUPPORTED.keys()
    for name in (*key_hints.EQUIVALENTS, *key_hints.UNSUPPORTED):
        assert answered(f"; {key_hints.hint(name)}"), name


def test_hints_do_not_shadow_keys_of_aliquot() -> None:
    ours = {path[-1] for path in known_keys()}
    assert {name for name in key_hints.EQUIVALENTS if name in ours} <= {"seed"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr=1", "unknown key train.lr; it is train.learning_rate here"),
        ("lr=1", "expected section.key=value, for example train.max_steps=10; it is train.learning_rate here"),
        ("learning_rate=1", "; did you mean train.learning_rate?"),
        ("train.bf16=true", "it is train.precision: bf16 here"),
        ("train.fp16=true", "aliquot has none: bf16 needs no loss scaling: use train.precision: bf16"),
        ("train.save_steps=5", "it is checkpoint.every here"),
        ("train.save_step=5", "did you mean save_steps? it is checkpoint.every here"),
        ("checkpoint.interval=5", "it is checkpoint.every here"),
        ("train.seed=5", "it is run.seed here"),
        ("train.ranks=5", "did you mean launch.ranks?"),
        ("train.save-steps=5", "it is checkpoint.every here"),
        ("train.evaluation_strategy=steps", "it is train.eval_steps here"),
        ("train.logging_dir=logs", "it is run.directory here"),
        ("data.max_seq_length=5", "it is data.sequence_length here"),
        ("train.gradient_checkpointing=true", "is true, which is not a value for it: choose none, selective, full"),
        ("training.steps=5", "unknown key training; its steps is train.max_steps here"),
        ("train.nobody_calls_it_so=1", "unknown key train.nobody_calls_it_so"),
    ],
)
def test_hints_for_common_mistakes(tmp_path: Path, override: str, expected: str) -> None:
    message = told(tmp_path, override)
    assert message.endswith(expected), message


def test_several_unknown_keys_in_a_line_are_named(tmp_path: Path) -> None:
    message = told(tmp_path, text=f"{MINIMAL}train: {{lr: 1, epochs: 2}}\n")
    assert message.endswith(
        "run.yaml:3: unknown key train.lr; it is train.learning_rate here; unknown key train.epochs; it is"
        " train.num_train_epochs here"
    )


def test_hint_for_a_foreign_section_names_our_keys(tmp_path: Path) -> None:
    text = f"{MINIMAL}training:\n  steps: 10\n  local_batch_size: 2\n  warmup_ratio: 0.1\n  unheard_of: 1\n"
    assert told(tmp_path, text=text).endswith(
        "run.yaml:3: unknown key training; its steps is train.max_steps here, its local_batch_size is"
        " train.per_device_train_batch_size here, its warmup_ratio is train.warmup_ratio here"
    )
