"""`aliquot export --push-to-hub` uploads an export and its model card to a hub on this machine.

Files of an export, and files that a person has put beside them.
"""

from __future__ import annotations

import io
import shutil
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard
from rich.console import Console
from typer.testing import CliRunner

import aliquot
from aliquot.cli.main import app
from aliquot.core.on_rank_0 import SingleRank
from aliquot.observe.console import Display
from aliquot.run.export_run import _is_export_file, _keep_foreign_files
from aliquot.run.hub_upload import names_on_hub, write_model_card
from aliquot.tensor_io.manifest import read_state
from aliquot.tensor_io.publish import publish_together
from tests.run.hub_repository import Repository
from tests.tools.docs_pages import ROOT

FIXTURE = ROOT / "tests" / "fixtures" / "0.1.0"


def export(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_a_run_is_exported_and_uploaded_with_its_card(hub: Repository, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, output, errors = export(FIXTURE / "model", out, "--push-to-hub", "owner/name", "--private")
    assert code == 0, errors
    assert hub.created == [{"name": "name", "organization": "owner", "visibility": "private"}]
    assert hub.files == {file.name: file.read_bytes() for file in out.iterdir()} and "model.safetensors" in hub.files
    card = ModelCard(hub.files["README.md"].decode())
    assert card.data.license == "unknown" and card.data.library_name == "transformers" and card.data.base_model is None
    for row in (
        "| base model | none: trained from scratch |",
        "| data | text.txt |",
        "| optimizer steps | 3, 384 tokens |",
    ):
        assert row in card.text
    assert "| training loss | 5." in card.text and "at step 3 |" in card.text
    assert f"{hub.address}/owner/name/commit/1\\x1b[2J" in output
    assert "hf_right" not in output + errors + card.content and hub.tokens == {"Bearer hf_right"}


def test_a_broken_upload_goes_on_where_it_broke(hub: Repository, tmp_path: Path) -> None:
    """An adapter, whose base model is in a directory of this machine that the card does not show."""
    run, out = shutil.copytree(FIXTURE / "adapter", tmp_path / "adapter"), tmp_path / "out"
    (run / "metrics.jsonl").unlink()
    hub.refused_uploads = 1
    code, output, errors = export(run, out, "--push-to-hub", "owner/name")
    assert code == 1 and not output
    assert errors.startswith("aliquot: --push-to-hub owner/name: the upload broke: ") and len(errors.splitlines()) == 1
    assert f"continue with: hf upload owner/name {out} ." in errors and not hub.files
    assert hub.created == [{"name": "name", "organization": "owner"}]
    HfApi().upload_folder(repo_id="owner/name", folder_path=out)
    card = ModelCard(hub.files["README.md"].decode())
    assert "adapter_model.safetensors" in hub.files and card.data.library_name == "peft"
    assert "| trained weights | a LoRA adapter |" in card.text and str(tmp_path) not in card.text
    assert "loss |" not in card.text


@pytest.mark.parametrize(
    ("repository", "token", "expected"),
    [
        ("owner/name", "hf_wrong", "--push-to-hub owner/name: the hub refuses the repository: Client error '401"),
        ("a b/c", "hf_right", "--push-to-hub a b/c: the hub refuses the repository: "),
    ],
)
def test_mistakes_are_one_line(
    hub: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    repository: str,
    token: str,
    expected: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    code, _, errors = export(FIXTURE / "model", tmp_path / "out", "--push-to-hub", repository)
    assert code == 2 and errors.startswith(f"aliquot: {expected}") and len(errors.splitlines()) == 1, errors
    assert token not in errors and not (tmp_path / "out").exists()


def test_only_hub_ids_are_published_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run knows which names were directories, which may be gone when the export is made."""
    monkeypatch.chdir(tmp_path)
    config = aliquot.RunConfig(model={"path": "model/export"}, data={"dataset": "some/data"})
    assert names_on_hub(config) == ["model/export", "some/data"]
    (tmp_path / "model/export").mkdir(parents=True)
    assert names_on_hub(config) == ["some/data"]
    (tmp_path / "model/export").rmdir()
    checkpoint = shutil.copytree(FIXTURE / "adapter/checkpoints/step-00000003", tmp_path / "checkpoints/step-00000003")
    state = read_state(checkpoint)
    monkeypatch.setattr("aliquot.run.hub_upload.read_state", lambda _: state)
    for hub_ids, base_model, row in (([], None, "export"), (["model/export"], "model/export", "model/export")):
        monkeypatch.setattr(
            "aliquot.run.hub_upload.read_state", lambda _, hub_ids=hub_ids: state | {"hub_ids": hub_ids}
        )
        write_model_card(tmp_path, checkpoint, "owner/name")
        card = ModelCard.load(tmp_path / "README.md")
        assert card.data.base_model == base_model and f"| base model | {row} |" in card.text


def test_private_needs_a_repository(tmp_path: Path) -> None:
    code, _, errors = export(FIXTURE / "model", tmp_path / "out", "--private")
    assert code == 2 and "--private is about the repository of --push-to-hub" in errors


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
