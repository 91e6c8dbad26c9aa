"""What strangers wrote reaches a terminal without what would drive it, and nothing shows a password."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.core.errors import UsageError, UserError, printable
from aliquot.distributed.rank_errors import RankError
from aliquot.observe.console import Display
from aliquot.stores.store import open_store
from tests import runs

WILD = "\x1b]0;title\x07\x9b31m\u202e"
SHOWN = r"\x1b]0;title\x07\x9b31m\u202e"
URLS = ("s3://me:hunter2@bucket/runs", "dir::ftp://me:hunter2@host/a b", "s3://me:hun hunter2@b")


def test_printable() -> None:
    assert printable(f"a{WILD}\tb\n\u00e4\u200d\u05d0\u200f") == f"a{SHOWN}\tb\n\u00e4\u200d\u05d0\u200f"


def test_control_characters_of_errors_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert UserError(WILD).line == f"{SHOWN} [input]"
    assert RankError(1, "crash", WILD, "", 0.0).line == f"rank 1 failed: {SHOWN} [crash]"
    display = Display("plain")
    display.line(WILD)
    display.warning(WILD)
    assert capsys.readouterr() == (f"{SHOWN}\n", f"warning: {SHOWN}\n")


def test_control_characters_of_records_are_escaped(tmp_path: Path) -> None:
    config = runs.write_config(tmp_path)
    (tmp_path / "names.jsonl").write_text(json.dumps({f"a{WILD}": "x"}) + "\n")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"b{WILD} {n}"}) + "\n" for n in range(50)))
    (tmp_path / f"c{WILD}.jsonl").write_text("[")
    for name, wanted in (("names", f"a{SHOWN}"), ("texts", f"b{SHOWN}"), (f"c{WILD}", "c\\x1b")):
        shown = runs.command("data", "show", config, f"data.path={tmp_path / name}.jsonl", "data.document=field")
        assert wanted in shown.stdout + shown.stderr
        assert not set(shown.stdout + shown.stderr) & set("\x1b\x07\x9b\u202e")


@pytest.mark.few(1)
@pytest.mark.parametrize("url", URLS)
def test_url_with_a_password_is_refused_everywhere(tmp_path: Path, url: str) -> None:
    file = runs.write_config(tmp_path)
    values = yaml.safe_load(file.read_text())
    values["checkpoint"] = {"mirror": url}
    written = tmp_path / "written.yaml"
    written.write_text(yaml.safe_dump(values))
    for key in ("checkpoint.mirror", "checkpoint.resume", "model.path", "data.path", "run.directory"):
        for command in (["train"], ["plan"], ["cluster", "check"], ["cluster", "render"]):
            asked = [written] if key == "checkpoint.mirror" else [file, f"{key}={json.dumps(url)}"]
            result = CliRunner().invoke(app, [*command, *map(str, asked)])
            assert result.exit_code == 2, result.output
            assert len(result.output.splitlines()) == 1 and "hunter2" not in result.output
            assert "user name or password" in result.output or key == "checkpoint.mirror"
    with pytest.raises(UsageError) as error:
        open_store(url)
    assert "hunter2" not in error.value.line
