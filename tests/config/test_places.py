"""Errors that are found after a config was read say where the value stands that they are about."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.config.places import naming_places
from aliquot.config.read_config import read_config
from aliquot.errors import ConfigError, DataError, UserError

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
def test_an_error_that_begins_with_a_key_says_where_that_was_written(error: UserError, expected: str) -> None:
    with pytest.raises(UserError) as caught, naming_places(PLACES):
        raise error
    assert caught.value is error and str(error) == expected and error.line == f"{expected} [{error.id}]"


def test_what_keys_mean_together_is_said_of_the_line_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  path: m\ndata:\n  path: text.txt\n")
    with pytest.raises(UserError, match=r"override 'launch.node_rank=2': launch.node_rank 2 is not below"):
        read_config(file, ["launch.node_rank=2"])
    file.write_text("model:\n  path: m\ndata:\n  path: text.txt\nlaunch:\n  nodes: 2\n  node_rank: 2\n")
    with pytest.raises(UserError, match=r"run.yaml:7: launch.node_rank 2 is not below launch.nodes 2"):
        read_config(file)


def test_commands_say_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  path: m\ndata:\n  path: text.txt\nlaunch:\n  device: cuda\n")
    ended = CliRunner().invoke(app, ["plan", str(file), "--instance", "c7i.8xlarge"])
    assert ended.exit_code == 2
    assert f"{file}:6: launch.device is cuda, but c7i.8xlarge has no GPU" in ended.output
