"""Files of an export, and files that a person has put beside them."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from aliquot.core.on_rank_0 import SingleRank
from aliquot.observe.console import Display
from aliquot.run.export_run import _is_export_file, _keep_foreign_files
from aliquot.tensor_io.publish import publish_together

BESIDE = {"config.json", "tokenizer.json", "aliquot.json"}


@pytest.mark.parametrize(
    ("name", "is_export"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("adapter_model.safetensors", True),
        ("config.json", True),
        ("model-q4.safetensors", False),
        ("my-model.safetensors", False),
        ("model.safetensors.bak", False),
        ("notes.txt", False),
    ],
)
def test_export_files_are_recognised(tmp_path: Path, name: str, is_export: bool) -> None:
    (tmp_path / name).write_text("")
    assert _is_export_file(tmp_path / name, BESIDE) is is_export


def test_directory_in_export_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert not _is_export_file(tmp_path / "model.safetensors", BESIDE)


def test_foreign_file_that_appears_during_export_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "export"
    errors = io.StringIO()
    display = Display("plain", errors=Console(file=errors))
    spare = partial(_keep_foreign_files, target, BESIDE, display)

    def exported(comes: str) -> None:
        def write(directory: Path) -> None:
            (target / comes).write_text(comes)
            (directory / "config.json").write_text("new")

        publish_together(target, SingleRank(), lambda _: None, write, lambda *_: None, keep_former=spare)
        assert [path.name for path in target.iterdir()] == ["config.json"]

    target.mkdir()
    exported("model.safetensors")
    assert not errors.getvalue() and [path.name for path in tmp_path.iterdir()] == ["export"]
    exported("notes.txt")
    assert (
        f"{target} held notes.txt, which no export writes: the directory is now {tmp_path / 'export-1'}"
        in errors.getvalue()
    )
    assert (tmp_path / "export-1/notes.txt").read_text() == "notes.txt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "export-1"]
