"""Measure *real* tokens per second of the seed's job: records of wikitext-2, 125 M parameters, four per step.

python benchmarks/seed_job.py --text wikitext.txt --tokenizer DIRECTORY --json seed_job.json

DeepSpeed ZeRO-3 runs with the seed's JSON and a preloaded allocator, in three ways: records padded to 512 as in the
seed, each record at its own length, and records concatenated and split, which mixes documents. aliquot packs isolated
documents. Every optimizer step learns from about the same number of real tokens. Tokens are random, because only the
lengths of the records matter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.contestants import Work, aliquot_steps, deepspeed_seconds, quiet
from benchmarks.layouts import LLAMA_125M, llama_config
from benchmarks.report import Row, finish, target
from benchmarks.worlds import run_world, tell

RANKS, ROWS, LONGEST, WARM = 2, 4, 512, 3
STEPS = smoke.choose(6, 1)
MODEL = smoke.choose(LLAMA_125M, smoke.TINY)
WHO = {
    "aliquot, packed": "host",
    "DeepSpeed, padded to 512": "padded",
    "DeepSpeed, each record at its length": "dynamic",
    "DeepSpeed, concatenated and split": "concatenated",
}


@dataclass(frozen=True)
class RealRows(Work):
    """Rows of a text, packed into sequences of `tokens`. The last row is cut off."""

    lengths: tuple[int, ...] = ()

    def edges(self, seed: int) -> tuple[int, ...]:
        draw, edges = random.Random(seed), [0]
        while edges[-1] < self.tokens:
            edges.append(min(self.tokens, edges[-1] + draw.choice(self.lengths)))
        return tuple(edges)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--text", type=Path, required=not smoke.SMOKE)
    arguments.add_argument("--tokenizer", type=Path, required=not smoke.SMOKE)
    arguments.add_argument("--rounds", type=int, default=1)
    given = smoke.parse(arguments, text=smoke.text, tokenizer=smoke.tokenizer)
    from aliquot.machine.allocator import allocator_environment

    lengths = row_lengths(given.text, given.tokenizer)
    file = Path("/tmp") / f"aliquot-seed-job-{os.getpid()}.json"
    file.write_text(json.dumps(lengths))
    environ = {"LD_PRELOAD": allocator_environment(os.environ).get("LD_PRELOAD", "")}
    mean = statistics.mean(lengths)
    speeds: dict[str, list[float]] = {name: [] for name in WHO}
    try:
        for _ in range(given.rounds):
            for name, who in WHO.items():
                ranks = run_world(__file__, RANKS, who, str(file), environ=environ, timeout_s=1200)
                if "failed" in ranks[0]:
                    raise SystemExit(ranks[0]["failed"])
                speeds[name].append(ranks[0]["real_tokens_per_s"])
                print(name, speeds[name], flush=True)
    finally:
        file.unlink()
    found = {name: statistics.median(of) for name, of in speeds.items()}
    rows: list[Row] = [{"who": name, "real_tokens_per_s": value} for name, value in found.items()]
    print(
        f"{len(lengths)} rows, {mean:.1f} tokens on average: {100 * mean / LONGEST:.0f} % real when padded to {LONGEST}"
    )
    ours, padded, *others = found.values()
    targets = [
        target("seed_job_padded", ours / padded, 15, "higher"),
        target("seed_job_best", ours / max(others), 2.0, "higher"),
    ]
    finish("records of wikitext-2, real tokens per second", rows, targets, given.json)


def row_lengths(text: Path, tokenizer: Path) -> list[int]:
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    lines = [line.strip() for line in text.read_text().splitlines()]  # a third is empty; the seed pads empty rows, too
    return [max(1, min(LONGEST, len(ids))) for ids in encode(lines)["input_ids"]]


def rank() -> None:
    who, lengths = sys.argv[2], tuple(json.loads(Path(sys.argv[3]).read_text()))
    quiet()
    import torch
    import torch.distributed as dist

    from aliquot.distributed.topology import Topology

    number = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config, mean = llama_config(MODEL), statistics.mean(lengths)
    ends: list[float] = []
    real, packed = mean * ROWS * RANKS, round(mean * ROWS)
    if who == "host":
        work = RealRows(packed, 1, None, lengths)
        topology = Topology(number, RANKS, number, RANKS, 0, 1, "cpu", 1, ())
        making = aliquot_steps("host", config, work, topology, {"compile": "layers"})
        for _ in range(WARM + STEPS):
            next(making)
            ends.append(time.perf_counter())
    else:
        accumulation = 1 if who == "concatenated" else ROWS

        def lengths_of(index: int) -> tuple[int, int]:
            length = lengths[index % len(lengths)]
            return {"padded": (length, LONGEST), "dynamic": (length, length), "concatenated": (packed, packed)}[who]

        deepspeed_seconds(config, lengths_of, accumulation, WARM + STEPS, lambda _: ends.append(time.perf_counter()))
    step_s = statistics.mean(b - a for a, b in pairwise(ends[WARM - 1 :]))
    tell({"real_tokens_per_s": real / step_s})
    os._exit(0)


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
