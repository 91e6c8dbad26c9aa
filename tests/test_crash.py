from __future__ import annotations

import os
import subprocess
import sys


def test_kills_at_random_moments_lose_nothing() -> None:
    """A few of what `make crash KILLS=...` does."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.crash", "--kills", "5", "--seed", "1"],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing was lost" in result.stdout
