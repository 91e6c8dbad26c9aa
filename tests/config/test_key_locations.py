"""Errors that are found after a config was read say where the value stands that they are about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.config.key_locations import locate_errors
from aliquot.config.read_config import read_config
from aliquot.config.schema import RunConfig
from aliquot.config.section import PATH
from aliquot.core.errors import ConfigError, DataError, UserError

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
