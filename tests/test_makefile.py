"""`make install` takes a torch that suits the machine; pip and python are stand-ins that write down what is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tools.docs_pages import ROOT

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# `python3 -m venv DIRECTORY` makes a directory whose pip logs its arguments and does not reach what $UNREACHABLE names.
PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
cat > "$3/bin/pip" <<'END'
#!/bin/sh
echo "$@" >> pip.log
case "$*" in *"$UNREACHABLE"*) echo "ERROR: no answer" >&2; exit 1;; esac
END
chmod +x "$3/bin/pip"
"""


def install(folder: Path, *variables: str, unreachable: str = "nothing") -> tuple[list[str], str]:
    """What pip was asked for, and what `make install` wrote to stderr, in a folder with an unusual name."""
    place = folder / "a b 한글"
    place.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, place)
    python = place / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key not in ("TORCH", "TORCH_INDEX", "MAKEFLAGS")}
    environment |= {"UNREACHABLE": unreachable}
    command = ["make", "install", "PYTHON=./python3", *variables]
    made = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=True)
    assert made.stdout.count("\ninstalling torch ") == 1, made.stdout
    return (place / "pip.log").read_text().splitlines(), made.stderr


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        (["NVIDIA_DRIVER="], CPU_INDEX),
        (["NVIDIA_DRIVER=", "TORCH_INDEX=http://mirror/cpu"], "http://mirror/cpu"),
        (["NVIDIA_DRIVER=", "TORCH_INDEX="], None),
        (["NVIDIA_DRIVER=/dev/nvidiactl"], None),
    ],
)
def test_torch_comes_from_pytorchs_cpu_index_where_there_is_no_driver(
    tmp_path: Path, variables: list[str], index: str | None
) -> None:
    asked, told = install(tmp_path, *variables)
    torch = [line for line in asked if "torch==" in line]
    assert len(torch) == 1 and torch[0].endswith("torch==2.13.0") and len(asked) == 2 and not told
    assert f"--index-url {index}" in torch[0] if index is not None else "--index-url" not in torch[0]


def test_an_index_that_does_not_answer_is_told_and_done_without(tmp_path: Path) -> None:
    asked, told = install(tmp_path, "NVIDIA_DRIVER=", unreachable=CPU_INDEX)
    assert [CPU_INDEX in line for line in asked] == [True, False, False] and asked[1].endswith("torch==2.13.0")
    assert told.startswith(f"make: {CPU_INDEX} did not serve torch 2.13.0") and told.count("\n") == 1


def test_another_torch_has_an_environment_of_its_own(tmp_path: Path) -> None:
    asked, _ = install(tmp_path, "NVIDIA_DRIVER=", "TORCH=2.14.1")
    made = tmp_path / "a b 한글" / ".venv-torch-2.14.1"
    assert asked[0].endswith("torch==2.14.1") and str(made.name) in asked[1] and (made / ".installed").exists()
    pinned = (made / "constraints.txt").read_text()
    assert "torch==2.14.1\n" in pinned
    assert pinned.replace("torch==2.14.1", "torch==2.13.0") == (ROOT / "constraints.txt").read_text()
