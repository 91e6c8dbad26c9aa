"""Losses of engine host on a CPU, which runs on a GPU must repeat: kept in a file, so that no GPU waits for a CPU.

python -m tests.gpu.cpu_curves      trains every case and writes cpu_curves.json
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401 (its environment, which tests of these curves have, too)
from tests.gpu.on_device import LLAMA, run

FILE = Path(__file__).with_name("cpu_curves.json")
WINDOWS = {**LLAMA, "model_type": "mistral", "sliding_window": 24}
SOFT_CAPS = {**LLAMA, "model_type": "gemma2", "head_dim": 32, "sliding_window": 24, "attn_logit_softcapping": 20.0}
SINKS = {
    **LLAMA, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
    "intermediate_size": 128, "sliding_window": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    steps: int
    model: dict[str, Any]
    precision: str


CASES = {
    "llama-fp32": Case(20, LLAMA, "fp32"),
    "llama-bf16": Case(8, LLAMA, "bf16"),
    **{
        f"{name}-{precision}": Case(6, model, precision)
        for name, model in (("windows", WINDOWS), ("soft-caps", SOFT_CAPS), ("sinks-and-experts", SINKS))
        for precision in ("fp32", "bf16")
    },
}


def trained(folder: Path, name: str) -> list[float]:
    """Train case `name` on this CPU and return the loss of each step."""
    case = CASES[name]
    return run(folder, name, case.steps, "host", model=case.model, precision=case.precision)


def expected(name: str) -> list[float]:
    """Read the losses of case `name`."""
    curves: dict[str, list[float]] = json.loads(FILE.read_text())
    return curves[name]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: trained(Path(folder), name) for name in CASES}
    FILE.write_text(json.dumps(curves, indent=1) + "\n")
