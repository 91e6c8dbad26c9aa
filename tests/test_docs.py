"""The pages say what the code does: commands, configurations, links, reference, findings, examples."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from jsonschema import Draft202012Validator

import aliquot
from aliquot.cli.main import app
from aliquot.config.read_config import _Loader, read_config
from aliquot.config.starters import schema_json, write_starter
from aliquot.core.decode import load_yaml
from aliquot.core.errors import UserError, user_error_types
from aliquot.distributed.signals import Terminated
from aliquot.doctor.examine import CHECKS
from tests.tools import docs_data, docs_python, docs_reference
from tests.tools.docs_pages import NEEDS, PAGES, ROOT, Block, blocks, header, links

EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
KOREAN = ROOT / "docs" / "ko"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def json_schema() -> Any:
    return Draft202012Validator(json.loads(schema_json()))


def check_config(file: Path) -> None:
    """A config that aliquot reads is valid by the JSON schema, too, which an editor checks."""
    read_config(file)
    json_schema().validate(json.loads(json.dumps(load_yaml(file.read_text(), _Loader)[0], default=str)))


def runs(block: Block) -> bool:
    return block.language == "sh" and not block.needs


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    missing = [target for target in links(page) if not (page.parent / target).exists()]
    assert not missing


# Korean pages have the commands of their English pages.
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.long] if page.is_relative_to(KOREAN) else []) for page in PAGES],
    ids=name_of,
)
def test_commands_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_configs(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        assert block.needs <= NEEDS, f"{block.needs - NEEDS} is not a need: {block.text}"
        if block.language == "sh":
            for words in block.commands():
                check(words)
        elif not block.language:  # older blocks, with what is printed or usage: only what must be a command
            for words in usage(block):
                check(words)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if any(map(runs, blocks(page)))], ids=name_of)
def test_commands_that_need_nothing_run(page: Path, tmp_path: Path) -> None:
    place_configs(page, tmp_path)
    for block in filter(runs, blocks(page)):
        run(block.text, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.skipif(
    not (ROOT / ".venv/.developed").exists(), reason="make test-long has the environment that make uses"
)
def test_commands_that_take_minutes_run(tmp_path: Path) -> None:
    """In one directory, the quickstart first: other pages use what it leaves. Korean pages have the same commands."""
    for name in (".venv", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    place_configs(None, tmp_path)
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "ko" not in page.parts]
    pages.sort(key=lambda page: (page.stem != "quickstart", page.stem))
    ran: list[str] = []
    for page in pages:
        write_configs(page, tmp_path)
        for text in (block.text for block in blocks(page) if block.needs == {"minutes"}):
            if text not in ran:
                run(text, tmp_path)
                ran.append(text)
    assert "make demo" in ran[0] and len(ran) > 8


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_configurations_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = place_configs(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in names:
        check_config(Path(name))


@pytest.mark.long
def test_the_script_that_trains_from_python_runs(tmp_path: Path) -> None:
    place_configs(None, tmp_path)
    text = next(block.text for block in blocks(ROOT / "docs/guides/python.md") if block.language == "python")
    (tmp_path / "train.py").write_text(text)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("a rank needs ", "saved runs/from-python/checkpoints/step-00000030\n", "docs/index.md: ", "import os"):
        assert text in done.stdout
    assert (tmp_path / "runs/from-python/export-30/model.safetensors").is_file()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_names_what_exists(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            used = set(re.findall(r"\baliquot\.(\w+)", block.text))
            assert used <= set(aliquot.__all__)


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_examples_are_valid(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_config(example)
    commands = list(header(example).commands())
    assert commands, "the comment at its head names no command"
    for words in commands:
        check(words)
    assert any(name_of(example) in words for words in commands)


@pytest.mark.long
@pytest.mark.parametrize("example", [each for each in EXAMPLES if "plan" in header(each).text], ids=name_of)
def test_examples_can_be_planned(example: Path, tmp_path: Path) -> None:
    place_configs(None, tmp_path)
    for line in header(example).text.splitlines():
        if line.startswith("aliquot plan"):
            run(line, tmp_path)


def test_reference_is_that_of_the_code() -> None:
    for page, text in docs_reference.pages().items():
        assert page.read_text() == text, "run `python -m tests.tools.docs_reference`"


def test_the_python_page_is_that_of_the_code() -> None:
    assert sorted(docs_python.names()) == sorted(aliquot.__all__)
    assert docs_python.PAGE.read_text() == docs_python.page(), "run `python -m tests.tools.docs_python`"


@pytest.mark.long
def test_data_page_shows_output_of_data_show(shared: Path, tmp_path: Path) -> None:
    assert docs_data.PAGE.read_text() == docs_data.page(tmp_path), "run `python -m tests.tools.docs_data`"


def test_the_site_builds(tmp_path: Path) -> None:
    for package in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(package, reason="make docs installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "../src/" not in (tmp_path / "explanation/engines/index.html").read_text()


def test_every_finding_is_explained() -> None:
    made = [call.args for call in calls("check", "doctor")]
    code = {arguments[0].value for arguments in made if arguments and isinstance(arguments[0], ast.Constant)}
    assert len(code) >= len(CHECKS), "a check finds nothing that is written as this test looks for it"
    assert set(re.findall("^### `(.+)`$", _troubleshooting("Findings of `aliquot doctor`"), re.MULTILINE)) == code


def test_every_error_id_is_explained() -> None:
    """Those of the kinds of UserError, and those that are written behind a line by hand."""
    code = {kind.id for kind in (*user_error_types(), Terminated)} - {UserError.id}
    by_hand = {found[1] for text in said("distributed") if (found := re.search(r" \[([a-z-]+)\]$", text))}
    assert by_hand == {"hung", "peer-lost", "killed", "crash"}
    assert set(re.findall("^### `(.+)`$", _troubleshooting("Errors"), re.MULTILINE)) == code | by_hand
    assert not list(calls("UserError")), "an error is of a kind that has an id"


def test_messages_are_those_of_the_code() -> None:
    """An item in italics, or italics in a symptom, quotes a message; `...` stands for what differs."""
    items = re.findall(r"^- (\*.+?\*):", _troubleshooting("Errors"), re.MULTILINE | re.DOTALL)
    symptoms = _troubleshooting("By symptom")
    quoted = [" ".join(each.split()) for item in (*items, symptoms) for each in re.findall(r"\*([^*]+)\*", item)]
    assert len(quoted) > 40
    for message in quoted:
        pattern = re.compile(r".*".join(map(re.escape, message.split("..."))), re.DOTALL)
        assert any(pattern.search(text) for text in said()), f"nobody says: {message}"


def test_every_guarantee_names_its_tests() -> None:
    rows = re.findall(r"^\| (?!promise ).+\|$", (ROOT / "docs/explanation/guarantees.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"no {test} in {file}"


@cache
def said(package: str = "") -> set[str]:
    """All texts of the sources."""
    sources = (ROOT / "src/aliquot" / package).rglob("*.py")
    return {text for source in sources for text in literals(source)}


def calls(name: str, package: str = "") -> Iterator[ast.Call]:
    """Calls of what has this name in the sources."""
    for source in sorted((ROOT / "src/aliquot" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield node


def _troubleshooting(section: str) -> str:
    text = (ROOT / "docs/guides/troubleshooting.md").read_text()
    return text.split(f"\n## {section}\n")[1].split("\n## ")[0]


def place_configs(page: Path | None, directory: Path) -> list[str]:
    """What the page's commands find where they run: the repository's files, and the configurations of the page."""
    for name in ("examples", "docs", "benchmarks", "tests", "src", "Makefile"):
        (directory / name).symlink_to(ROOT / name)
    (directory / "cpu-ds.json").symlink_to(ROOT / "examples/seed/cpu-ds.json")  # the reader's own JSON
    return write_configs(page, directory) if page else []


def write_configs(page: Path, directory: Path) -> list[str]:
    named = [(block.config_name, block.text) for block in blocks(page) if block.config_name]
    for name, text in named:
        (directory / name).write_text(text)
    return [name for name, _ in named]


def literals(source: Path) -> Iterator[str]:
    """Texts of a source file, adjoining ones joined as Python joins them; what an f-string inserts is left out."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))


def usage(block: Block) -> list[list[str]]:
    lines = [line for line in block.text.replace("\\\n", " ").splitlines() if re.match("(aliquot|make) ", line)]
    return [words for line in lines for words in Block("sh", line).commands()]


def check(words: list[str]) -> None:
    """A command of ours exists with these options and files; those of others are not looked at."""
    while "=" in words[0] and not words[0].startswith("-"):
        words = words[1:]  # variables of the environment
    if words[0] == "aliquot":
        check_aliquot(words[1:])
    elif words[0] == "torchrun" and "aliquot" in words:
        check_aliquot(words[words.index("aliquot") + 1 :])
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets or "=" in word for word in words[1:]), words
    elif words[0] in ("python", "torchrun"):
        for word in words[1:]:
            if re.fullmatch(r"(benchmarks|tests|examples)/[\w./-]+|tests\.\w+", word):
                file = ROOT / (word if "/" in word else f"{word.replace('.', '/')}.py")
                assert file.exists(), words


@cache
def command_tree() -> Any:
    return typer.main.get_command(app)


def check_aliquot(words: list[str]) -> None:
    command = command_tree()
    if words[0].startswith("-"):
        assert any(words[0] in option.opts for option in command.params), words
        return
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"no such command: aliquot {' '.join(words)}"
        command, words = command.commands[words[0]], words[1:]
    # Raises for options and kinds of values that the command does not have.
    parameters = command.make_context("aliquot", list(words)).params
    if command.name == "init":  # the commands below it name what it writes
        write_starter(parameters["kind"], parameters["directory"] or Path(parameters["kind"]))
    config = parameters.get("config")
    if config is not None and config.suffix == ".yaml":
        read_config(config, parameters.get("overrides") or ())


def run(commands: str, directory: Path) -> None:
    """As a reader's shell would, stopping at the first that fails."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
