"""Compare training on one GPU with HF Trainer, FSDP2 with flex_attention, DeepSpeed ZeRO-3, and the plan.

python benchmarks/gpu.py PART [--shape 1b] [--rows 1] --json gpu.json

PART is speed, load or plan. Each call adds its rows to the file, so that no call takes ten minutes. Contestants
alternate, each in a new process. They train on rows of 8,192 tokens, `--rows` of them per step: documents of 512 tokens
on average, then of 65, then one document per row. `--steps` steps run without waiting for the GPU, then as many with a
synchronisation after each. The ceiling is the rate of the model's own products in the same process. The whole
benchmark:

  for shape in 125m 1b 8b-width; do python benchmarks/gpu.py speed --shape $shape --json gpu.json; done
  python benchmarks/gpu.py load --shape 8b --json gpu.json
  for shape in 125m 1b; do python benchmarks/gpu.py plan --shape $shape --json gpu.json; done

--device cpu --shape tiny runs everything without a GPU, as a test; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from benchmarks import smoke
from benchmarks.contestants import Work, quiet
from benchmarks.layouts import LLAMA_1B, LLAMA_8B, LLAMA_125M, generate, llama_config
from benchmarks.report import Row, Target, finish, target
from benchmarks.worlds import run_world, tell, warm

LLAMA_8B_WIDTH = {**LLAMA_8B, "num_hidden_layers": 8}  # fits one GPU with all of its states
SHAPES = {"tiny": smoke.TINY, "125m": LLAMA_125M, "1b": LLAMA_1B, "8b-width": LLAMA_8B_WIDTH, "8b": LLAMA_8B}
TOKENS = {"tiny": 256}  # tokens per row; other shapes have 8,192
RECOMPUTED = {"8b": "full"}
OFFLOADED = ("8b",)  # 16 bytes per parameter exceed a GPU's memory
DOCUMENTS = {"packed": 512, "short": 65, "full": 1 << 30}  # mean length; "full": one document fills a row
WARM = 3  # steps that compile and choose kernels
_TIMEOUT_S = 280


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("part", choices=["speed", "load", "plan", "all"], nargs="?" if smoke.SMOKE else None)
    arguments.add_argument("--shape", choices=list(SHAPES), default="1b")
    arguments.add_argument("--documents", nargs="+", choices=list(DOCUMENTS), default=list(DOCUMENTS))
    arguments.add_argument("--rows", type=int, default=1, help="rows per step, each a micro-batch")
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--only", help="contestants, separated by semicolons")
    arguments.add_argument("--directory", type=Path, help="directory of the checkpoint that is loaded")
    given = smoke.parse(arguments, part="all", shape="tiny", device="cpu", steps=1, rounds=1)
    found: list[Row] = []
    if given.part in ("speed", "all"):
        found += speed(given)
    if given.part in ("load", "all"):
        found += load(given)
    if given.part in ("plan", "all"):
        found.append(planned(given))
    before = json.loads(given.json.read_text())["rows"] if given.json is not None and given.json.exists() else []
    keys = [_key(row) for row in found]
    rows = [row for row in before if _key(row) not in keys] + found  # a repeated part replaces its old rows
    finish(
        "training on one GPU" if given.device == "cuda" else "no GPU: the logic alone", rows, targets(rows), given.json
    )


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("part", "device", "shape", "rows", "documents", "who"))


# Optimizer steps


@dataclass(frozen=True)
class Series(Work):
    """Kinds of documents one after another, `steps` steps of each."""

    means: tuple[int, ...] = ()
    steps: int = 0

    def edges(self, seed: int) -> tuple[int, ...]:
        kind = min(seed // (self.steps * self.rows), len(self.means) - 1)
        return Work(self.tokens, self.rows, self.means[kind]).edges(seed)


def speed(given: argparse.Namespace) -> list[Row]:
    from benchmarks.gpu_contestants import CONTESTANTS

    names = given.only.split(";") if given.only else list(CONTESTANTS)
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(given.rounds):
        for name in names:
            wanted = (given.shape, given.device, str(given.steps), str(given.rows), name, *given.documents)
            taken[name] += run_world(__file__, 1, "speed", *wanted, timeout_s=_TIMEOUT_S)
            print(name, taken[name][-1], flush=True)
    return [_speed_row(given, name, kind, runs) for name, runs in taken.items() for kind in given.documents]


def _speed_row(given: argparse.Namespace, name: str, kind: str, runs: list[dict[str, Any]]) -> Row:
    row: Row = {
        "part": "speed",
        "device": given.device,
        "shape": given.shape,
        "rows": given.rows,
        "documents": kind,
        "who": name,
    }
    failed = next((run.get("failed") for run in runs if kind not in run.get("kinds", ())), None)
    if failed is not None:
        return row | {"tokens_per_s": None, "mfu": None, "note": failed}
    of_kind = [run["kinds"][kind] for run in runs]
    rates = [each["flops"] / each["step_s"] for each in of_kind]
    return row | {
        "tokens_per_s": statistics.median(runs[0]["tokens"] / each["step_s"] for each in of_kind),
        "tokens_per_s_synchronised": statistics.median(runs[0]["tokens"] / each["synchronised_s"] for each in of_kind),
        "mfu": statistics.median(rate / run["ceiling"] for rate, run in zip(rates, runs, strict=True)),
        "of_attention": of_kind[0]["attention_flops"] / of_kind[0]["flops"],
        "ceiling_tflops": statistics.median(run["ceiling"] for run in runs) / 1e12,
        "reserved_gib": max(run["reserved_bytes"] for run in runs) / 2**30,
        "gpu": runs[0]["gpu"],
    }


class _Enough(Exception):
    """Ends a contestant."""


def speed_rank(shape: str, device: str, steps: str, rows: str, name: str, *kinds: str) -> None:
    import torch

    from benchmarks.gpu_contestants import CONTESTANTS

    _join(device)
    numbers, tokens = SHAPES[shape], TOKENS.get(shape, 8192)
    measured_steps = int(steps)
    of_kind = WARM + 2 * measured_steps
    work = Series(tokens, int(rows), None, tuple(DOCUMENTS[kind] for kind in kinds), of_kind)
    ends = [time.perf_counter()]

    def between(step: int) -> None:
        # For each kind: warm steps with a wait after each, steps with one wait at the end, steps with a wait after each
        if device == "cuda" and not WARM < (step - 1) % of_kind + 1 < WARM + measured_steps:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        if step == of_kind * len(kinds):
            raise _Enough

    failed = None
    try:
        CONTESTANTS[name](
            llama_config(numbers), work, device, shape in OFFLOADED, RECOMPUTED.get(shape, "none"), between
        )
    except _Enough:
        pass
    except Exception as error:  # any error of a peer: its finished kinds count
        failed = f"{type(error).__name__}: {error}"[:200]
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # room for the products
    tell({
        "kinds": {
            kind: _timed(numbers, work, ends, i * of_kind + WARM, measured_steps)
            for i, kind in enumerate(kinds)
            if len(ends) > (i + 1) * of_kind
        },
        "failed": failed,
        "tokens": tokens * work.rows,
        "ceiling": product_rate(numbers, tokens, device),
        "reserved_bytes": reserved,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
    })  # fmt: skip
    os._exit(0)  # threads of peers would abort at exit


def _timed(numbers: dict[str, Any], work: Work, ends: list[float], first: int, steps: int) -> dict[str, float]:
    """Return seconds per step from step `first` on: `steps` without waiting, then `steps` with a wait after each."""
    synchronised = [b - a for a, b in pairwise(ends[first + steps : first + 2 * steps + 1])]
    return {
        "step_s": (ends[first + steps] - ends[first]) / steps,
        "synchronised_s": statistics.median(synchronised),
        **_flops(numbers, work, range(first, first + steps)),
    }


def product_rate(numbers: dict[str, Any], tokens: int, device: str) -> float:
    """Return FLOP/s of the model's own bf16 products, forward and backward: the median of five passes."""
    import torch

    hidden, mlp, width = numbers["hidden_size"], numbers["intermediate_size"], numbers["head_dim"]
    query, key = numbers["num_attention_heads"] * width, numbers["num_key_value_heads"] * width
    layers, head_rows = numbers["num_hidden_layers"], min(tokens, 2048)
    shapes = [  # rows, outputs, inputs, times
        (tokens, query, hidden, layers), (tokens, key, hidden, 2 * layers), (tokens, hidden, query, layers),
        (tokens, mlp, hidden, 2 * layers), (tokens, hidden, mlp, layers),
        (head_rows, numbers["vocab_size"], hidden, tokens // head_rows),
    ]  # fmt: skip
    seconds = 0.0
    flops: float = sum(6 * rows * outputs * inputs * times for rows, outputs, inputs, times in shapes)
    for rows, outputs, inputs, times in shapes:
        x, weight, gradient = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )

        def pass_s(
            x: torch.Tensor = x, weight: torch.Tensor = weight, gradient: torch.Tensor = gradient, repeats: int = 4
        ) -> float:
            began = time.perf_counter()
            for _ in range(repeats):
                x @ weight.t(), gradient @ weight, gradient.t() @ x
            if device == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - began) / repeats

        pass_s()  # the first pass chooses kernels
        seconds += times * statistics.median(pass_s() for _ in range(5))
    return flops / seconds


def _flops(numbers: dict[str, Any], work: Work, steps: range) -> dict[str, float]:
    """Return the FLOPs of a step, and those of attention."""
    from benchmarks.step import step_flops

    all_of_them = statistics.mean(step_flops(numbers, work, 0, step, ranks=1) for step in steps)
    none = step_flops(numbers, Work(work.tokens, work.rows, 1), 0, 0, ranks=1)  # documents of two tokens
    return {"flops": all_of_them, "attention_flops": all_of_them - none}


def _join(device: str) -> None:
    import torch
    import torch.distributed as dist

    from aliquot.machine.allocator import use_expandable_segments

    quiet()
    if device == "cuda":
        use_expandable_segments()  # as a rank of aliquot does, and torchtitan's start script
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


# Loading


def load(given: argparse.Namespace) -> list[Row]:
    """Time loading from the page cache onto the device. Both loaders are new processes, and alternate."""
    with tempfile.TemporaryDirectory(prefix="aliquot-gpu-", dir=given.directory) as folder:
        generate(Path(folder, "model"), SHAPES[given.shape], 5_000_000_000)
        warm(Path(folder, "model"))
        taken: dict[str, list[dict[str, Any]]] = {"transformers": [], "aliquot": []}
        for _ in range(max(2, given.rounds)):
            for who, runs in taken.items():
                runs += run_world(__file__, 1, "load", who, f"{folder}/model", given.device, timeout_s=_TIMEOUT_S)
    row = {"part": "load", "device": given.device, "shape": given.shape}
    rows: list[Row] = []
    for who, runs in taken.items():
        failed = next((run["failed"] for run in runs if "failed" in run), None)
        seconds = None if failed else statistics.median(run["seconds"] for run in runs)
        rows.append(row | {"who": who, "seconds": seconds, **({"note": failed} if failed else {})})
    return rows


def load_rank(who: str, directory: str, device: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import aliquot

    _join(device)
    if device == "cuda":
        torch.empty(1, device=device)  # creating the CUDA context is not loading
    began = time.perf_counter()
    if who == "aliquot":
        from torch.distributed.device_mesh import init_device_mesh

        config = AutoConfig.from_pretrained(directory)
        aliquot.load_sharded(config, Path(directory), init_device_mesh(device, (1,)), dtype=torch.bfloat16)
    else:
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)
    if device == "cuda":
        torch.cuda.synchronize()
    tell({"seconds": time.perf_counter() - began})
    os._exit(0)


# The plan


def planned(given: argparse.Namespace) -> Row:
    """Run `aliquot train`, and compare its planned memory and time with the measured ones."""
    tokens, on_gpu = TOKENS.get(given.shape, 8192), given.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "run": {"name": "run", "directory": f"{folder}/run"},
            "model": {"config": llama_config(SHAPES[given.shape])},
            "data": {
                "path": str(Path(__file__).parents[1] / "docs" / "*" / "*.md"),
                "tokenizer_vocab_size": 512,
                "sequence_length": tokens,
            },
            "train": {
                "max_steps": WARM + given.steps,
                "global_batch_size": 4,
                "gradient_checkpointing": RECOMPUTED.get(given.shape, "none"),
            },
            "shard": {"engine": "fsdp", "offload": "cpu" if on_gpu and given.shape in OFFLOADED else "none"},
            "checkpoint": {"export": False},
            "observe": {"console": "quiet", "report_to": []},
            "launch": {"device": given.device, "ranks": 1},
        }
        file = Path(folder, "run.yaml")
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "aliquot", "train", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * _TIMEOUT_S)
        row: Row = {"part": "plan", "device": given.device, "shape": given.shape, "who": "aliquot"}
        if done.returncode:
            return row | {"note": done.stderr.strip().splitlines()[-1][:200]}
        ledger = json.loads(Path(folder, "run", "ledger.json").read_text())
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    steady = ledger["rows"][-1]
    memory = steady["gpu"] if on_gpu else steady
    reached = [line["tokens_per_s"] for line in lines if line.get("tokens_per_s")][-1]
    return row | {
        "planned_gib": memory["planned_bytes"] / 2**30,
        "peak_gib": memory["peak_bytes"] / 2**30,
        "memory_error": abs(memory["planned_bytes"] / memory["peak_bytes"] - 1),
        "tokens_per_s": reached,
        "time_error": abs(reached / ledger["plan"]["tokens_per_s"] - 1),
        "off_by": ledger["plan"]["off_by"],
    }


# Targets, for a GPU only


def targets(rows: list[Row]) -> list[Target]:
    def one(
        part: str, shape: str, column: str, who: str = "aliquot", documents: str | None = None, of_step: int = 1
    ) -> float | None:
        wanted = (part, "cuda", shape, of_step if part == "speed" else None, documents, who)
        value: float | None = next((row.get(column) for row in rows if _key(row) == wanted), None)
        return value

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above and below else None

    def of_full(shape: str) -> float | None:
        """Return tokens/s of short documents relative to one long document, as if attention took no time."""
        full, share = (one("speed", shape, column, documents="full") for column in ("tokens_per_s", "of_attention"))
        short = one("speed", shape, "tokens_per_s", documents="short")
        return ratio(short, None if full is None or share is None else full / (1 - share))

    errors = [row for row in rows if row["part"] == "plan" and row["device"] == "cuda"]
    seconds = {who: one("load", "8b", "seconds", who) for who in ("transformers", "aliquot")}
    worst = [max((row[name] for row in errors if name in row), default=None) for name in ("memory_error", "time_error")]
    speeds = [
        one("speed", "1b", "tokens_per_s", who, documents="packed") for who in ("aliquot", "FSDP2 + flex_attention")
    ]
    of_precision = [
        one("speed", "8b-width", "tokens_per_s", who, documents="packed") for who in ("aliquot, fp8", "aliquot")
    ]
    of_placement = [
        one("speed", "8b-width", "tokens_per_s", f"aliquot, {who}", documents="packed", of_step=4)
        for who in ("copied layers", "engine host")
    ]
    return [
        target("gpu_mfu_1b", one("speed", "1b", "mfu", documents="packed"), 0.72, "higher"),
        target("gpu_mfu_1b_four_rows", one("speed", "1b", "mfu", documents="packed", of_step=4), 0.76, "higher"),
        target("gpu_mfu_8b_width", one("speed", "8b-width", "mfu", documents="packed"), 0.80, "higher"),
        target("gpu_speedup", ratio(*speeds), 1.25, "higher"),
        target("gpu_packed_of_full", of_full("1b"), 0.95, "higher"),
        target("gpu_load_8b", ratio(seconds["transformers"], seconds["aliquot"]), 1.5, "higher"),
        target("gpu_fp8", ratio(*of_precision), 1.3, "higher"),
        target("gpu_copied_layers", ratio(*of_placement), 0.9, "higher"),
        target("gpu_memory_error", worst[0], 0.05, "lower"),
        target("gpu_time_error", worst[1], 0.12, "lower"),
    ]


if __name__ == "__main__":
    if "--rank" in sys.argv:
        (speed_rank if sys.argv[2] == "speed" else load_rank)(*sys.argv[3:])
    else:
        main()
