"""Limits on nesting and aliases of JSON and YAML, which do not depend on the interpreter's recursion limit."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.cluster.kind_schemas import read_crds
from aliquot.cluster.manifests import parse_manifests
from aliquot.config.adapter_section import adapter_settings
from aliquot.config.data_section import DataSection
from aliquot.config.read_config import apply_override, read_config
from aliquot.config.schema import ModelSection
from aliquot.core.decode import (
    DEEPEST,
    BoundedFastLoader,
    BoundedLoader,
    TooDeepError,
    check_depth,
    check_json_depth,
    decode_json,
    load_yaml,
    parse_json,
)
from aliquot.core.errors import UserError
from aliquot.data.sources import source_of
from aliquot.models.source import resolve
from aliquot.observe.report.read_run import read_run
from aliquot.observe.run_directory import HEADER
from tests.test_imports import SOURCE

TOO_DEEP = f"more than {DEEPEST} levels deep"


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def read_text(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    list(source_of(DataSection(path=str(folder / name)), folder).documents())


def read_file(folder: Path, name: str, text: str, read: Callable[[Path], object]) -> None:
    (folder / name).write_text(text)
    read(folder / name)


def apply_deepspeed(file: Path) -> None:
    config = file.with_name("run.yaml")
    config.write_text(f"shard: {{deepspeed_config: {file}}}\n")
    read_config(config)


# What each reader of files gets: a text with `inner`, which nests, below one more level.
READERS: dict[str, Callable[[Path, str], object]] = {
    "a config": lambda folder, inner: read_file(folder, "run.yaml", f"data: {inner}", read_config),
    "an override": lambda folder, inner: apply_override({}, f"data.path=[{inner}]", {}),
    "a model": lambda folder, inner: read_file(
        folder, "config.json", f'{{"model_type": "llama", "x": {inner}}}',
        lambda file: resolve(ModelSection(config=file)),
    ),
    "an adapter": lambda folder, inner: read_file(
        folder, "adapter_config.json", f'{{"x": {inner}}}', lambda file: adapter_settings(file.parent)
    ),
    "a DeepSpeed JSON": lambda folder, inner: read_file(
        folder, "ds.json", f'{{"x": {inner}}}',
        apply_deepspeed,
    ),
    "JSON lines": lambda folder, inner: read_text(folder, "a.jsonl", f'{{"text": "a", "x": {inner}}}\n'),
    "a JSON array": lambda folder, inner: read_text(folder, "a.json", f'[{{"text": "a"}}, {inner}]'),
    "tools in a record": lambda folder, inner: read_text(
        folder, "a.jsonl", json.dumps({"prompt": "a", "completion": "b", "tools": f"[{inner}]"})
    ),
    "a manifest": lambda folder, inner: list(parse_manifests(f"kind: {inner}", "x.yaml")),
    "a CRD": lambda folder, inner: read_file(
        folder, "crd.yaml", f"kind: CustomResourceDefinition\nx: {inner}", lambda file: read_crds(file.parent)
    ),
    "a header": lambda folder, inner: parse_json(f'{{"x": {inner}}}'.encode(), "x.safetensors"),
}  # fmt: skip


@pytest.fixture(params=["as it is", "raised, as torch.compile does"])
def recursion_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before if request.param == "as it is" else 20_000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.few(10)
@pytest.mark.usefixtures("recursion_limit")
@pytest.mark.parametrize("reader", READERS)
def test_nesting_limit_ignores_the_recursion_limit(reader: str, tmp_path: Path) -> None:
    verdicts = {}
    for levels in (80, 150, 1500):
        try:
            READERS[reader](tmp_path, nested(levels))
        except UserError as error:
            verdicts[levels] = TOO_DEEP in str(error)
            assert "\n" not in str(error)
        else:
            verdicts[levels] = False
    assert verdicts == {80: False, 150: True, 1500: True}


@pytest.mark.usefixtures("recursion_limit")
def test_report_skips_files_that_nest_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"{HEADER}\nrun: {nested(1500)}\n")
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 1.0}}\n{{"step": 2, "loss": {nested(1500)}}}\n')
    run = read_run(tmp_path)
    assert run.config == {} and [line["step"] for line in run.steps] == [1]


def test_depth_is_counted_exactly() -> None:
    """In the text of JSON and of YAML, in values, in nodes; not in strings, and not by what is merely long."""
    beside = ", ".join(["[{}]"] * 500)
    for inner, quoted in ((nested(DEEPEST - 1), nested(500)), (nested(DEEPEST), "")):
        text = f'["{quoted}\\"[", {inner}, {beside}]'
        checks = (
            check_json_depth,
            load_yaml,
            lambda text: yaml.load(text, Loader=BoundedFastLoader),
            lambda text: check_depth(json.loads(text)),
            lambda text: decode_json(text.encode()),
        )
        for check in checks:
            if quoted:
                check(text)
            else:
                with pytest.raises(TooDeepError):
                    check(text)
    check_json_depth('"' + "[" * 1000)  # a string that the end of a block has cut
    for loader in (BoundedLoader, BoundedFastLoader):
        with pytest.raises(yaml.YAMLError):
            yaml.load("[" * DEEPEST, Loader=loader)
        with pytest.raises(TooDeepError):
            yaml.load("[" * 100000, Loader=loader)
    with pytest.raises(TooDeepError):
        check_json_depth("[" * 100000)


def test_depth_counts_aliases_once_and_refuses_circles() -> None:
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(TooDeepError):
        check_depth(circle)
    laughs = [f"{outer}: &{outer} [{', '.join([f'*{inner}'] * 9)}]" for inner, outer in pairwise("abcdefghijklm")]
    check_depth(yaml.safe_load("\n".join(["a: &a []", *laughs])))
    chain = ["a0: &a0 []", *(f"a{outer}: &a{outer} [*a{inner}]" for inner, outer in pairwise(range(DEEPEST)))]
    with pytest.raises(TooDeepError):  # the text nests two levels deep
        load_yaml("\n".join(chain))
    load_yaml("\n".join(chain[:-1]))
    with pytest.raises(UserError):
        apply_override({}, "data.path=&a [*a]", {})
    with pytest.raises(UserError, match="an alias within its own anchor"):
        list(parse_manifests("kind: &a [*a]", "x.yaml"))


def test_no_code_catches_recursion_errors() -> None:
    """An `except RecursionError` would be one."""
    assert not [file.name for file in SOURCE.rglob("*.py") if re.search(r"\bRecursionError\b", file.read_text())]


LAUGHS = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 30))
CYCLE = "a: &a [*a]\n"


@pytest.mark.parametrize("loader", [BoundedLoader, BoundedFastLoader])
def test_aliases_are_bounded(loader: type) -> None:
    for text in (LAUGHS, MERGES, CYCLE):
        with pytest.raises(yaml.MarkedYAMLError, match="alias"):
            yaml.load(text, Loader=loader)
        with pytest.raises(yaml.MarkedYAMLError, match="alias"):
            list(yaml.load_all(f"b: 1\n---\n{text}", Loader=loader))
    shared = "a: &a {b: [1, 2]}\nc: [*a, *a]\nd: {<<: *a}\n"
    assert yaml.load(shared, Loader=loader) == yaml.load(shared, Loader=loader.__mro__[2])


@pytest.mark.parametrize("text", [LAUGHS, MERGES, CYCLE], ids=["laughs", "merges", "cycle"])
def test_alias_bomb_is_one_line_in_every_command(tmp_path: Path, text: str) -> None:
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


def test_only_decode_defines_yaml_loaders() -> None:
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        is_decode = file == SOURCE / "core" / "decode.py"
        assert is_decode or not any(name in text for name in ("safe_load", "yaml.SafeLoader", "yaml.BaseLoader")), file
        assert is_decode or text.count("yaml.load") + text.count("yaml.compose") == text.count("Loader="), file


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("a:\n\tb: 1\n", 2, "a tab in the indentation, where YAML allows only spaces: replace the tab by spaces"),
        ("a:\n  b: 1\n   c: 2\n", 3, "this line is indented more than the line above, which has a value already"),
        ("a:\n  b: 1\n c: 2\n", 3, "this line is indented unlike the lines above"),
        ("a:\n  b:\n    - 1\n   - 2\n", 4, "this line is indented unlike the lines above"),
        ("a: b: 1\n", 1, "a value with `: ` in it: put the value in quotes"),
        ("a\n  b: 1\n", 2, "no colon after 'a' in the line above"),
        ("a: {b\n", 2, "the bracket that opens in line 1 is not closed"),
        ("a: [b\nc: 1\n", 2, "the bracket that opens in line 1 is not closed"),
        ("a: 'b\n", 2, "the quote that opens in line 1 is not closed"),
        ("a: @b\n", 1, "a value cannot begin with '@': put the value in quotes"),
        ("a: *.txt\n", 1, "a value cannot begin with '*': put the value in quotes"),
        ("a: *b\n", 1, "a value cannot begin with '*': put the value in quotes"),
        ("a: %b\n", 1, "a value cannot begin with '%': put the value in quotes"),
        ("a: 'b'c\n", 1, "text after a closing quote: put the whole value in one pair of quotes"),
        ("a: 1\nb\nc: 2\n", 3, "no colon in line 2: write `key: value` or `section:`"),
    ],
)
def test_yaml_errors_are_in_plain_words(tmp_path: Path, text: str, line: int, expected: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_config(tmp_path / "run.yaml")
    assert f"run.yaml:{line}: not valid YAML: {expected}" in str(caught.value)
    with pytest.raises(UserError, match=re.escape(expected)):
        list(parse_manifests(text, "x.yaml"))
