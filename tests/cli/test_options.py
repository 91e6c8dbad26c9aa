"""Keys of a config that a user gives as options: the error names the override to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from aliquot.cli.main import app


@pytest.mark.parametrize("command", [["train"], ["plan"], ["data", "show"], ["cluster", "check"]], ids=" ".join)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--learning_rate", "1e-5"], "--learning_rate is no option; write train.learning_rate=1e-5"),
        (["--lr=1e-5"], "--lr is no option; write train.learning_rate=1e-5"),
        (["--train.max-steps", "3"], "--train.max-steps is no option; write train.max_steps=3"),
        (["--output_dir", "x", "--lr", "1"], "--output_dir is no option; write run.directory=x"),
        (["--bf16"], "--bf16 is no option; write train.precision=bf16"),
        (["--fp16"], "--fp16 is no option; aliquot has no such key: bf16 needs no loss scaling"),
    ],
)
def test_key_as_an_option(tmp_path: Path, command: list[str], arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, [*command, str(tmp_path / "run.yaml"), *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"aliquot: {expected}") and len(result.stderr.splitlines()) == 1, result.stderr


def test_other_options_are_left_to_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), "--nothing-of-the-kind"])
    assert result.exit_code == 2 and "No such option" in result.stderr


@pytest.mark.parametrize("group", [[], ["cluster"]], ids=" ".join)
def test_help_describes_commands_in_whole_sentences(group: list[str]) -> None:
    printed = CliRunner().invoke(app, [*group, "--help"], env={"COLUMNS": "80"}).stdout
    lines = printed.partition("Commands:\n")[2].splitlines()
    assert len(lines) > 4 and all(line.startswith("  ") and line.endswith(".") for line in lines), printed
    assert "..." not in "".join(lines), printed


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        (["train"], "train [OPTIONS] CONFIG [section.key=value ...]"),
        (["plan"], "plan [OPTIONS] [CONFIG] [section.key=value ...]"),
        (["cluster", "check"], "cluster check [OPTIONS] CONFIG|DIR [section.key=value ...]"),
        (["cluster", "logs"], "cluster logs [OPTIONS] NAME"),
        (["export"], "export [OPTIONS] CHECKPOINT OUT_DIR"),
        (["report"], "report [OPTIONS] RUN_DIR..."),
        (["instances"], "instances [OPTIONS] [PATTERN]"),
    ],
)
def test_usage_is_that_of_the_documentation(command: list[str], usage: str) -> None:
    printed = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "120"}).stdout
    assert printed.splitlines()[0].endswith(f" {usage}"), printed
