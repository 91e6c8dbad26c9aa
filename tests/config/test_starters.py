"""`aliquot init` writes configs that train at once, and `aliquot schema` prints what an editor checks them by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.config.read_config import _Loader, dump_config, read_config, read_text
from aliquot.config.starters import SCHEMA_FILE, schema_json
from aliquot.core.decode import load_yaml
from tests.runs import trained

MINIMAL = "model: {path: m}\ndata: {path: d}\n"


@pytest.mark.parametrize("kind", ["quickstart", "text", "chat", "pairs"])
@pytest.mark.parametrize("directory", [None, "my chats & {more}", "."])
def test_a_starter_is_a_complete_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, directory: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["init", kind, *([directory] if directory else [])]
    folder = Path(directory or kind)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "next  aliquot train " in result.stdout, result.output
    settings = read_config(folder / f"{kind}.yaml")
    name = "my-chats-more-" if directory and len(directory) > 1 else folder.resolve().name
    assert settings.run.directory == Path("runs") / name
    assert settings.data.path == "stdlib" or Path(str(settings.data.path)).is_file()
    assert (folder / f"{kind}.yaml").read_text().startswith(f"# yaml-language-server: $schema={SCHEMA_FILE}\n")
    assert CliRunner().invoke(app, ["schema"]).stdout == (folder / SCHEMA_FILE).read_text()

    # It overwrites nothing, and where one file would be in the way it writes none.
    (folder / f"{kind}.yaml").unlink()
    before = {file: file.read_bytes() for file in folder.iterdir()}
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2 and again.stderr.count("\n") == 1, again.output
    assert any(again.stderr.startswith(f"aliquot: {file}: this file exists") for file in before)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.long
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_starter_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["init", kind]).exit_code == 0
    shape = "{model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2}"
    tiny = ("model.path=null", f"model.config={shape}", "data.tokenizer_vocab_size=400", "data.chat_template=zephyr")
    printed = trained(f"{kind}/{kind}.yaml", "train.num_train_epochs=2", *(tiny if kind == "chat" else ()))
    assert f"runs/{kind}/export" in printed


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("train:\nlaunch:\n", True),  # all keys commented out
        ("train: {learning_rate: 2e-5, per_device_train_batch_size: auto, global_batch_size: 4}\n", True),
        ("launch: {nodes: 2:4, ranks: auto}\ntrain: {global_batch_size: 4}\n", True),
        ("observe: {report_to: wandb}\n", True),
        ("observe: {report_to: [tensorboard, mlflow]}\n", True),
        ("shard: {deepspeed_config: {zero_optimization: {stage: 3}}}\n", True),
        ("checkpoint: {async: false, every: auto, mirror: s3://a/b}\n", True),
        ("adapter: {r: 8}\ncluster: null\n", True),
        ("trian: {max_steps: 3}\n", False),
        ("train: {learning_rate: fast}\n", False),
        ("launch: {ranks: many}\n", False),
    ],
)
def test_the_schema_accepts_what_a_config_may_say(text: str, is_valid: bool) -> None:
    schema = Draft202012Validator(json.loads(schema_json()))
    assert schema.is_valid(load_yaml(MINIMAL + text, _Loader)[0]) == is_valid
    if is_valid:
        complete = dump_config(read_text(MINIMAL + text, "run.yaml")[0])
        assert not list(schema.iter_errors(load_yaml(complete, _Loader)[0]))
