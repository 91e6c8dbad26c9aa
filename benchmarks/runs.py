"""Run `aliquot train` for a benchmark, return its metrics, and leave no files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def metrics_of(
    seed: int, *, nodes: Sequence[Sequence[str]] = ((),), environ: Mapping[str, str] | None = None, **sections: Any
) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; exit with the run's message if the run fails.

    `nodes` has a command prefix for each node of the run, for example the command that enters a network namespace.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "run": {"name": "run", "directory": f"{folder}/run", "seed": seed},
            "checkpoint": {"export": False},
            "observe": {"console": "quiet", "report_to": []},
            **sections,
        }
        file = Path(folder, "run.yaml")
        file.write_text(yaml.safe_dump(config))
        train = [sys.executable, "-m", "aliquot", "train", str(file)]
        started = [
            subprocess.Popen(
                [*prefix, *train, *([f"launch.node_rank={n}"] if len(nodes) > 1 else [])],
                env={**os.environ, **(environ or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for n, prefix in enumerate(nodes)
        ]  # fmt: skip
        said = [process.communicate()[1].strip() for process in started]
        if any(process.returncode for process in started):
            raise SystemExit("\n".join(said))
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
