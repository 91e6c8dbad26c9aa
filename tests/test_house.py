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
# tests began at 26,149. The 870 above that are the balance of what was removed and of tests of preferences (heads,
# prompts, references), of slow hubs, of GPUs by stand-ins, of damaged files and caches, of records of other trainers,
# of lost consoles, of data show, of played-back values, of stops within a step, of settings that are `auto`, of
# `aliquot init` and `aliquot schema`, of offers of one training, and of copied layers and compressed bases.
# src began at 31,660. What was removed has paid for aliquot.Trainer with its losses and samples (690), frozen bases of
# 4 or 8 bits on one host, several, or sharded (333), layers that a GPU copies for each use (181), adapters of experts
# (129), weights in files of 4 bits (131), limits for a slow hub (21), samples within the memory of the plan (20), fewer
# ranks if only these fit (15), and a warning about steps far behind the plan (9).
BUDGET = {"src": 31_464, "tests": 27_125}
MOST_PARAMETERS = 7
LONGEST_FILE = 370
SMALL_FILE = 100
# Each is started by its name, would close a circle of imports, or is one of several files with a subject each.
SMALL_ALL_THE_SAME = {
    "cli/main", "distributed/fork_server", "distributed/rank_process", "doctor/examine", "doctor/storage_checks",
    "engines/fsdp/fp8_layers", "optim/schedule",
}  # fmt: skip
# Participles, pronouns and prepositions say nothing of what a name stands for.
PRIVATE_WORDS = re.compile(r"told|found|kept|met|given|wanted|each|own|beside|behind|(of|by)_\w+")
ALLOWED_NAMES = {"by_alias", "found"}  # a parameter of pydantic; a key of doctor.json
SHARED_FILE_NAMES = {"__init__", "base"}
TESTS = Path(__file__).parent
# Of modules that no test of their package imports, because the tests start a command or look from elsewhere.
TESTED_BY = {
    "run/test_own_loop": {
        "losses", "run/caller_batch", "run/prepared_run", "run/training_loop",
    },
    "cli/test_chat": {"cli/generate_command"},
    "nn/test_head_loss": {"nn/row_loss"},
    "cli/test_cluster": {"cli/cluster_command"},
    "cli/test_export": {"cli/export_command"},
    "cluster/test_aws_account": {"config/cluster_section"},
    "cluster/test_check": {
        "cluster/comparison", "cluster/node_fields",
        "cluster/node_pool_view", "cluster/quantity", "cluster/rules_environment", "cluster/rules_job",
        "cluster/rules_references", "cluster/storage_fields",
    },
    "cluster/test_directories": {"cluster/make_directories"},
    "cluster/test_proof": {"doctor/node_proof"},
    "cluster/test_schemas": {"cluster/infrastructure"},
    "checkpoint/test_checkpoint": {"checkpoint/resume"},
    "config/test_deepspeed_json": {"engines/deepspeed/deepspeed_settings"},
    "config/test_starters": {"cli/init_command"},
    "core/test_python_command": {"__main__", "core/standard_streams"},
    "data/test_formats": {"data/record_answers"},
    "data/test_token_stream": {"data/segment_sequences"},
    "distributed/test_launcher": {
        "distributed/fork_server", "distributed/forked_rank", "distributed/local_group", "distributed/rank_process",
        "run/trainer",
    },
    "distributed/test_rank_errors": {"core/on_rank_0"},
    "doctor/test_machine_checks": {"cli/doctor_command", "machine/storage"},
    "engines/test_deepspeed": {"engines/deepspeed/deepspeed_memory"},
    "engines/test_host_engine": {
        "distributed/collectives/buffer_sizes", "engines/host/host_builder", "engines/host/host_states",
        "engines/host/layer_hooks",
    },
    "machine/test_cpu": {"machine/cgroup"},
    "models/test_adapter": {"nn/experts/expert_adapters"},
    "models/test_untrusted_code": {"core/template_process"},
    "observe/report/test_report": {"cli/report_command"},
    "observe/test_step_clock": {"core/number_format"},
    "optim/test_adamw": {"config/train_section"},
    "planner/test_cli": {"cli/plan_command"},
    "planner/test_memory_plan": {"models/model_shape"},
    "planner/test_offers": {"cli/plan_offers"},
    "planner/test_planner": {"planner/run_plan"},
    "run/test_adapter": {"config/adapter_section"},
    "run/test_data_run": {"cli/data_command", "config/data_section"},
    "run/test_evaluate": {"cli/evaluate_command", "config/evaluation_config", "run/benchmark_tasks"},
    "run/test_preferences": {"run/reference"},
    "run/test_stopped_late": {"distributed/signals"},
    "run/test_train": {
        "cli/train_command", "core/intervals", "run/built_model", "run/run_checkpoints", "run/starting_point",
    },
}  # fmt: skip
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


def test_every_module_has_a_test_file() -> None:
    """The file of its name, or files of its package that import it, or a file that TESTED_BY names."""
    files = {file.relative_to(TESTS).with_suffix("").as_posix(): file for file in TESTS.rglob("test_*.py")}
    modules = {name for name in trees() if Path(name).name != "__init__"}
    tested = {name for name in modules if f"test_{Path(name).name}" in {Path(file).name for file in files}}
    for folder in {name.split("/")[0] for name in modules}:
        tested |= {name for file in (TESTS / folder).rglob("*.py") for name in imports(file) if name.startswith(folder)}
    assert files.keys() >= TESTED_BY.keys(), f"no test file: {', '.join(TESTED_BY.keys() - files.keys())}"
    named = set().union(*TESTED_BY.values())
    assert modules - tested == named, (
        f"name the test file in TESTED_BY: {', '.join(sorted(modules - tested - named))};"
        f" take out of it: {', '.join(sorted(named - (modules - tested)))}"
    )
