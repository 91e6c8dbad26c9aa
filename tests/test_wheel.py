"""The wheel holds every file that the package reads. `make wheel` installs it into an empty environment and trains."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_every_file_of_the_package_is_in_the_wheel(tmp_path: Path) -> None:
    """The wheel is built from a copy, so that no untracked file of the checkout gets in or stays behind."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("aliquot-*.whl")
    package = source / "src" / "aliquot"
    files = {str(file.relative_to(source / "src")) for file in package.rglob("*") if file.is_file()}
    assert any(name.endswith(".json") for name in files) and any(name.endswith(".typed") for name in files)
    assert files <= set(zipfile.ZipFile(wheel).namelist())
