"""A few of the kills of `make crash` and of the damages of `python -m tests.tools.damages`."""

from __future__ import annotations

import os

import pytest

from tests.tools import warm


@pytest.mark.long
@pytest.mark.parametrize("command", [("crash", "--kills", "5", "--seed", "1"), ("damages", "--damages", "5")])
def test_random_disturbances_lose_nothing(command: tuple[str, ...]) -> None:
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    program, *arguments = command
    result = warm.run("-m", f"tests.tools.{program}", *arguments, env=quiet, cwd=warm.REPOSITORY, timeout_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing was lost" in result.stdout
