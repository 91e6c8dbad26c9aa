"""Load, train, save, kill and resume a model that does not fit into memory.

python benchmarks/disk_tier_resume.py --json disk_tier_resume.json --text FILE --tokenizer DIRECTORY [--model 3b]
    [--folder DISK] [--weights DIRECTORY]

The benchmark writes random weights in the model's shape as safetensors and trains from them: three steps, a checkpoint,
a fourth step, then kill -9. States on disk disappear with the process. The second start repeats the fourth step, with
the memory of `--resume-memory`. Its loss and gradient norm must be the same to the last bit. `peak GiB` and `of matmul`
are those of disk_tier.py, of the killed run. 3b takes 92 GB of disk: checkpoint, states, and 6 GB of weights (which may
be elsewhere: --weights).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from benchmarks import smoke
from benchmarks.disk_tier import CASES, GIB, Case, Lowest, available_bytes, config
from benchmarks.layouts import llama_config
from benchmarks.report import Row, finish, target

SAVED, LAST = 3, 4


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--text", type=Path, required=not smoke.SMOKE, help="a plain text file")
    arguments.add_argument("--tokenizer", type=Path, required=not smoke.SMOKE, help="a directory with a tokenizer")
    arguments.add_argument("--model", default="3b", help="a case of disk_tier.py")
    arguments.add_argument("--folder", type=Path, help="on the measured disk; default: that of temporary files")
    arguments.add_argument("--weights", type=Path, help="directory of the safetensors; default: --folder")
    arguments.add_argument("--memory", type=float, help="GiB; default: the memory of the case")
    arguments.add_argument("--resume-memory", type=float, help="GiB of the second start; default: as the first")
    given = smoke.parse(arguments, text=smoke.text, tokenizer=smoke.tokenizer, model="tiny", memory=0.1)
    case = next(case for case in CASES if case.name == given.model)
    with (
        tempfile.TemporaryDirectory(prefix="aliquot-disk-tier-", dir=given.folder) as name,
        tempfile.TemporaryDirectory(prefix="aliquot-weights-", dir=given.weights or given.folder) as weights,
    ):
        write_weights(case, given.tokenizer, Path(weights))
        memory = given.memory or case.memory_gib
        killed = start(case, memory, Path(weights), given.text, Path(name), "killed")
        resumed = start(case, given.resume_memory or memory, Path(weights), given.text, Path(name), "resumed")
    rows = [killed, resumed]
    same = [row.pop("fourth step") for row in rows]
    goals = [
        target("resumed_to_the_bit", float(same[0] == same[1]), 1.0, "higher"),
        target(f"{case.name}_peak_gib", killed["peak GiB"], case.memory_gib or 0.0, "lower"),
        target(f"{case.name}_of_matmul", killed["of matmul"], 0.70, "higher"),
    ]
    finish("killed and resumed with a disk tier, 2 ranks", rows, goals, given.json)


def write_weights(case: Case, tokenizer: Path, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    values = llama_config(case.model)
    shape = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="2GB")
    AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False).save_pretrained(directory)


def start(case: Case, memory: float | None, weights: Path, text: Path, folder: Path, what: str) -> Row:
    """Start the run; `killed` kills it when it has logged its last step."""
    shard = {"engine": "host", "offload": "disk", "memory": memory}
    values: dict[str, Any] = config(case, "run", shard, text, weights, folder)
    values["model"] = {"path": str(weights)}
    # a step is logged while the next one computes, so the killed run has one more step
    values["train"] |= {"max_steps": LAST + (what == "killed"), "lr_scheduler_type": "constant"}
    values["checkpoint"] = {"every": SAVED, "keep": 1, "last": False}
    file, directory = folder / "run.yaml", folder / "run"
    file.write_text(yaml.safe_dump(values))
    before, began = available_bytes(), time.perf_counter()
    with Lowest() as lowest:
        command = [sys.executable, "-m", "aliquot", "train", str(file), "--force"]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while child.poll() is None:
            time.sleep(0.1)
            if what == "killed" and any(line["step"] == LAST for line in steps_of(directory)):
                child.kill()
    assert child.stderr is not None
    words = child.stderr.read().strip().splitlines()
    if what == "resumed" and child.returncode != 0:
        sys.exit(f"the second start ended with {child.returncode}: {words[-1] if words else 'no word'}")
    new = [line for line in steps_of(directory) if what == "killed" or line["step"] > SAVED]
    if not new or new[-1]["step"] != LAST:
        sys.exit(f"no step {LAST}: {words[-1] if words else 'no word'}")
    plan = json.loads((directory / "ledger.json").read_text())["plan"]
    settled = new[1:] or new  # the first step of a process warms up
    return {
        "run": what,
        "steps": f"{new[0]['step']} to {LAST}",
        "tokens/s": statistics.median(line["tokens_per_s"] for line in settled),
        "of matmul": 4 / 3 * statistics.median(line["mfu"] for line in settled),
        "peak GiB": (before - lowest.bytes) / GIB,
        "on disk GB": plan["scratch_bytes_per_node"] / 1e9,
        "checkpoint GB": size_of(directory / "checkpoints") / 1e9,
        "minutes": (time.perf_counter() - began) / 60,
        "fourth step": [new[-1]["loss"], new[-1]["grad_norm"]],
        "loss": new[-1]["loss"],
    }


def steps_of(directory: Path) -> list[dict[str, Any]]:
    file = directory / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last line may be incomplete
    return [line for line in map(json.loads, lines) if "loss" in line]


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
