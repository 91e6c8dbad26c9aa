"""`aliquot export --push-to-hub` uploads an export and its model card to a hub on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard
from typer.testing import CliRunner

from aliquot.cli.main import app
from tests.run.hub_repository import Repository, hub_repository
from tests.tools.docs_pages import ROOT

FIXTURE = ROOT / "tests" / "fixtures" / "0.1.0"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A hub, and a client that is logged in; the client has read its environment when it was imported."""
    with hub_repository() as repository:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", repository.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        yield repository


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
    assert f"{hub.address}/owner/name/commit/1" in output
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


def test_private_needs_a_repository(tmp_path: Path) -> None:
    code, _, errors = export(FIXTURE / "model", tmp_path / "out", "--private")
    assert code == 2 and "--private is about the repository of --push-to-hub" in errors
