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
    "plan": {"attention", "config", "catalogue", "loss", "launch", "models", "machine"},
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


def modules(file: Path) -> set[str]:
    """What a file imports, at its head or in a function; of `from a import b` both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def imports(file: Path) -> set[str]:
    """The packages of ours, and the names of aliquot itself, that a file imports."""
    return {name.split(".")[1] for name in modules(file) if name.startswith("aliquot.")}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_import_rules(package: str) -> None:
    folder = SOURCE / package
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{package}.py"]
    assert files
    for file in files:
        wrong = imports(file) - ALLOWED[package] - {package, "errors", "textfile"}
        assert not wrong, f"{file.relative_to(SOURCE)} may not import {sorted(wrong)}"


def test_every_package_has_a_rule() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert packages - set(ALLOWED) == {"cli"}


def test_distributed_torch_stays_in_its_places() -> None:
    for file in SOURCE.rglob("*.py"):
        if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in modules(file)):
            places = {"loaders", "engines", "launch", "collectives", "doctor"}
            assert file.relative_to(SOURCE).parts[0] in places, file


@pytest.mark.parametrize("command", [["-c", "import aliquot"], ["-m", "aliquot", "--help"]])
def test_light_start(command: list[str]) -> None:
    result = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert not loaded & {"torch", "transformers", "datasets", "numpy", "pydantic"}
