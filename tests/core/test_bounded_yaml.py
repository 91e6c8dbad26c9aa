"""Few bytes of YAML do not become gigabytes, wherever YAML is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.core.decode import BoundedFastLoader, BoundedLoader, BoundedTextLoader
from aliquot.observe.run_directory import HEADER

SOURCE = Path(__file__).resolve().parents[2] / "src" / "aliquot"
LAUGHS = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 30))
CYCLE = "a: &a [*a]\n"


@pytest.mark.parametrize("loader", [BoundedLoader, BoundedTextLoader, BoundedFastLoader])
def test_aliases_are_bounded(loader: type) -> None:
    for text in (LAUGHS, MERGES, CYCLE):
        with pytest.raises(yaml.MarkedYAMLError, match="alias"):
            yaml.load(text, Loader=loader)
        with pytest.raises(yaml.MarkedYAMLError, match="alias"):
            list(yaml.load_all(f"b: 1\n---\n{text}", Loader=loader))
    shared = "a: &a {b: [1, 2]}\nc: [*a, *a]\nd: {<<: *a}\n"
    assert yaml.load(shared, Loader=loader) == yaml.load(shared, Loader=loader.__mro__[2])


@pytest.mark.parametrize("text", [LAUGHS, MERGES, CYCLE], ids=["laughs", "merges", "cycle"])
def test_every_command_ends_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "manifest.yaml").write_text(f"apiVersion: v1\nkind: ConfigMap\n{text}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(HEADER + text)
    flow = text.replace("\n", ", ")
    for command in (
        ["train", "run.yaml"], ["plan", "run.yaml"], ["cluster", "check", "run.yaml"],
        ["cluster", "check", "manifest.yaml"], ["train", "run.yaml", f"model.config={{{flow}}}"],
    ):  # fmt: skip
        result = CliRunner().invoke(app, [str(tmp_path / word) if word.endswith(".yaml") else word for word in command])
        assert result.exit_code == 2 and len(result.output.splitlines()) == 1, result.output
        assert "alias" in result.output
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0  # what cannot be read is left out


def test_yaml_is_read_by_these_alone() -> None:
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        own = file == SOURCE / "core" / "decode.py"
        assert own or not any(name in text for name in ("safe_load", "yaml.SafeLoader", "yaml.BaseLoader")), file
        assert own or text.count("yaml.load") + text.count("yaml.compose") == text.count("Loader="), file
