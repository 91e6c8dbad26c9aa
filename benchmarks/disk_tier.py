"""Measure models that do not fit into memory: speed, memory, and the accuracy of the plan.

python benchmarks/disk_tier.py --json disk_tier.json --text FILE --tokenizer DIRECTORY [--only 150m,...] [--folder DISK]

Each model trains a few steps on two ranks: in memory if it fits, with its states on disk, and with all of it on disk.
`peak GiB` is of the whole machine: available memory before the run minus the least available memory during the run.
`of matmul` is FLOP/s with recomputation, relative to plain products in the same run. `update_of_disk` is bytes per
second of an update pass, relative to the same disk requests without arithmetic.

DeepSpeed ZeRO-3 with weights and states on NVMe trains 500m and 150m as a peer, through HF Trainer.

8b has the shape of Llama-3-8B, int8 moments and 20 GiB. 3b has the shape of Llama-3.2-3B, exact states and 12 GiB. 1b
has the shape of Llama-3.2-1B, exact states and 8 GiB. 500m and 150m compare memory with both disk modes. 1b and 150m
compute in fp32, for machines without bf16 instructions; 150m takes minutes. 8b needs 70 GB of disk with its export.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from benchmarks import smoke
from benchmarks.contestants import deepspeed_seconds, quiet
from benchmarks.layouts import LLAMA_125M, LLAMA_500M, llama_config
from benchmarks.report import Row, finish, target
from benchmarks.worlds import run_world, tell

RANKS = 2
GIB = 1 << 30
LLAMA_150M = {**LLAMA_125M, "num_hidden_layers": 16}
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_3B = {
    "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, Any]
    precision: str
    states: str
    sequence_length: int
    micro: int
    memory_gib: float | None  # None: three runs (in memory, states on disk, all on disk)


CASES: tuple[Case, ...] = (
    Case("150m", LLAMA_150M, "fp32", "fp32", 1024, 2, None),
    Case("500m", LLAMA_500M, "bf16", "fp32", 2048, 2, None),
    Case("1b", LLAMA_1B, "fp32", "fp32", 1024, 1, 8.0),
    Case("3b", LLAMA_3B, "bf16", "fp32", 1024, 4, 12.0),
    Case("8b", LLAMA_8B, "bf16", "int8", 1024, 4, 20.0),
)
CASES = smoke.choose(CASES, (Case("tiny", smoke.TINY, "fp32", "fp32", 256, 1, None),))
STEPS = 4
LIMITED_STEPS = 3


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--text", type=Path, required=not smoke.SMOKE, help="a plain text file")
    arguments.add_argument("--tokenizer", type=Path, required=not smoke.SMOKE, help="a directory with a tokenizer")
    arguments.add_argument("--only", help="names of cases, separated by commas")
    arguments.add_argument("--folder", type=Path, help="on the measured disk; default: that of temporary files")
    given = smoke.parse(arguments, text=smoke.text, tokenizer=smoke.tokenizer)
    chosen = [case for case in CASES if not given.only or case.name in given.only.split(",")]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="aliquot-disk-tier-", dir=given.folder) as name:
        folder = Path(name)
        for case in chosen:
            for place, changes in places(case, given.text, given.tokenizer, folder):
                rows.append(measured(case, place, changes, given.text, given.tokenizer, folder))
                print(rows[-1], flush=True)
            if case.memory_gib is None:
                rows.append(deepspeed_on_nvme(case, folder))
                print(rows[-1], flush=True)
        ratio = update_of_disk(folder, smoke.choose(100_000_000, 1_000_000))
    finish(f"disk tier, {RANKS} ranks", rows, goals(rows, ratio), given.json)


def goals(rows: list[Row], ratio: float) -> list[dict[str, Any]]:
    ran = {(row["model"], row["place"]): row for row in rows if "tokens/s" in row}

    def of_memory(model: str, place: str) -> float | None:
        both = [ran.get((model, where)) for where in (place, "memory")]
        return None if None in both else both[0]["tokens/s"] / both[1]["tokens/s"]  # type: ignore[index]

    found = [target("update_of_disk", ratio, 0.85, "higher")]
    for model, limit, reached in (("8b", 20, 0.75), ("3b", 12, 0.70), ("1b", 8, 0.70)):
        row = ran.get((model, "limited"), {})
        found.append(target(f"{model}_peak_gib", row.get("peak GiB"), limit, "lower"))
        found.append(target(f"{model}_of_matmul", row.get("of matmul"), reached, "higher"))
    for model in ("500m", "150m"):
        found.append(target(f"tier_of_memory_{model}", of_memory(model, "states on disk"), 0.93, "higher"))
        found.append(target(f"weights_on_disk_{model}", of_memory(model, "all on disk"), 0.80, "higher"))
    on_disk = [row for (_, place), row in ran.items() if place != "memory" and "memory error" in row]
    for name, column, goal in (("memory", "memory error", 0.05), ("time", "time error", 0.10)):
        worst = max((abs(row[column]) for row in on_disk), default=None)
        found.append(target(f"tier_{name}_error", worst, goal, "lower"))
    return found


def places(case: Case, text: Path, tokenizer: Path, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return each place of weights and states, with its settings of section `shard`."""
    if case.memory_gib is not None:
        return [("limited", {"offload": "disk", "memory": case.memory_gib})]
    from aliquot.config.read_config import validate
    from aliquot.planner.planner import plan

    low, high = 0.5, 64.0  # GiB: the least memory that keeps all layers in memory puts all states on disk
    while high - low > 0.01:
        middle = (low + high) / 2
        shard = {"engine": "host", "offload": "disk", "memory": middle}
        values = config(case, "plan", shard, text, tokenizer, folder)
        if plan(validate(values, {}, "benchmark")).on_disk.layers:
            low = middle
        else:
            high = middle
    return [
        ("memory", {}),
        ("states on disk", {"offload": "disk", "memory": high}),
        ("all on disk", {"offload": "disk", "memory": 0.1}),
    ]


def measured(case: Case, place: str, shard: dict[str, Any], text: Path, tokenizer: Path, folder: Path) -> Row:
    name = f"{case.name}-{place.replace(' ', '-')}"
    file, directory = folder / f"{name}.yaml", folder / name
    file.write_text(yaml.safe_dump(config(case, name, {"engine": "host", **shard}, text, tokenizer, folder)))
    before = available_bytes()
    with Lowest() as lowest:
        command = [sys.executable, "-m", "aliquot", "train", str(file), "--force"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    row: Row = {"model": case.name, "place": place}
    if ran.returncode != 0:
        return {**row, "failed": (ran.stderr.strip().splitlines() or ["no word"])[-1][:200]}
    logged = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "loss" in line][1:]  # the first step warms up
    ledger = json.loads((directory / "ledger.json").read_text())
    shutil.rmtree(directory)
    plan = ledger["plan"]
    peak = max(each["peak_bytes"] for each in ledger["rows"])
    tokens_per_s = statistics.median(line["tokens_per_s"] for line in steps)
    moved = steps[-1]["disk_read_bytes"] + steps[-1]["disk_written_bytes"]
    moved -= steps[0]["disk_read_bytes"] + steps[0]["disk_written_bytes"]
    return {
        **row,
        "tokens/s": tokens_per_s,
        "of matmul": 4 / 3 * statistics.median(line["mfu"] for line in steps),
        "peak GiB": (before - lowest.bytes) / GIB,
        "rank GiB": peak / GIB,
        "on disk GB": plan["scratch_bytes_per_node"] / 1e9,
        "moved GB a step": moved / (len(steps) - 1) / 1e9,
        "memory error": plan["peak_bytes_per_rank"] / peak - 1,
        "time error": plan["tokens_per_s"] / tokens_per_s - 1,
    }


def deepspeed_on_nvme(case: Case, folder: Path) -> Row:
    row: Row = {"model": case.name, "place": "DeepSpeed, all on disk"}
    if not _deepspeed_reads_disks():
        return {**row, "note": "DeepSpeed's async_io is not available here: it needs the library libaio"}
    directory = folder / "deepspeed"
    directory.mkdir()
    before = available_bytes()
    with Lowest() as lowest:
        found = run_world(__file__, RANKS, case.name, str(directory), timeout_s=3600)
    shutil.rmtree(directory)
    if "failed" in found[0]:
        return {**row, **found[0]}
    tokens = RANKS * case.micro * case.sequence_length
    return {
        **row,
        "tokens/s": tokens / found[0]["step_s"],
        "peak GiB": (before - lowest.bytes) / GIB,
    }


def _deepspeed_reads_disks() -> bool:
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder
    except ModuleNotFoundError:
        return False
    return bool(AsyncIOBuilder().is_compatible(verbose=False))


def rank() -> None:
    """Measure the seconds of DeepSpeed's steps in one rank."""
    name, directory = sys.argv[2:4]
    case = next(case for case in CASES if case.name == name)
    quiet()
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ends: list[float] = []
    length = case.sequence_length
    deepspeed_seconds(
        llama_config(case.model), lambda _: (length, length), 1, STEPS, lambda _: ends.append(time.perf_counter()),
        case.precision, case.micro, Path(directory),
    )  # fmt: skip
    tell({"step_s": statistics.median(after - before for before, after in pairwise(ends))})


def config(case: Case, name: str, shard: dict[str, Any], text: Path, tokenizer: Path, folder: Path) -> dict[str, Any]:
    return {
        "run": {"name": name, "directory": str(folder / name)},
        "model": {"config": llama_config(case.model)},
        "data": {"path": str(text), "tokenizer": str(tokenizer), "sequence_length": case.sequence_length},
        "train": {
            "max_steps": STEPS if case.memory_gib is None else LIMITED_STEPS,
            "per_device_train_batch_size": case.micro,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": "full",
            "optimizer_states": case.states,
            "learning_rate": 1e-4,
            "precision": case.precision,
        },
        "shard": shard,
        # The disk of a limited run may have no room for a checkpoint as well.
        "checkpoint": {"every": 0, "last": case.memory_gib is None},
        "launch": {"ranks": RANKS, "device": "cpu"},
        "observe": {"report_to": [], "console": "quiet"},
    }


class Lowest:
    """The least available memory of the machine while this context is open."""

    def __enter__(self) -> Lowest:
        self.bytes = available_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            self.bytes = min(self.bytes, available_bytes())


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def update_of_disk(folder: Path, numel: int, repeats: int = 3) -> float:
    """Return the speed of an update of one weight with exact states and gradient on disk, relative to the disk."""
    import torch

    from aliquot.distributed.collectives.shared_memory import SharedMemory
    from aliquot.engines.engine_plan import OnDisk
    from aliquot.engines.host.gradient_sums import GradientSums
    from aliquot.engines.host.host_disk import HostDisk
    from aliquot.engines.host.host_states import HostStates
    from aliquot.engines.host.shared_weights import Counterparts, Weight, WeightShard
    from aliquot.offload.scratch_file import Move, ScratchStream
    from aliquot.optim.adamw import BlockedAdamW

    torch.set_num_threads(1)
    shape = (numel // 1000, 1000)
    weights, everything = [Weight("weight", shape, ((0, numel),), True, torch.bfloat16)], ((shape, 1),)
    on_disk = OnDisk(everything, everything)
    alone = Counterparts([0], 0)
    disk = HostDisk(folder, on_disk, weights, -1, alone, "fp32")
    sums = GradientSums(weights, alone, torch.float32, "fp32", disk)
    sums.zero(0, 0)
    sums.flush()
    memory = SharedMemory.create(2 * numel)
    shards = [WeightShard(weights[0], (memory,), 0, numel, 0)]
    states = HostStates(shards, sums, "fp32", disk, frozenset(), compiled=False)
    optimizer = BlockedAdamW((0.9, 0.999), 1e-8, 0.1)
    moves = [
        Move(window.record.offset, window.record.size_bytes, window.record.fields["weight"][0])
        for window in disk.states[0]
    ]

    def seconds(work: Any) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def plain() -> None:
        for _ in ScratchStream(disk.scratch, moves):
            pass

    def updated() -> None:
        optimizer.step((shard for _, shard in states.to_update([0])), 1e-3, 1.0, 1.0)

    plain()  # write first, because a hole in a file is not read from disk
    pairs = [(seconds(plain), seconds(updated)) for _ in range(repeats)]
    disk.scratch.close()
    return statistics.median(alone / updated for alone, updated in pairs)


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
