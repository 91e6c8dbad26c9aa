"""Compare plans of `aliquot plan` with measured runs: memory, bytes on the wire, seconds per step.

python benchmarks/foresight.py --json foresight.json [--only NAME,...] [--steps N] [--precision fp32] [--no-wire]

The runs have 40 to 100 M parameters and 300 steps each, with two evaluations and a checkpoint, and take two hours in
all. They cover six model families, one to four ranks, packed and padded rows, activation checkpointing, exact and
compressed states, and all engines. The prediction is that of `aliquot plan`, and the result file has it before the run
begins. Speeds exclude the first step. They are meaningful only after `aliquot plan --calibrate`, on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from benchmarks import smoke
from benchmarks.report import Row, finish, target

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 10, "head_dim": 64,
    "num_attention_heads": 10, "num_key_value_heads": 5, "vocab_size": 16384, "tie_word_embeddings": True,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 14,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 24576, "sliding_window": 192,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 384, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 16384, "sliding_window": 128,
}  # fmt: skip
PHI3 = {
    "model_type": "phi3", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 10, "pad_token_id": 0,
    "num_attention_heads": 9, "num_key_value_heads": 9, "vocab_size": 16384,
}  # fmt: skip
WIDE = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 5,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 20480,
}  # fmt: skip


_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "llama3-8b-cpu.yaml"


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, Any]
    ranks: int
    engine: str
    sequence_length: int = 512
    micro: int = 2
    micro_batches: int = 1  # per rank and step
    train: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)


LINES = {"document": "line"}
OFFLOAD = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
CASES: tuple[Case, ...] = (
    Case("llama host 2", LLAMA, 2, "host"),
    Case("llama fsdp 2", LLAMA, 2, "fsdp"),
    Case(
        "llama host 1 selective",
        LLAMA,
        1,
        "host",
        micro=1,
        micro_batches=2,
        train={"gradient_checkpointing": "selective"},
    ),
    Case("llama host 4 full", LLAMA, 4, "host", micro=1, train={"gradient_checkpointing": "full"}),
    Case("qwen3 host 2 int8", QWEN3, 2, "host", train={"optimizer_states": "int8"}),
    Case("qwen3 fsdp 2 full", QWEN3, 2, "fsdp", train={"gradient_checkpointing": "full"}),
    Case("qwen3 host 2 lines", QWEN3, 2, "host", data=LINES),
    Case("qwen3 fsdp 1", QWEN3, 1, "fsdp", micro=1, micro_batches=2),
    Case("mistral host 2 window", MISTRAL, 2, "host", 1024, 1),
    Case("mistral fsdp 4 padded lines", MISTRAL, 4, "fsdp", data={**LINES, "packing": False}),
    Case("qwen2 host 2 bf16 states", QWEN2, 2, "host", train={"optimizer_states": "bf16"}),
    Case("qwen2 fsdp 2 selective", QWEN2, 2, "fsdp", train={"gradient_checkpointing": "selective"}),
    Case("gemma2 host 2", GEMMA2, 2, "host"),
    Case("phi3 host 2", PHI3, 2, "host"),
    Case("wide host 1 fp32", WIDE, 1, "host", micro=1, train={"precision": "fp32"}),
    Case("wide fsdp 2", WIDE, 2, "fsdp", 1024, 1),
    Case("llama deepspeed 2", LLAMA, 2, "deepspeed"),
    Case("qwen3 deepspeed 2 offload", QWEN3, 2, "deepspeed", shard={"deepspeed_config": OFFLOAD}),
)
TINY = {**smoke.TINY, "model_type": "llama"}
DOCUMENTATION = {"path": str(smoke.DOCUMENTS), "tokenizer_vocab_size": smoke.VOCABULARY}
CASES = smoke.choose(
    CASES,
    (Case("tiny", TINY, 2, "host", 256, data=DOCUMENTATION),),
)
REPEATS = smoke.choose(3, 1)  # of each plan


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", help="names of cases, separated by commas")
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    arguments.add_argument("--no-wire", action="store_true")
    given = smoke.parse(arguments, steps=6, precision="fp32")
    chosen = [case for case in CASES if not given.only or case.name in given.only.split(",")]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in chosen:
            prediction, file = predicted(case, Path(scratch), given.steps, given.precision)
            rows.append(prediction)
            finish("plan and measurement", rows, [], given.json)
            prediction |= measured(prediction, file)
            print(rows[-1], flush=True)
    wire_rows = [] if given.no_wire else wire()
    own = plan_itself()
    finish("plan and measurement", [*rows, *wire_rows, *own], targets(rows, wire_rows, own), given.json)


def predicted(case: Case, folder: Path, steps: int, precision: str) -> tuple[Row, Path]:
    """Return the plan of a case, and the file of its run's config."""
    directory = folder / case.name.replace(" ", "-")
    file = directory.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config(case, directory, steps, precision)))
    command = [sys.executable, "-m", "aliquot", "plan", str(file), "--json"]
    plan = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    prediction = {
        "case": case.name,
        "plan_mib": plan["peak_bytes_per_rank"] / 2**20,
        "plan_tokens_per_s": plan["tokens_per_s"],
        "rates": plan["rates"][:30],
    }
    return prediction, file


def measured(prediction: Row, file: Path) -> Row:
    """Run a case, and compare the run with its plan."""
    command = [sys.executable, "-m", "aliquot", "train", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        return {"failed": ran.stderr.strip().splitlines()[-1]}
    directory = file.with_suffix("")
    ledger = json.loads((directory / "ledger.json").read_text())
    peak = max(row["peak_bytes"] for row in ledger["rows"]) / 2**20
    tokens_per_s = json.loads((directory / "events.jsonl").read_text().splitlines()[-1])["tokens_per_s"]
    shutil.rmtree(directory)
    return {
        "peak_mib": peak,
        "memory_error": prediction["plan_mib"] / peak - 1,
        "tokens_per_s": tokens_per_s,
        "time_error": tokens_per_s / prediction["plan_tokens_per_s"] - 1,
    }


def config(case: Case, directory: Path, steps: int, precision: str) -> dict[str, Any]:
    model = {**case.model, "max_position_embeddings": 2048}
    return {
        "run": {"name": "foresight", "directory": str(directory)},
        "model": {"config": model},
        "data": {
            "path": "stdlib",
            "tokenizer_vocab_size": 8192,
            "sequence_length": case.sequence_length,
            "eval_fraction": smoke.choose(0.002, 0.1),
            **case.data,
        },
        "train": {
            "max_steps": steps,
            "eval_steps": -(-steps // 2),
            "precision": precision,
            "gradient_accumulation_steps": case.micro_batches,
            "per_device_train_batch_size": case.micro,
            **case.train,
        },
        "shard": {"engine": case.engine, **case.shard},
        "launch": {"ranks": case.ranks, "device": "cpu", "threads_per_rank": max(1, _cores() // case.ranks)},
        "observe": {"report_to": [], "console": "quiet"},
        "checkpoint": {"every": -(-steps // 2), "keep": 1, "export": False},
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def wire() -> list[Row]:
    """Count the bytes between two hosts with one rank each (benchmarks/wire.py), and compare them with the plan."""
    from tests.multinode.namespaces import INTERFACE, switched_hosts, why_not

    from aliquot.config.read_config import validate
    from aliquot.distributed.topology import RankLayout
    from aliquot.models.shaped_model import shaped_model
    from aliquot.planner.traffic import traffic
    from benchmarks import wire as counted
    from benchmarks.contestants import DEEPSPEED_JSON, LEARNING_RATE
    from benchmarks.layouts import llama_config
    from benchmarks.worlds import run_world

    if why_not() is not None:
        return [{"case": "wire", "note": why_not()}]
    rows: list[Row] = []
    values = llama_config(counted.MODEL)
    run = validate(
        {
            "model": {"config": values},
            "data": {"path": "stdlib", "sequence_length": counted.WORK.tokens},
            # The bits per weight depend on the learning rate.
            "train": {
                "gradient_accumulation_steps": counted.WORK.rows,
                "learning_rate": LEARNING_RATE,
                "precision": "bf16",
            },
            "shard": {"deepspeed_config": {"zero_optimization": DEEPSPEED_JSON["zero_optimization"]}},
        },
        {},
        "wire",
    )
    shape = shaped_model(run).shape
    for engine in counted.WHO.values():
        with switched_hosts(2) as hosts:
            environ = {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": INTERFACE}
            prefixes = [host.command() for host in hosts]
            script = str(Path(counted.__file__))
            sent = run_world(script, 2, engine, INTERFACE, environ=environ, prefixes=prefixes)
        planned = traffic(run, engine, shape, RankLayout(2, 1, 1, "cpu"), counted.WORK.rows).wire_bytes / 1e6
        found = counted.mb(sent, on_one=False)
        error = None if found is None else planned / found - 1
        rows.append({"case": f"wire {engine}, 2 hosts", "plan_mb": planned, "wire_mb": found, "wire_error": error})
        print(rows[-1], flush=True)
    return rows


def plan_itself() -> list[Row]:
    """Time plans of an 8 B model (first, another instance, catalogue), of a mixture of 30 B, and one model's import."""
    plan = ["-m", "aliquot", "plan", str(_EXAMPLE), "--nodes", "4", "--json", "--instance"]
    model = ["-c", "import transformers.models.llama.modeling_llama"]
    mixture = str(_EXAMPLE.with_name("qwen3-30b-a3b-cpu.yaml"))
    catalogue = ["plan", str(_EXAMPLE), "--tokens", "1B", "--optimize", "cost", "--global-batch", "16-256", "--json"]
    cases = {
        "plan of 8 B": [*plan, "c7i.24xlarge"],
        "again, another instance": [*plan, "m7i.24xlarge"],
        "offers for 1 B tokens": ["-m", "aliquot", *catalogue],
        "types that it fits": ["-m", "aliquot", "instances", "--fits", str(_EXAMPLE), "--json"],
        "plan of a mixture": ["-m", "aliquot", "plan", mixture, "--instance", "r7i.12xlarge", "--json"],
        "import of its model": model,
    }
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    peaks = dict.fromkeys(cases, 0)
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as cache:
            for case, command in cases.items():
                began = time.perf_counter()
                environ = {**os.environ, "ALIQUOT_CACHE": cache}
                child = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env=environ)
                _, status, used = os.wait4(child.pid, 0)
                seconds[case].append(time.perf_counter() - began)
                peaks[case] = max(peaks[case], used.ru_maxrss * 1024)
                assert os.waitstatus_to_exitcode(status) == 0
    return [
        {"case": case, "seconds": statistics.median(seconds[case]), "peak_mib": peaks[case] / 2**20} for case in cases
    ]


def targets(rows: list[Row], wire_rows: list[Row], own: list[Row]) -> list[dict[str, Any]]:
    def errors(key: str, of: list[Row]) -> list[float]:
        return [abs(row[key]) for row in of if row.get(key) is not None]

    seconds = {row["case"]: row["seconds"] for row in own}
    memory, times, traffic_ = (
        errors("memory_error", rows), errors("time_error", rows), errors("wire_error", wire_rows)
    )  # fmt: skip
    return [
        target("memory_error_median", statistics.median(memory) if memory else None, 0.05, "lower"),
        target("memory_error_max", max(memory, default=None), 0.08, "lower"),
        target("wire_error_max", max(traffic_, default=None), 0.02, "lower"),
        target("time_error_median", statistics.median(times) if times else None, 0.15, "lower"),
        target("plan_seconds", seconds["plan of 8 B"], 3.0, "lower"),
        target("plan_again_seconds", seconds["again, another instance"], 1.0, "lower"),
        target("offers_seconds", seconds["offers for 1 B tokens"], 30.0, "lower"),
        target("types_that_fit_seconds", seconds["types that it fits"], 10.0, "lower"),
        target("plan_mixture_seconds", seconds["plan of a mixture"], 5.0, "lower"),
        target("plan_gib", own[0]["peak_mib"] / 1024, 1.0, "lower"),
    ]


if __name__ == "__main__":
    main()
