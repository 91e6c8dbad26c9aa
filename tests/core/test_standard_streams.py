"""Standard streams that are closed when a command starts, and a console that is lost later."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aliquot.config.read_config import read_config
from aliquot.core.errors import ConfigError
from tests.runs import curve, write_config
from tests.tools import warm

ALIQUOT = (sys.executable, "-P", "-m", "aliquot")


def shell(redirection: str, *arguments: str | Path) -> tuple[int, str]:
    """The exit code and stderr of `aliquot ARGUMENTS` with `redirection`, a shell's."""
    words = ["bash", "-c", f'"$@" {redirection}', "bash", *ALIQUOT, *map(str, arguments)]
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
