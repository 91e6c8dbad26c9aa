"""The live view as a person sees it: a real run in a real terminal, through tmux."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import write_config

TMUX = shutil.which("tmux")


class Terminal:
    """A terminal of a given size with a server of its own."""

    def __init__(self, socket: Path, columns: int, lines: int, command: str, environment: dict[str, str]) -> None:
        self._socket = str(socket)
        settings = shlex.join(f"{name}={value}" for name, value in environment.items())
        self._tmux("new-session", "-d", "-x", str(columns), "-y", str(lines), f"export {settings}; {command}")

    def screen(self, colours: bool = False) -> str:
        return self._tmux("capture-pane", "-p", *(["-e"] if colours else []), "-S", "-")

    def cursor_is_shown(self) -> bool:
        return self._tmux("display-message", "-p", "#{cursor_flag}").strip() == "1"

    def wait_for(self, *words: str) -> str:
        until = time.monotonic() + 240
        while time.monotonic() < until:
            shown = self.screen()
            if all(word in shown for word in words):
                return shown
            time.sleep(0.05)
        raise AssertionError(f"{words} did not come:\n{shown}")

    def close(self) -> None:
        self._tmux("kill-server")

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(["tmux", "-S", self._socket, *arguments], capture_output=True, text=True, check=True)
        return done.stdout


@pytest.fixture
def open_terminals() -> Iterator[list[Terminal]]:
    if TMUX is None:
        pytest.skip("needs tmux (apt install tmux)")
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def start(opened: list[Terminal], folder: Path, columns: int, *options: str, **environment: str) -> Terminal:
    config = write_config(folder, "run", launch={"ranks": 2}, train={"max_steps": 100}, checkpoint={"every": 30})
    line = " ".join([sys.executable, "-m", "aliquot", "train", str(config), *options])
    inherited = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "ALIQUOT_CACHE") if name in os.environ}
    terminal = Terminal(
        folder / "tmux", columns, 60, f"{line}; echo exit code $?; sleep 600", {**inherited, **environment}
    )
    opened.append(terminal)
    return terminal


@pytest.mark.long
def test_the_live_view(tmp_path: Path, open_terminals: list[Terminal]) -> None:
    terminal = start(open_terminals, tmp_path, 100)
    shown = terminal.wait_for("training", "ETA", "tokens/s", "from ", "saved in")  # while it goes on
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "/100" in rows["training"] and "━" in rows["training"]
    assert any(block in rows["loss"] for block in "▁▂▃▄▅▆▇█")
    assert "tokens/s" in rows["speed"] and "learning rate" in rows["epoch"]
    assert "0: " in rows["memory"] and "1: " in rows["memory"] and "each" in rows["memory"]
    assert "step " in rows["checkpoint"]
    assert sum(line.startswith("training ") for line in shown.splitlines()) == 1  # drawn in place, not over and over
    assert "engine host" in shown and "2 ranks x" in shown  # the header stays above
    assert "\x1b[3" in terminal.screen(colours=True)
    shown = terminal.wait_for("exit code")
    assert "exit code 0" in shown and "100/100" in shown and "report" in shown
    assert terminal.cursor_is_shown()


@pytest.mark.long
def test_a_narrow_terminal_without_colours(tmp_path: Path, open_terminals: list[Terminal]) -> None:
    terminal = start(open_terminals, tmp_path, 50, "train.max_steps=60", NO_COLOR="1")
    shown = terminal.wait_for("exit code")
    assert "exit code 0" in shown and "60/60" in shown
    coloured = terminal.screen(colours=True)
    assert not any(f"\x1b[{code}" in coloured for code in ("31", "32", "33", "34", "35", "36", "38"))


@pytest.mark.long
def test_quiet_leaves_the_terminal_empty(tmp_path: Path, open_terminals: list[Terminal]) -> None:
    terminal = start(open_terminals, tmp_path, 80, "train.max_steps=1", "launch.ranks=1", "--quiet")
    assert terminal.wait_for("exit code").split("\n")[0] == "exit code 0"


@pytest.mark.long
def test_a_dumb_terminal_gets_lines(tmp_path: Path, open_terminals: list[Terminal]) -> None:
    terminal = start(open_terminals, tmp_path, 120, "train.max_steps=3", "observe.console=auto", TERM="dumb")
    shown = terminal.wait_for("exit code")
    assert "step 3/3" in shown and "━" not in shown
