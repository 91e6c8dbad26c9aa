"""Rules that keep the sources readable. The message of each failure names the remedy."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.test_imports import REPOSITORY, SOURCE, imports

# Statements without docstrings, because formatting cannot change their number. Lower a number whenever the count has
# fallen. Raise a number only for a feature, and name in that line the feature and the statements that it takes.
# tests began at 26,149. The 373 above that are the balance of what was removed and of tests of preferences (heads,
# prompts, references), of damaged files and caches, of records of other trainers, of lost consoles, of data show, of
# played-back values, of stops within a step and of settings that are `auto`.
# 39 and 63 more for `aliquot init` and `aliquot schema` (34 and 58), and for the precision of generating (5 and 5).
BUDGET = {"src": 31_586, "tests": 26_585}
MOST_PARAMETERS = 7
LONGEST_FILE = 400
SMALL_FILE = 100
# Each is started by its name, would close a circle of imports, or is one of several files with a subject each.
SMALL_ALL_THE_SAME = {
    "cli/main", "distributed/fork_server", "distributed/rank_process", "doctor/examine", "doctor/storage_checks",
}  # fmt: skip
# Participles, pronouns and prepositions say nothing of what a name stands for.
PRIVATE_WORDS = re.compile(r"told|found|kept|met|given|wanted|each|own|beside|behind|(of|by)_\w+")
ALLOWED_NAMES = {"by_alias", "found"}  # a parameter of pydantic; a key of doctor.json
SHARED_FILE_NAMES = {"__init__", "base"}
TESTS = Path(__file__).parent
# What tests of several packages share. Programs, and what programs share, lie in tests/tools.
TEST_HELPERS = {"__init__", "conftest", "examples", "plain", "processes", "runs", "slow_disk"}


@cache
def trees() -> dict[str, ast.Module]:
    """Path below src/aliquot without its suffix -> syntax tree."""
    return {
        file.relative_to(SOURCE).with_suffix("").as_posix(): ast.parse(file.read_text())
        for file in sorted(SOURCE.rglob("*.py"))
    }


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(trees()[module]))


@pytest.mark.parametrize("folder", BUDGET)
def test_statements_stay_within_their_budget(folder: str) -> None:
    nodes = (node for file in (REPOSITORY / folder).rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    count = sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in nodes
    )
    assert count <= BUDGET[folder], (
        f"{folder} has {count:,} statements, {count - BUDGET[folder]:,} above its budget: look in the files that you"
        " changed for a second way, a layer that only passes on, or code that a library has, and remove it"
    )


def test_functions_take_few_parameters() -> None:
    long = []
    for module in trees():
        for function in nodes_of(module):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = function.args
            names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            if module.startswith("cli/") or names[:1] == ["ctx"]:  # Typer and autograd dictate these signatures
                continue
            if len(names) - (names[:1] in (["self"], ["cls"])) > MOST_PARAMETERS:
                long.append(f"{module}.py:{function.lineno} {function.name}")
    assert not long, f"group the parameters that are one thing into a dataclass: {', '.join(long)}"


def test_files_are_not_too_long() -> None:
    lengths = {name: len((SOURCE / f"{name}.py").read_text().splitlines()) for name in trees()}
    long = [f"{name}.py ({lines})" for name, lines in lengths.items() if lines > LONGEST_FILE]
    assert not long, f"a file holds one idea, up to {LONGEST_FILE} lines: split {', '.join(long)}"


def test_small_modules_have_several_importers() -> None:
    importers = defaultdict(list)
    for name in trees():
        for module in imports(SOURCE / f"{name}.py") - {name}:
            importers[module].append(name)
    small = [
        f"{name}.py"
        for name in trees()
        if len(importers[name]) == 1 and name not in SMALL_ALL_THE_SAME
        if not importers[name][0].startswith("cli/")  # a command's work lies elsewhere
        if len((SOURCE / f"{name}.py").read_text().splitlines()) < SMALL_FILE
    ]
    assert not small, f"merge into the only file that imports it, if the two are one idea: {', '.join(small)}"


def test_names_say_what_they_stand_for() -> None:
    words = defaultdict(set)
    for module in trees():
        for node in nodes_of(module):
            for name in (getattr(node, kind, None) for kind in ("id", "arg", "name")):
                if isinstance(name, str) and PRIVATE_WORDS.fullmatch(name) and name not in ALLOWED_NAMES:
                    words[name].add(f"{module}.py")
    listed = "; ".join(f"{word}: {', '.join(sorted(files))}" for word, files in words.items())
    assert not words, f"name the thing, in the field's words: {listed}"


def test_no_two_files_or_classes_share_a_name() -> None:
    files = Counter(Path(name).name for name in trees())
    classes = Counter(node.name for module in trees() for node in nodes_of(module) if isinstance(node, ast.ClassDef))
    twice = [f"{name}.py" for name, count in files.items() if count > 1 and name not in SHARED_FILE_NAMES]
    twice += [f"class {name}" for name, count in classes.items() if count > 1]
    assert not twice, f"rename one of each: {', '.join(twice)}"


def test_no_tool_in_the_root_of_tests() -> None:
    strays = {file.stem for file in TESTS.glob("*.py") if not file.stem.startswith("test_")} - TEST_HELPERS
    listed = ", ".join(sorted(f"{name}.py" for name in strays))
    assert not strays, f"a program goes to tests/tools/, a helper beside the tests that use it: {listed}"
