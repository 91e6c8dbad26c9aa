"""How deeply input may nest is counted in the input: the interpreter's recursion limit decides nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from aliquot.cluster.crds import read_crds
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
)
from aliquot.core.errors import UserError
from aliquot.data.sources import source_of
from aliquot.models.source import resolve
from aliquot.observe.report.read_run import read_run
from aliquot.observe.run_directory import HEADER
from aliquot.tensor_io.jsonfile import parse_json
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


@pytest.mark.usefixtures("recursion_limit")
@pytest.mark.parametrize("reader", READERS)
def test_the_verdict_depends_on_the_input_alone(reader: str, tmp_path: Path) -> None:
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
def test_a_run_directory_is_reported_whatever_lies_in_it(tmp_path: Path) -> None:
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


def test_aliases_are_counted_once_and_in_circles() -> None:
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


def test_no_verdict_comes_from_the_recursion_limit() -> None:
    """An `except RecursionError` would be one."""
    assert not [file.name for file in SOURCE.rglob("*.py") if re.search(r"\bRecursionError\b", file.read_text())]
