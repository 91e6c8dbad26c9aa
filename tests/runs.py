"""A small run on a small text, as a person would start it: a config file and the `aliquot` command."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import aliquot
from aliquot.core.errors import UserError
from tests.tools import warm

TEXT = "the a sharded rank gathers every weight and gradient of one layer then drops it again while another waits"
WORDS = TEXT.split(" ")


def write_text(folder: Path, documents: int = 60) -> Path:
    """A file of lines of unequal length; a line is a document."""
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(1, 40))) for _ in range(documents)]
    path = folder / "text.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


# Before a command: tests that run in the background ignore SIGINT, and so would what they start.
HEARS_CTRL_C = (
    sys.executable, "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])",
)  # fmt: skip
# On other_text() the loss soon rises.
OVERFITTING = {"learning_rate": 3e-2, "lr_scheduler_type": "constant"}


def other_text(folder: Path) -> Path:
    """Lines of few of the same words, to evaluate on."""
    path = folder / "other.txt"
    path.write_text("\n".join(f"weight {n} waits for {n * n} while every layer drops {n}" for n in range(12)))
    return path


def write_config(folder: Path, name: str = "run", **sections: dict[str, Any]) -> Path:
    """runs of a Llama of a few thousand parameters; `sections` are merged over the defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, dict[str, Any]] = {
        "run": {"name": name, "directory": str(folder / name), "seed": 5},
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 50,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            }
        },
        "data": {
            "path": str(write_text(folder)),
            "document": "line",
            "tokenizer_vocab_size": 300,
            "sequence_length": 32,
            "eval_fraction": 0.1,
            "num_proc": 1,
        },
        "train": {
            "max_steps": 6,
            "global_batch_size": 5,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "precision": "fp32",
            "compile": "none",  # some tests stop a run of many steps, which `auto` would compile first
        },
        "launch": {"ranks": 1, "device": "cpu"},
        "observe": {"report_to": []},
    }
    for section, values in sections.items():
        config.setdefault(section, {}).update(values)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def command(
    *arguments: str | Path, environment: dict[str, str] | None = None, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end; `cold`: in an interpreter of its own, else in a warm process."""
    return warm.run("-m", "aliquot", *arguments, cold=cold, env={**os.environ, **(environment or {})})


def trained(*arguments: str | Path, cold: bool = False) -> str:
    """`aliquot train` that must succeed; what it printed."""
    result = command("train", *arguments, cold=cold)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def free_port() -> int:
    """A port of loopback that nobody has taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until `reached`, which must be before the process ends."""
    while not reached():
        assert process.poll() is None
        time.sleep(0.005)


def wait_until(reached: Callable[[], bool], limit_s: float = 150) -> None:
    end = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def has_steps(directory: Path, steps: int) -> bool:
    return (directory / "metrics.jsonl").exists() and len(curve(directory)) >= steps


def killed_when(reached: Callable[[], bool], *arguments: str | Path) -> None:
    """`aliquot train` whose launcher and ranks get SIGKILL as soon as `reached`, which must be before its end."""
    process = warm.popen("-m", "aliquot", "train", *arguments, start_new_session=True)
    wait_for(reached, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def refused(*arguments: str | Path) -> str:
    """`aliquot train` that must end with one line and exit code 2; that line."""
    result = command("train", *arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    return lines[0]


def refusal(config: Path, *overrides: str) -> str:
    """The line of bad input, raised in this process because starting another takes seconds."""
    with pytest.raises(UserError) as caught:
        aliquot.train(aliquot.read_config(config, ["launch.ranks=1", *overrides]))
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


def curve(directory: Path, key: str = "loss") -> dict[int, float]:
    """step -> value out of metrics.jsonl."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}
