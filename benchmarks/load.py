"""Measure loading a Hugging Face checkpoint into a sharded model, next to peers and a plain parallel read.

python benchmarks/load.py --json load.json

A peer that is not installed gets a row with a note. The benchmark needs 20 GB of disk (3 GB with --skip-8b) in
--directory, and removes its files at the end. Cold rows need root. Every run starts new processes; methods alternate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.layouts import LLAMA_1B, LLAMA_8B, generate
from benchmarks.report import Row, finish, target
from benchmarks.worlds import Measured, cold, run_world, tell, warm, watched

METHODS = {
    "plain": "plain parallel read",
    "aliquot": "aliquot.load_sharded",
    "deepspeed": "transformers + DeepSpeed zero.Init",
    "zero3": "aliquot.load_zero3",
    "dcp": "torch DCP HuggingFaceStorageReader",
    "transformers": "transformers DistributedConfig(fsdp_size)",
}
PLAIN_THREADS = 4
PLAIN_BYTES = 8 << 20
EIGHT_B_NEEDS_BYTES = smoke.choose(18_500_000_000, 0)  # 4 x 4.02 GB of weights, and four interpreters
EIGHT_B_DISK_BYTES = smoke.choose(17_000_000_000, 0)
SMALL, LARGE = smoke.choose((LLAMA_1B, LLAMA_8B), (smoke.TINY, smoke.TINY))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--directory", type=Path, help="directory of checkpoints; default: a temporary directory")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--skip-8b", action="store_true")
    arguments.add_argument("--methods", help=f"some of {', '.join(METHODS)}; default: all")
    given = smoke.parse(arguments, repeats=1)
    for method in set(METHODS) - set(given.methods.split(",") if given.methods else METHODS):
        del METHODS[method]
    folder = Path(tempfile.mkdtemp(prefix="aliquot-load-", dir=given.directory))
    try:
        rows, found = small_model(generate(folder / "1b", SMALL, 500_000_000), given.repeats)
        eight = None
        if not given.skip_8b:
            shutil.rmtree(folder / "1b")
            row, eight = large_model(folder / "8b")
            rows.append(row)
    finally:
        shutil.rmtree(folder)
    targets = [
        target("load_speedup_warm", found["load_speedup_warm"], 10, "higher"),
        target("load_of_plain_read_warm", found["load_of_plain_read_warm"], 0.9, "higher"),
        target("load_of_plain_read_cold", found["load_of_plain_read_cold"], 0.9, "higher"),
        target("load_excess_mib", found["load_excess_mib"], 64, "lower"),
        target("load_bytes_ratio", found["load_bytes_ratio"], 1.001, "lower"),
        target("load_8b_private_gb", eight, 4.5, "lower"),
        target("zero3_load_speedup", found["zero3_load_speedup"], 8, "higher"),
        target("zero3_excess_mib", found["zero3_excess_mib"], 64, "lower"),
    ]
    finish("loading", rows, targets, given.json)


def small_model(directory: Path, repeats: int) -> tuple[list[Row], dict[str, float | None]]:
    """Load 1.24 B parameters on 2 ranks in bf16; return rows, and values of the targets."""
    taken: dict[tuple[str, str], list[list[Measured]]] = {}
    for _ in range(repeats):
        for state in ("warm", "cold"):
            for method in METHODS:
                if state == "warm":
                    warm(directory)
                elif (why := cold()) is not None:
                    taken.setdefault((method, state), []).append([{"failed": why}])
                    continue
                ranks = run_world(__file__, 2, method, str(directory))
                taken.setdefault((method, state), []).append(ranks)
                print(state, method, [ranks[0].get(key) for key in ("seconds", "load_s", "failed")], flush=True)
    rows = [_row(method, state, runs) for (method, state), runs in taken.items()]
    return rows, _values(rows)


def _row(method: str, state: str, runs: list[list[Measured]]) -> Row:
    failed = next((ranks[0]["failed"] for ranks in runs if "failed" in ranks[0]), None)
    row: Row = {"method": METHODS[method], "cache": state, "model": "1.24 B, 2 ranks, bf16"}
    if failed is not None:
        return row | {"note": failed}
    stored_bytes = runs[0][0]["stored_bytes"]
    load_s = statistics.median(max(rank["load_s"] for rank in ranks) for ranks in runs)
    worst = [rank for ranks in runs for rank in ranks]
    return row | {
        "seconds": statistics.median(max(rank["seconds"] for rank in ranks) for ranks in runs),
        "GB/s": stored_bytes / load_s / 1e9,
        "peak private GB": max(rank["peak_private_bytes"] for rank in worst) / 1e9,
        "over own part MiB": max(rank["peak_over_start_bytes"] - rank["own_bytes"] for rank in worst) / 2**20,
        "read / stored": max(sum(rank["asked_bytes"] for rank in ranks) for ranks in runs) / stored_bytes,
        "runs": len(runs),
        "note": "",
    }


def _values(rows: list[Row]) -> dict[str, float | None]:
    by = {(row["method"], row["cache"]): row for row in rows if "seconds" in row}

    def ratio(column: str, above: str, below: str, state: str) -> float | None:
        one, other = by.get((METHODS.get(above), state)), by.get((METHODS.get(below), state))
        return one[column] / other[column] if one and other else None

    own = [row for row in rows if row["method"] == METHODS.get("aliquot") and "seconds" in row]
    zero3 = [row for row in rows if row["method"] == METHODS.get("zero3") and "seconds" in row]
    return {
        "load_speedup_warm": ratio("seconds", "deepspeed", "aliquot", "warm"),
        "load_of_plain_read_warm": ratio("GB/s", "aliquot", "plain", "warm"),
        "load_of_plain_read_cold": ratio("GB/s", "aliquot", "plain", "cold"),
        "load_excess_mib": max((row["over own part MiB"] for row in own), default=None),
        "zero3_load_speedup": ratio("seconds", "deepspeed", "zero3", "warm"),
        "zero3_excess_mib": max((row["over own part MiB"] for row in zero3), default=None),
        "load_bytes_ratio": max((row["read / stored"] for row in own), default=None),
    }


def large_model(directory: Path) -> tuple[Row, float | None]:
    """Load Llama-3-8B on 4 ranks; return the row, and GB of private memory of the largest rank."""
    import psutil

    row: Row = {"method": METHODS["aliquot"], "cache": "cold", "model": "8.03 B, 4 ranks, bf16"}
    disk_bytes, memory_bytes = shutil.disk_usage(directory.parent).free, psutil.virtual_memory().available
    if disk_bytes < EIGHT_B_DISK_BYTES or memory_bytes < EIGHT_B_NEEDS_BYTES:
        note = f"needs 17 GB of disk and 18.5 of memory: {disk_bytes / 1e9:.1f} and {memory_bytes / 1e9:.1f} are free"
        return row | {"note": note}, None
    generate(directory, LARGE)
    cold()
    ranks = run_world(__file__, 4, "aliquot", str(directory))
    if "failed" in ranks[0]:
        return row | {"note": ranks[0]["failed"]}, None
    stored_bytes = ranks[0]["stored_bytes"]
    row |= {
        "seconds": max(rank["seconds"] for rank in ranks),
        "GB/s": stored_bytes / max(rank["load_s"] for rank in ranks) / 1e9,
        "peak private GB": max(rank["peak_private_bytes"] for rank in ranks) / 1e9,
        "over own part MiB": max(rank["peak_over_start_bytes"] - rank["own_bytes"] for rank in ranks) / 2**20,
        "read / stored": sum(rank["asked_bytes"] for rank in ranks) / stored_bytes,
        "runs": 1,
        "note": "private: the whole process, interpreter and libraries included",
    }
    return row, row["peak private GB"]


def rank(method: str, directory: Path) -> None:
    """Measure loading in one rank, after imports and the start of the process group."""
    import torch.distributed as dist
    import transformers

    transformers.utils.logging.disable_progress_bar()
    files = sorted(directory.glob("*.safetensors"))
    stored_bytes = sum(file.stat().st_size for file in files)
    if method in ("deepspeed", "zero3"):
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    load = {
        "plain": _plain,
        "aliquot": _aliquot,
        "deepspeed": _deepspeed,
        "zero3": _zero3,
        "dcp": _dcp,
        "transformers": _transformers,
    }[method]
    _import_all()
    prepared = PREPARE[method]() if method in PREPARE else None
    measured: Measured = {"stored_bytes": stored_bytes}
    with watched(measured, dist.barrier):
        held = load(directory, prepared, measured)
        touch(held)
    measured.setdefault("load_s", measured["seconds"])
    measured["own_bytes"] = sum(shard.numel() * shard.element_size() for shard in own_shards(held))
    tell(measured)
    os._exit(0)  # libraries differ in how they end a process


def _import_all() -> None:
    """Import the modules of a model, which transformers otherwise does when it first builds the model."""
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    from transformers import AutoModelForCausalLM, LlamaConfig

    import aliquot.loaders.sharded  # noqa: F401

    tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(tiny)


def own_shards(held: Any) -> list[Any]:
    """Return this rank's memory of every weight."""
    import torch

    if isinstance(held, torch.Tensor):
        return [held]
    shards = []
    for weight in held.parameters():
        shard = getattr(weight, "ds_tensor", None)  # DeepSpeed's
        if shard is None:
            shard = weight.to_local() if hasattr(weight, "to_local") else weight
        shards.append(shard.detach())
    return shards


def touch(held: Any) -> None:
    """Write to every page, as training will. A peer that only maps the files has loaded nothing before."""
    for shard in own_shards(held):
        shard.view(-1)[:: 4096 // shard.element_size()].mul_(1)


def _plain(directory: Path, prepared: Any, measured: Measured) -> Any:
    """Read this rank's share of every file into new memory: the limit of the system."""
    import torch

    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    files = sorted(directory.glob("*.safetensors"))
    spans = [(file, index * size // count, (index + 1) * size // count) for file in files if (size := _size(file))]
    buffer = torch.empty(sum(stop - start for _, start, stop in spans), dtype=torch.uint8)
    memory, place = buffer.numpy().data, 0
    with ThreadPoolExecutor(PLAIN_THREADS) as threads:
        work = []
        for file, start, stop in spans:
            descriptor = os.open(file, os.O_RDONLY)
            for first in range(start, stop, PLAIN_BYTES):
                length = min(PLAIN_BYTES, stop - first)
                work.append(threads.submit(_read, descriptor, memory[place : place + length], first))
                place += length
        for piece in work:
            piece.result()
    return buffer


def _size(file: Path) -> int:
    return file.stat().st_size


def _read(descriptor: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        memory, offset = memory[count:], offset + count


def _aliquot(directory: Path, mesh: Any, measured: Measured) -> Any:
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from aliquot.loaders.sharded import load_sharded

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    began = time.perf_counter()
    load_sharded(model, directory)
    measured["load_s"] = time.perf_counter() - began
    return model


def _deepspeed(directory: Path, settings: Any, measured: Measured) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)


def _zero3(directory: Path, settings: Any, measured: Measured) -> Any:
    from aliquot.loaders.zero3 import load_zero3

    return load_zero3(directory)


def _dcp(directory: Path, mesh: Any, measured: Measured) -> Any:
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    state = {name: weight for name, weight in model.named_parameters()}
    load(state, storage_reader=HuggingFaceStorageReader(str(directory), thread_count=PLAIN_THREADS))
    return model


def _transformers(directory: Path, settings: Any, measured: Measured) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, distributed_config=settings)


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))


def _zero_3() -> Any:
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(
        {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    )


def _fsdp_settings() -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))


PREPARE = {"aliquot": _mesh, "dcp": _mesh, "deepspeed": _zero_3, "zero3": _zero_3, "transformers": _fsdp_settings}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
