"""What is built can be installed and run far from the checkout: the wheel holds all that the package reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing that lies about in the checkout gets in or stays behind."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip("wheel", "--no-deps", "--wheel-dir", str(out), str(copy))
    (built,) = out.glob("aliquot-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel's content alone; what it depends on is this environment's."""
    place = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", str(place), str(wheel))
    return place


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    package = ROOT / "src" / "aliquot"
    files = {str(file.relative_to(ROOT / "src")) for file in package.rglob("*") if file.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert any(name.endswith(".json") for name in files) and any(name.endswith(".typed") for name in files)
    assert files <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "aliquot"),
        (["instances", "c7i.8xlarge"], "c7i.8xlarge"),
        (["plan", "quickstart.yaml"], "fits: "),
        (["plan", "quickstart.yaml", "--instance", "m7i.8xlarge"], "m7i.8xlarge"),
        (["cluster", "check", "llama3-8b-cpu.yaml"], "nothing found"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_run_elsewhere(installed: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    for name in ("quickstart.yaml", "llama3-8b-cpu.yaml"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    done = run(installed, tmp_path, str(installed / "bin" / "aliquot"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout


def test_it_is_the_installed_package_that_runs(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-c", "import aliquot; print(aliquot.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(installed)


def run(installed: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
