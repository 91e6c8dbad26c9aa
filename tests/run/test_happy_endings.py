"""The example of preference training in miniature: a model learns from pairs of its own ends of stories."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import curve, trained

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_a_model_learns_from_pairs_of_its_own_ends(shared: Path, tmp_path: Path) -> None:
    model, stories = shared / "models" / "stories15M", shared / "data" / "tinystories-train-head.txt"

    def example(what: str, directory: Path) -> str:
        script = str(ROOT / "examples" / "happy_endings.py")
        command = [sys.executable, script, what, str(directory), str(stories), "--prompts", "12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    pairs = example("pairs", model)
    records = [json.loads(line) for line in pairs.splitlines()]
    assert records and all(record["chosen"] != record["rejected"] for record in records)
    (tmp_path / "pairs.jsonl").write_text(pairs)
    trained(
        ROOT / "examples" / "happy_endings.yaml", f"model.path={model}", f"data.path={tmp_path}/pairs.jsonl",
        f"run.directory={tmp_path}/run", "train.num_train_epochs=3", "train.learning_rate=5e-5",
        "train.global_batch_size=4", "launch.ranks=1",
    )  # fmt: skip
    losses = list(curve(tmp_path / "run").values())
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # the model still equals its reference
    assert losses[-1] < 0.6
    assert re.fullmatch(r"\d+\.\d% of 48 ends are happy\n", example("rate", tmp_path / "run" / "export"))
