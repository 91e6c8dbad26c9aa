"""The house's import rules, and a command that answers at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "aliquot"

# Who may import whom; everyone may import errors and textfile, and a package itself.
ALLOWED = {
    "config": set(),
    "catalogue": set(),
    "cluster": {"config", "catalogue"},
    "ranges": set(),
    "machine": set(),
    "launch": {"config", "machine"},
    "collectives": set(),
    "doctor": {"config", "launch", "machine", "collectives"},
    "optim": set(),
    "attention": set(),
    "loss": set(),
    "models": {"attention", "config", "loss", "ranges"},
    "loaders": {"config", "models", "ranges"},
    "data": {"config", "launch", "loss", "models", "ranges", "machine"},
    "engines": {
        "attention",
        "config",
        "launch",
        "loaders",
        "loss",
        "models",
        "optim",
        "ranges",
        "machine",
        "collectives",
    },
    "checkpoint": {"config", "ranges"},
    "observe": {"config", "launch", "machine"},
    "evaluate": {"config", "data", "engines", "launch"},
    "plan": {"attention", "config", "catalogue", "data", "engines", "launch", "loss", "machine", "models", "ranges"},
    "train": {
        "config",
        "plan",
        "models",
        "data",
        "engines",
        "checkpoint",
        "observe",
        "launch",
        "machine",
        "optim",
        "ranges",
        "evaluate",
    },
}


# What the planner may know of packages that hold, sum and read: how much memory they say that they take.
READ_BY_THE_PLAN = {"data": ("packing",), "engines": ("_memory",), "ranges": ("transfer",)}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "aliquot":
            names = [node.module] if node.module != "aliquot" else [f"aliquot.{alias.name}" for alias in node.names]
            found.update(name.split(".")[1] for name in names)
        elif isinstance(node, ast.Import):
            found.update(a.name.split(".")[1] for a in node.names if a.name.startswith("aliquot."))
    return found


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_import_rules(package: str) -> None:
    folder = SOURCE / package
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{package}.py"]
    assert files
    for file in files:
        wrong = imports(file) - ALLOWED[package] - {package, "errors", "textfile"}
        assert not wrong, f"{file.relative_to(SOURCE)} may not import {sorted(wrong)}"


@pytest.mark.parametrize("package", READ_BY_THE_PLAN)
def test_the_plan_asks_owners_only_what_they_hold(package: str) -> None:
    for file in (SOURCE / "plan").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"aliquot.{package}."):
                assert str(node.module).endswith(READ_BY_THE_PLAN[package]), f"{file.name} imports {node.module}"


def test_every_package_has_a_rule() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert packages - set(ALLOWED) == {"cli"}


def test_distributed_torch_stays_in_its_places() -> None:
    for file in SOURCE.rglob("*.py"):
        if "torch.distributed" in file.read_text():
            places = {"loaders", "engines", "launch", "collectives", "doctor"}
            assert file.relative_to(SOURCE).parts[0] in places, file


@pytest.mark.parametrize("command", [["-c", "import aliquot"], ["-m", "aliquot", "--help"]])
def test_light_start(command: list[str]) -> None:
    result = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert not loaded & {"torch", "transformers", "datasets", "numpy", "pydantic"}


def test_train_tells_its_story_briefly() -> None:
    assert len((SOURCE / "train.py").read_text().splitlines()) < 300
