"""A run of `aliquot train` as a benchmark makes many of them: what its metrics hold, and nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml


def metrics_of(seed: int, **sections: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Ends this process with what the run says where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "run": {"name": "run", "directory": f"{folder}/run", "seed": seed},
            "checkpoint": {"export": False},
            "observe": {"console": "quiet", "report_to": []},
            **sections,
        }
        file = Path(folder, "run.yaml")
        file.write_text(yaml.safe_dump(config))
        done = subprocess.run(
            [sys.executable, "-m", "aliquot", "train", str(file)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr.strip())
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
