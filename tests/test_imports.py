"""The house's import rules, and a command that answers at once."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "src" / "aliquot"

FOR_EVERYBODY = {"core"}


def allowed() -> dict[str, set[str]]:
    """Room -> what it may import, from ARCHITECTURE.md's table; `everything` is left out."""
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    return {room: set(re.findall(r"`([^`]+)`", cell)) for room, cell in rows if cell.strip() != "everything"}


def files_of(room: str) -> list[Path]:
    folder = SOURCE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{room}.py"]


@cache
def modules(file: Path) -> frozenset[str]:
    """What a file imports, at its head or in a function; of `from a import b` a.b where that is a module of ours."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if is_module(name) else node.module for name in names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return frozenset(found)


def imports(file: Path) -> set[str]:
    """Modules of ours as paths: `tensor_io/parts`."""
    return {name.removeprefix("aliquot.").replace(".", "/") for name in modules(file) if name.startswith("aliquot.")}


def is_module(name: str) -> bool:
    path = SOURCE.parent / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def permits(permission: str, module: str) -> bool:
    return fnmatch(module, permission) if "/" in permission else module.split("/")[0] == permission


@pytest.mark.parametrize("room", sorted(allowed()))
def test_import_rules(room: str) -> None:
    unused = set(permissions := allowed()[room])
    for file in files_of(room):
        for module in imports(file):
            used = {permission for permission in permissions if permits(permission, module)}
            unused -= used
            known = used or module.split("/")[0] in FOR_EVERYBODY | {room}
            assert known, f"{file.relative_to(SOURCE)} may not import {module}: see ARCHITECTURE.md"
    assert not unused, f"{room} imports nothing of {', '.join(sorted(unused))}: take it out of ARCHITECTURE.md"


def test_rooms_import_from_rooms_above_them() -> None:
    above: set[str] = set()
    for room, permissions in allowed().items():
        below = {permission.split("/")[0] for permission in permissions} - above
        assert not below, f"{room} may import {', '.join(sorted(below))}, further down in ARCHITECTURE.md's table"
        above.add(room)


def test_every_room_has_a_rule() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    rooms |= {path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("__")}
    assert rooms - {"cli"} == set(allowed())


def test_files_that_the_architecture_names_exist() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    there = {file.name for file in SOURCE.rglob("*.py")} | {"test_imports.py", "test_house.py"}
    named = set(re.findall(r"\w+\.py", text)) - {"NAME_command.py", "NAME_checks.py"}
    assert named <= there, f"not there: {', '.join(sorted(named - there))}"


def test_distributed_torch_stays_in_its_places() -> None:
    for file in SOURCE.rglob("*.py"):
        if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in modules(file)):
            places = {"loaders", "engines", "distributed", "doctor"}
            assert file.relative_to(SOURCE).parts[0] in places, file


@pytest.mark.parametrize("command", [["-c", "import aliquot"], ["-m", "aliquot", "--help"]])
def test_light_start(command: list[str]) -> None:
    result = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert not loaded & {"torch", "transformers", "datasets", "numpy", "pydantic"}


@pytest.mark.parametrize(
    ("environ", "spins"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_waiting_threads_sleep_soon(environ: dict[str, str], spins: str) -> None:
    command = [sys.executable, "-c", "import aliquot, os; print(os.environ.get('GOMP_SPINCOUNT'))"]
    others = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    assert subprocess.check_output(command, env=others | environ, text=True).strip() == spins


def test_rooms_without_torch() -> None:
    modules = [
        file.relative_to(SOURCE.parent)
        for room in ("core", "config", "catalogue", "cluster")
        for file in files_of(room)
    ]
    names = ", ".join(".".join(path.with_suffix("").parts) for path in modules)
    check = f"import sys, {names}; assert not sys.modules.keys() & {{'torch', 'transformers', 'numpy'}}"
    subprocess.run([sys.executable, "-c", check], check=True)
