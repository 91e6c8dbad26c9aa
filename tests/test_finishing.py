"""What a run takes for its own export, and what for a person's."""

from __future__ import annotations

from pathlib import Path

import pytest

from aliquot.finishing import _is_own

BESIDE = {"config.json", "tokenizer.json", "aliquot.json"}


@pytest.mark.parametrize(
    ("name", "own"),
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
def test_own_files_of_an_export(tmp_path: Path, name: str, own: bool) -> None:
    (tmp_path / name).write_text("")
    assert _is_own(tmp_path / name, BESIDE) is own


def test_a_directory_is_a_persons(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert not _is_own(tmp_path / "model.safetensors", BESIDE)
