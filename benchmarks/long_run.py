"""Measure whether memory and speed of a long run stay constant, and compare them with the plan.

python benchmarks/long_run.py --json long_run.json --text FILE ... [--only NAME,...] [--scale 0.1] [--precision fp32]

Models of 5, 26, 125 and 500 M parameters train for 2,000, 2,000, 200 and 60 steps on two ranks. Each text is divided
into lines, paragraphs and stretches of about 3,000 tokens, so that no two packings are alike. A run has four
evaluations and four checkpoints, and generates text at the end. `grown` is the median of the largest rank's memory in
the last tenth of the steps, minus the median from step 20 to 40. A mean would not do, because one step after a release
of memory has far less. --scale shortens runs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from benchmarks import smoke
from benchmarks.layouts import LLAMA_125M, LLAMA_500M, llama_config
from benchmarks.report import Row, finish, target

RANKS = 2
MIB = 1 << 20
SETTLED = smoke.choose(slice(19, 40), slice(3, 8))  # steps 20 to 40
LONG_CHARACTERS = 12_000
LLAMA_26M = {
    **LLAMA_125M, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 6400,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip


LLAMA_5M = {
    **LLAMA_26M, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, Any]
    steps: int
    sequence_length: int
    micro: int
    mfu: float | None  # the goal


CASES: tuple[Case, ...] = (
    Case("5m", LLAMA_5M, 2000, 256, 1, None),  # a quarter of an hour even without bf16 instructions
    Case("26m", LLAMA_26M, 2000, 512, 2, 0.65),
    Case("125m", LLAMA_125M, 200, 2048, 1, 0.85),
    Case("500m", LLAMA_500M, 60, 2048, 1, 0.92),
)
CASES = smoke.choose(CASES, (Case("tiny", smoke.TINY, 10, 256, 1, None),))
LEAST_STEPS = smoke.choose(60, 10)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--text", type=Path, nargs="+", required=not smoke.SMOKE, help="plain text files")
    arguments.add_argument("--only", help="names of cases, separated by commas")
    arguments.add_argument("--scale", type=float, default=1.0)
    arguments.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    given = smoke.parse(arguments, text=lambda: [smoke.text()], precision="fp32")
    chosen = [case for case in CASES if not given.only or case.name in given.only.split(",")]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="aliquot-long-run-") as folder:
        data = Path(folder) / "documents.jsonl"
        write_documents(given.text, data)
        for case in chosen:
            steps = max(LEAST_STEPS, round(case.steps * given.scale))
            rows.append(measured(case, steps, given.precision, data, Path(folder)))
            print(rows[-1], flush=True)
    ran = [row for row in rows if "failed" not in row]
    grown = max((row["grown MiB"] for row in ran), default=None) if len(ran) == len(rows) else None
    goals = [target("growth_mib", grown, 16, "lower")]
    mfu = {row["run"]: row["MFU"] for row in ran}
    for case in chosen:
        if case.mfu is not None:
            goals.append(target(f"mfu_{case.name}", mfu.get(case.name), case.mfu, "higher"))
    finish(f"long runs, {given.precision}, {RANKS} ranks", rows, goals, given.json)


def write_documents(texts: list[Path], file: Path) -> None:
    """Write a third of all characters as each kind of document, in a fixed random order."""
    documents: list[str] = []
    for text in texts:
        content = text.read_text()
        third = len(content) // 3
        documents += content[:third].split("\n")
        documents += content[third : 2 * third].split("\n\n")
        documents += [content[at : at + LONG_CHARACTERS] for at in range(2 * third, len(content), LONG_CHARACTERS)]
    documents = [document for document in documents if document.strip()]
    random.Random(0).shuffle(documents)
    with file.open("w") as lines:
        for document in documents:
            lines.write(json.dumps({"text": document}) + "\n")


def measured(case: Case, steps: int, precision: str, data: Path, folder: Path) -> Row:
    directory, file = folder / case.name, folder / f"{case.name}.yaml"
    file.write_text(yaml.safe_dump(config(case, steps, precision, data, directory)))
    command = [sys.executable, "-m", "aliquot", "train", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        return {"run": case.name, "steps": steps, "failed": (ran.stderr.strip().splitlines() or ["no word"])[-1][:200]}
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    ended = json.loads((directory / "events.jsonl").read_text().splitlines()[-1])
    ledger = json.loads((directory / "ledger.json").read_text())
    shutil.rmtree(directory)
    tenth, plan = max(1, steps // 10), ledger["plan"]
    memory = [max(line["memory_bytes"]) / MIB for line in logged]
    seconds = [sum(line[f"{part}_s"] or 0.0 for part in PARTS) for line in logged]
    peak = max(row["peak_bytes"] for row in ledger["rows"]) / MIB
    return {
        "run": case.name,
        "steps": steps,
        "MiB at 20-40": statistics.median(memory[SETTLED]),
        "in the last tenth": statistics.median(memory[-tenth:]),
        "grown MiB": statistics.median(memory[-tenth:]) - statistics.median(memory[SETTLED]),
        "s a step, 2nd tenth": statistics.median(seconds[tenth : 2 * tenth]),
        "last tenth": statistics.median(seconds[-tenth:]),
        "tokens/s": ended["tokens_per_s"],
        "planned": plan["tokens_per_s"],
        "time error": plan["tokens_per_s"] / ended["tokens_per_s"] - 1,
        "memory error": plan["peak_bytes_per_rank"] / MIB / peak - 1,
        "MFU": ended["mfu"],
    }


PARTS = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint", "wait")


def config(case: Case, steps: int, precision: str, data: Path, directory: Path) -> dict[str, Any]:
    model = {**llama_config(case.model), "max_position_embeddings": 4096}
    return {
        "run": {"name": case.name, "directory": str(directory)},
        "model": {"config": model},
        "data": {
            "path": str(data),
            "tokenizer_vocab_size": case.model["vocab_size"],
            "sequence_length": case.sequence_length,
            "eval_fraction": 0.01,
        },
        "train": {
            "max_steps": steps,
            "eval_steps": steps // 4,
            "per_device_train_batch_size": case.micro,
            "gradient_accumulation_steps": 2,
            "learning_rate": 3e-4,
            "precision": precision,
        },
        "checkpoint": {"every": steps // 4, "keep": 1},
        "launch": {"ranks": RANKS, "device": "cpu"},
        "observe": {"report_to": [], "console": "quiet", "sample_prompt": "The"},
    }


if __name__ == "__main__":
    main()
