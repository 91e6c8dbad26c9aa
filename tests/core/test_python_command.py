"""No interpreter of ours imports a file of the working directory, which a stranger may have put there.

Standard streams that are closed when a command starts, and a console that is lost later.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from aliquot.config.read_config import read_config
from aliquot.core.errors import ConfigError
from aliquot.core.python_command import python_command
from tests.runs import curve, write_config
from tests.tools import warm

SOURCE = Path(__file__).resolve().parents[2] / "src" / "aliquot"
ALIQUOT = Path(sys.executable).with_name("aliquot")
SPAWN = """
import multiprocessing
context = multiprocessing.get_context("METHOD")
process = context.Process(target=print)
process.start()
process.join()
raise SystemExit(process.exitcode)
"""


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """A directory with a module for each name that a program here might import; importing one leaves a file."""
    names = {*sys.stdlib_module_names, *packages_distributions()} - {"aliquot", "__main__"}
    folder = tmp_path / "traps"
    folder.mkdir()
    for name in names:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(
                f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\nraise SystemExit(9)\n"
            )
    return folder


def run(traps: Path, *command: str | Path, said: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONPATH", None)
    words = list(map(str, command))
    done = subprocess.run(words, cwd=traps, env=environ, input=said, capture_output=True, text=True, check=False)
    imported = traps.parent / "imported"
    assert not imported.exists(), f"{command} imported {imported.read_text()}"
    return done


def test_only_interpreter_module_starts_python() -> None:
    """Whoever starts one otherwise forgets `-P` sooner or later."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())) if file != SOURCE / "core/python_command.py" else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                starts = node.value.id == "os" and node.attr.startswith(("exec", "spawn", "posix_spawn"))
                assert not starts and node.attr != "executable", f"{file}: {ast.unparse(node)}"


@pytest.mark.parametrize("command", [["-c", "import yaml"], ["-m", "platform"], ["-c", SPAWN]])
def test_started_python_ignores_the_working_directory(traps: Path, command: list[str]) -> None:
    for method in ("spawn", "forkserver"):
        done = run(traps, *python_command(*(word.replace("METHOD", method) for word in command)))
        assert done.returncode == 0, done.stderr


def test_entry_point_ignores_the_working_directory(traps: Path) -> None:
    safe = "import sys; from aliquot.__main__ import main; main()"
    for command in ([ALIQUOT], [*python_command("-c", safe)]):
        assert run(traps, *command, "--version").stdout.startswith("aliquot "), command
    (traps / "run.yaml").write_text("run: 1\n")
    assert run(traps, ALIQUOT, "train", "run.yaml").returncode == 2


@pytest.mark.long
def test_no_command_imports_from_the_working_directory(traps: Path, tmp_path: Path) -> None:
    observe = {"report_to": ["wandb", "tensorboard"], "sample_prompt": "the"}
    config = write_config(tmp_path, "run", observe=observe, launch={"ranks": 2})
    export = tmp_path / "run" / "export"
    again = write_config(tmp_path, "rounds", launch={"ranks": 2, "nodes": "1:2"}, train={"global_batch_size": 4})
    for command in (
        ["plan", config], ["train", config], ["train", again], ["doctor"], ["chat", export], ["data", "show", config],
        ["evaluate", export, tmp_path / "text.txt", "--ranks", "2"], ["generate", export, "--prompt", "the"],
        ["report", tmp_path / "run"],
    ):  # fmt: skip
        done = run(traps, ALIQUOT, *command, said="hello\n")
        known = command[0] in ("doctor", "chat")  # this machine may have problems, and this model no chat template
        assert done.returncode == 0 or known, (command, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr


STREAMED = (sys.executable, "-P", "-m", "aliquot")


def shell(redirection: str, *arguments: str | Path) -> tuple[int, str]:
    """The exit code and stderr of `aliquot ARGUMENTS` with `redirection`, a shell's."""
    words = ["bash", "-c", f'"$@" {redirection}', "bash", *STREAMED, *map(str, arguments)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "error"),
    [
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 2, "aliquot: stdout: cannot write: No space left on device [disk]\n"),
        (">/dev/full 2>&1", 2, ""),
        ("| exec true; exit ${PIPESTATUS[0]}", 128 + signal.SIGPIPE, ""),
    ],
)
def test_command_without_stdout_ends_in_a_line_at_most(redirection: str, code: int, error: str) -> None:
    assert shell(redirection, "instances", "--json") == (code, error)


@pytest.mark.parametrize("nodes", [1, pytest.param("1:2", marks=pytest.mark.long)])
def test_run_continues_in_a_log_without_its_console(nodes: int | str, tmp_path: Path) -> None:
    config = write_config(tmp_path, launch={"ranks": 2, "nodes": nodes})
    with Path("/dev/full").open("w") as full:
        streams = {"stdin": subprocess.DEVNULL, "stdout": full, "stderr": full}
        with warm.popen("-m", "aliquot", "train", config, "train.max_steps=2", **streams) as run:
            assert run.wait(240) == 0
    assert list(curve(tmp_path / "run")) == [1, 2]
    text = (tmp_path / "run" / "logs" / "console.log").read_text()
    assert "stdout is lost (No space left on device): the run continues, and prints here\n" in text
    assert str(tmp_path / "run" / "report.html") in text  # the end of the run's output


@pytest.mark.long
@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "2>&1 | exec true"])
@pytest.mark.parametrize("nodes", [1, "1:2"])
def test_ranks_start_without_streams(redirection: str, nodes: int | str, tmp_path: Path) -> None:
    config = write_config(tmp_path, launch={"ranks": 2, "nodes": nodes})
    code, error = shell(redirection, "train", config, "train.max_steps=2", "checkpoint.export=false")
    assert code == 0, error
    assert list(curve(tmp_path / "run")) == [1, 2]


def test_argument_that_is_not_utf_8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^override b'run.name=.xff': its bytes are not UTF-8\. "):
        read_config(write_config(tmp_path), ["run.name=\udcff"])
