from __future__ import annotations

import os

import pytest

from tests.tools import warm


@pytest.mark.long
def test_kills_at_random_moments_lose_nothing() -> None:
    """A few of what `make crash KILLS=...` does."""
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = ("-m", "tests.tools.crash", "--kills", "5", "--seed", "1")
    result = warm.run(*command, env=quiet, cwd=warm.REPOSITORY, timeout_s=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing was lost" in result.stdout


@pytest.mark.long
def test_flipped_bits_of_a_checkpoint_change_nothing() -> None:
    """A few of what `python -m tests.tools.flips` does."""
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    result = warm.run("-m", "tests.tools.flips", "--flips", "2", env=quiet, cwd=warm.REPOSITORY, timeout_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "undisturbed losses" in result.stdout
