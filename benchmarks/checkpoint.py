"""Measure saving, asynchronous saving and exporting, next to a plain parallel write and `save_pretrained`.

python benchmarks/checkpoint.py --json checkpoint.json

The benchmark needs 20 GB of memory and 15 GB of disk in --directory, and removes its files at the end. Every run starts
two new processes, and methods alternate. Exports of transformers are timed without fsync, those of aliquot with it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.layouts import LLAMA_1B, LLAMA_125M, LLAMA_500M, llama_config, llama_tensors
from benchmarks.report import Row, finish, target
from benchmarks.worlds import Measured, cold, run_world, tell, watched

RANKS = 2
MODELS = {"save": LLAMA_500M, "export": LLAMA_1B, "stall": LLAMA_125M}
MODELS = smoke.choose(MODELS, dict.fromkeys(MODELS, smoke.TINY))
PLAIN_THREADS = 4
PLAIN_BYTES = 8 << 20
STEPS = 12  # undisturbed steps before a save, for comparison
SEQUENCE = 512


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--directory", type=Path, help="directory of the files; default: a temporary directory")
    arguments.add_argument("--repeats", type=int, default=3)
    given = smoke.parse(arguments, repeats=1)
    folder = Path(tempfile.mkdtemp(prefix="aliquot-checkpoint-", dir=given.directory))
    try:
        rows, found = save_rows(folder, given.repeats)
        more, exported = export_rows(folder, given.repeats)
        stalls, stall = stall_rows(folder, given.repeats)
    finally:
        shutil.rmtree(folder)
    targets = [
        target("save_of_plain_write", found, 0.85, "higher"),
        target("async_stall", stall, 0.15, "lower"),
        target("export_speedup", exported["speedup"], 2, "higher"),
        target("export_excess_mib", exported["excess_mib"], 64, "lower"),
    ]
    finish("checkpoints", [*rows, *more, *stalls], targets, given.json)


def alternate(folder: Path, methods: Sequence[str], repeats: int) -> dict[str, list[list[Measured]]]:
    """Run the methods in turn, each in a new directory, on a disk without pending writes."""
    taken: dict[str, list[list[Measured]]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method in methods:
            out = Path(tempfile.mkdtemp(dir=folder))
            os.sync()
            cold()
            taken[method].append(run_world(__file__, RANKS, method, str(out)))
            print(method, [taken[method][-1][0].get(key) for key in ("seconds", "failed")], flush=True)
            shutil.rmtree(out)
    return taken


def slowest(runs: list[list[Measured]], column: str = "seconds") -> float | None:
    """Return the median over the runs of the slowest rank, or None if a run failed."""
    if any("failed" in ranks[0] for ranks in runs):
        return None
    return float(statistics.median(max(rank[column] for rank in ranks) for ranks in runs))


def row_of(method: str, model: str, total_bytes: int, runs: list[list[Measured]]) -> Row:
    seconds = slowest(runs)
    row: Row = {"method": method, "model": model, "seconds": seconds}
    if seconds is None:
        return row | {"note": next(ranks[0]["failed"] for ranks in runs if "failed" in ranks[0])}
    over = max(rank["peak_over_start_bytes"] for ranks in runs for rank in ranks) / 2**20
    return row | {"GB/s": total_bytes / seconds / 1e9, "peak over start MiB": over, "runs": len(runs), "note": ""}


def save_rows(folder: Path, repeats: int) -> tuple[list[Row], float | None]:
    taken = alternate(folder, ["plain", "early", "save"], repeats)
    total_bytes = 12 * numel(MODELS["save"])
    about = "0.5 B, 2 ranks, fp32 weights and moments"
    rows = [
        row_of("plain parallel write and fsync", about, total_bytes, taken["plain"]),
        row_of("the same, with write-back of every piece", about, total_bytes, taken["early"]),
        row_of("aliquot save, with checksums and publishing", about, total_bytes, taken["save"]),
    ]
    limits, save_s = [slowest(taken[name]) for name in ("plain", "early")], slowest(taken["save"])
    plain_s = min(seconds for seconds in limits if seconds is not None) if any(limits) else None
    return rows, plain_s / save_s if plain_s and save_s else None


def export_rows(folder: Path, repeats: int) -> tuple[list[Row], dict[str, float | None]]:
    taken = alternate(folder, ["export", "gather"], repeats)
    total_bytes = 2 * numel(MODELS["export"])
    about = "1.24 B, 2 ranks, fp32 shards to bf16 files"
    rows = [
        row_of("aliquot export, with fsync", about, total_bytes, taken["export"]),
        row_of("gather to rank 0, save_pretrained", about, total_bytes, taken["gather"]),
    ]
    ours, peer = slowest(taken["export"]), slowest(taken["gather"])
    return rows, {
        "speedup": peer / ours if ours and peer else None,
        "excess_mib": rows[0].get("peak over start MiB"),
    }


def stall_rows(folder: Path, repeats: int) -> tuple[list[Row], float | None]:
    taken = alternate(folder, ["stall"], repeats)["stall"]
    about = "0.125 B, 2 ranks, fsdp engine"
    names = {
        "step_s": "a step without a save",
        "sync_s": "synchronous save",
        "stall_s": "asynchronous save: pause of the training thread",
        "slower_s": "asynchronous save: extra time of all steps until it is published",
    }
    rows: list[Row] = []
    for column, method in names.items():
        seconds = slowest(taken, column)
        note = "" if seconds is not None else next(ranks[0]["failed"] for ranks in taken if "failed" in ranks[0])
        rows.append({"method": method, "model": about, "seconds": seconds, "runs": len(taken), "note": note})
    stall_s, sync_s = slowest(taken, "stall_s"), slowest(taken, "sync_s")
    return rows, stall_s / sync_s if stall_s is not None and sync_s else None


def numel(numbers: dict[str, Any]) -> int:
    import math

    return sum(math.prod(shape) for _, shape in llama_tensors(numbers))


# The following functions run in a rank.


def rank(method: str, out: Path) -> None:
    import torch.distributed as dist
    import transformers

    from aliquot.distributed.ranks import Ranks
    from aliquot.distributed.topology import Topology

    transformers.utils.logging.disable_progress_bar()
    index = int(os.environ["RANK"])
    ranks = Ranks.join(Topology(index, RANKS, index, RANKS, 0, 1, "cpu", 1, ()), timeout_s=600)
    measured: Measured = {}
    methods: dict[str, Callable[[Path, Any, Measured], Any]] = {
        "plain": _plain,
        "early": partial(_plain, early=True),
        "save": _save,
        "export": _export,
        "gather": _gather,
        "stall": _stall,
    }
    run = methods[method](out, ranks, measured)
    with watched(measured, dist.barrier) if method != "stall" else nullcontext():
        run()
    tell(measured)
    os._exit(0)


class Rows:
    """This rank's rows of every tensor with random bits, as a training engine would hold them."""

    def __init__(self, tensors: Sequence[tuple[str, tuple[int, ...]]], index: int) -> None:
        import math

        import torch

        from aliquot.tensor_io.parts import KINDS, Part

        self._values = {}
        for kind in KINDS:
            for name, shape in tensors:
                row, rows = math.prod(shape[1:]), -(-shape[0] // RANKS)
                start, stop = (min(rank * rows, shape[0]) * row for rank in (index, index + 1))
                self._values[Part(name, shape, kind, start, stop)] = torch.empty(stop - start).uniform_()

    def parts(self) -> list[Any]:
        return list(self._values)

    def view(self, part: Any) -> Any:
        return self._values[part]

    def read(self, part: Any, start: int, out: Any) -> None:
        out.copy_(self._values[part][start - part.start :][: out.numel()])


def _plain(out: Path, ranks: Any, measured: Measured, early: bool = False) -> Any:
    """Write one file per rank, as large as the rank's parts together."""
    store = Rows(llama_tensors(MODELS["save"]), ranks.rank)

    def run() -> None:
        pieces: list[tuple[memoryview, int]] = []
        place = 0
        for part in store.parts():
            memory = store.view(part).numpy().data.cast("B")
            for start in range(0, len(memory), PLAIN_BYTES):
                pieces.append((memory[start : start + PLAIN_BYTES], place + start))
            place += len(memory)
        descriptor = os.open(out / str(ranks.rank), os.O_WRONLY | os.O_CREAT)
        os.truncate(descriptor, place)
        with ThreadPoolExecutor(PLAIN_THREADS) as threads:
            for _ in threads.map(lambda piece: _write(descriptor, piece[0], piece[1], early), pieces):
                pass
        os.fsync(descriptor)

    return run


def _write(descriptor: int, memory: memoryview, offset: int, early: bool) -> None:
    first, length = offset, len(memory)
    while memory:
        count = os.pwrite(descriptor, memory, offset)
        memory, offset = memory[count:], offset + count
    if early:
        os.posix_fadvise(descriptor, first, length, os.POSIX_FADV_DONTNEED)


def _save(out: Path, ranks: Any, measured: Measured) -> Any:
    from tests.checkpoint.saving import save

    from aliquot.checkpoint.checkpoint_files import CheckpointSpec

    tensors = llama_tensors(MODELS["save"])
    store = Rows(tensors, ranks.rank)
    return lambda: save(out, 1, store, CheckpointSpec(tensors), {}, ranks, keep=1)


def _sharded(numbers: dict[str, Any]) -> Any:
    """Return a model under FSDP2 with random fp32 values."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.for_model(**llama_config(numbers))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    for weight in model.parameters():
        weight.to_local().detach().uniform_()
    return model


def _export(out: Path, ranks: Any, measured: Measured) -> Any:
    import torch

    from aliquot.loaders.sharded import sharded_weights, tensors_of
    from aliquot.models.export import export

    model = _sharded(MODELS["export"])
    files = {"config.json": model.config.to_json_string().encode()}
    store, tensors = sharded_weights(model), tensors_of(model)
    return lambda: export(store, tensors, out / "model", torch.bfloat16, files, ranks)


def _gather(out: Path, ranks: Any, measured: Measured) -> Any:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = _sharded(MODELS["export"])

    def run() -> None:
        model.to(torch.bfloat16)  # before the gather, to halve it
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if ranks.rank == 0:
            model.save_pretrained(out / "model", state_dict=state)

    return run


def _stall(out: Path, ranks: Any, measured: Measured) -> Any:
    """Time steps of run/train.py: undisturbed, with a synchronous save, with an asynchronous save."""
    import torch
    from transformers import AutoConfig

    from aliquot.checkpoint.background_task import SaveEvents
    from aliquot.checkpoint.checkpoint_files import CheckpointSpec
    from aliquot.checkpoint.save import Saver
    from aliquot.config.schema import CheckpointSection
    from aliquot.engines.base import EngineSpec
    from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
    from aliquot.models import initialize, meta
    from aliquot.models.micro_batch import MicroBatch

    built = meta.build(AutoConfig.for_model(**llama_config(MODELS["stall"])))
    spec = EngineSpec("bf16", SEQUENCE, built.traits.plain_head)
    engine = FsdpEngine.build(built.model, spec, ranks.topology)
    initialize.initialize(engine, built.fills, 1)
    engine.ready()
    ids = torch.randint(0, MODELS["stall"]["vocab_size"], (SEQUENCE,))
    batch = MicroBatch(ids, ids.roll(-1), torch.arange(SEQUENCE), (0, SEQUENCE))

    def saver(asynchronous: bool) -> Any:
        settings = CheckpointSection.model_validate({"async": asynchronous})
        folder = out / str(asynchronous)
        return Saver(folder, engine, CheckpointSpec(built.tensors), ranks, settings, SaveEvents(print))

    def step(saving: Any) -> tuple[float, float]:
        """Return the seconds of the step, and the seconds for which the saver stopped the training thread."""
        began = time.perf_counter()
        engine.backward(batch, 1 / SEQUENCE, last=True)
        held = time.perf_counter()
        saving.poll(ranks.gather(saving.report()))
        saving.before_update()
        held = time.perf_counter() - held
        engine.step(1e-4, 1.0)
        return time.perf_counter() - began, held

    def run() -> None:
        synchronous, asynchronous = saver(False), saver(True)
        undisturbed = [step(asynchronous) for _ in range(STEPS)][2:]
        step_s = statistics.median(seconds for seconds, _ in undisturbed)
        gather_s = statistics.median(held for _, held in undisturbed)  # ranks wait for each other even without a save
        ranks.barrier()
        began = time.perf_counter()
        synchronous.start(1, {})
        ranks.barrier()
        sync_s = time.perf_counter() - began
        os.sync()
        step(asynchronous)
        began = time.perf_counter()
        asynchronous.start(2, {})
        stall_s, disturbed = time.perf_counter() - began, []
        while asynchronous.report() is not None:
            seconds, held = step(asynchronous)
            disturbed.append(seconds)
            stall_s += max(0.0, held - gather_s)
        slower_s = sum(disturbed) - len(disturbed) * step_s
        measured.update(seconds=sync_s, step_s=step_s, sync_s=sync_s, stall_s=stall_s, slower_s=slower_s)
        measured["peak_over_start_bytes"] = 0

    return run


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
