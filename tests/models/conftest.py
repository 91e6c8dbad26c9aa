"""Transformers 4.57, installed beside the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WANTED = ("transformers==4.57.6", "huggingface_hub>=0.34,<1", "tokenizers>=0.22,<=0.23.0")


@pytest.fixture(scope="session")
def in_transformers_4(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Run a program with arguments, and return the JSON that it prints after FOUND. Skip without a package index."""
    folder = tmp_path_factory.mktemp("transformers-4")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *WANTED]
    done = subprocess.run(install, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot install transformers 4.57: {done.stderr.strip().splitlines()[-1:]}")

    def results(program: str, *arguments: str | Path) -> dict[str, Any]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr[-3000:]
        values: dict[str, Any] = json.loads(run.stdout.partition("FOUND")[2])
        return values

    return results
