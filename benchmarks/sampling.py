"""Compare `Trainer.sample` with transformers' generate: tokens per second of the same batch of prompts.

python benchmarks/sampling.py --json sampling.json [--rounds 3]

A Llama of 125 M parameters with random weights continues 32 prompts, and then 128, of 32 tokens by 64 tokens, in the
precision that `train.precision: auto` chooses, with one thread per rank on its own core. transformers draws at
temperature 1 with its cache of keys and values. Each round draws once for warm-up and then three times; figures are
medians over all rounds, which alternate between the contestants. transformers' continuous batching is no contestant: on
a CPU, it takes half a minute for 16 tokens of a tiny model, because it lays out its cache anew.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.contestants import chosen_precision, quiet
from benchmarks.layouts import LLAMA_125M, llama_config
from benchmarks.prepare import make_tokenizer
from benchmarks.report import Row, finish, target
from benchmarks.worlds import Measured, run_world, tell

MODEL = smoke.choose(LLAMA_125M, smoke.TINY)
FEW, MANY, PROMPT_TOKENS, NEW_TOKENS = smoke.choose((32, 128, 32, 64), (2, 4, 4, 4))
CONTESTANTS = {"aliquot, 1 rank": 1, "aliquot, 2 ranks": 2, "transformers": 1}  # ranks


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    given = smoke.parse(arguments, rounds=1)
    from aliquot.machine.allocator import allocator_environment

    environ = {"LD_PRELOAD": allocator_environment(os.environ).get("LD_PRELOAD", ""), "OMP_NUM_THREADS": "1"}
    cases = [(who, prompts) for prompts in (FEW, MANY) for who in CONTESTANTS]
    found: dict[tuple[str, int], list[list[Measured]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for _ in range(given.rounds):
            for (who, prompts), rounds in found.items():
                rounds.append(run_world(__file__, CONTESTANTS[who], who, folder, str(prompts), environ=environ))
                print(who, prompts, rounds[-1], flush=True)
    rows = [_row(who, prompts, rounds) for (who, prompts), rounds in found.items()]
    targets = []
    for prompts in (FEW, MANY):
        one, two, peer = (row["tokens_per_s"] for row in rows if row["prompts"] == prompts)
        targets += [
            target(f"sampling_speed_{prompts}", one / peer if one and peer else None, 0.7, "higher"),
            target(f"sampling_two_ranks_{prompts}", two / one if one and two else None, 1.8, "higher"),
        ]
    finish(f"sampling, 125m, {NEW_TOKENS} new tokens", rows, targets, given.json)


def write_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tokenizer(folder, [smoke.text().read_text()], MODEL["vocab_size"])
    torch.manual_seed(0)
    config = AutoConfig.for_model(**llama_config(MODEL))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "tokenizer")


def _row(who: str, prompts: int, rounds: list[list[Measured]]) -> Row:
    good = [ranks[0]["seconds"] for ranks in rounds if "failed" not in ranks[0]]
    if not good:
        return {"who": who, "prompts": prompts, "tokens_per_s": None, "note": rounds[0][0]["failed"]}
    seconds = statistics.median(second for times in good for second in times)
    return {"who": who, "prompts": prompts, "tokens_per_s": prompts * NEW_TOKENS / seconds}


def rank() -> None:
    who, folder, count = sys.argv[2:]
    quiet()
    import torch

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["RANK"])]})
    draws = torch.Generator().manual_seed(1)
    prompts = torch.randint(10, MODEL["vocab_size"], (int(count), PROMPT_TOKENS), generator=draws).tolist()
    seconds = (aliquot_draws if who != "transformers" else transformers_draws)(Path(folder), prompts)
    tell({"seconds": seconds[1:]})
    os._exit(0)


def aliquot_draws(folder: Path, prompts: list[list[int]]) -> list[float]:
    import aliquot

    config = aliquot.RunConfig.model_validate(
        {
            "run": {"name": "sampling", "directory": str(folder / f"run-{os.environ['WORLD_SIZE']}-{len(prompts)}")},
            "model": {"path": str(folder / "tokenizer")},
            "data": {"path": str(smoke.text()), "sequence_length": 256, "cache_directory": str(folder / "cache")},
            "train": {"max_steps": 1, "compile": "none"},
            "launch": {"device": "cpu", "threads_per_rank": 1},
            "checkpoint": {"every": 0, "export": False},
            "observe": {"console": "quiet", "report_to": []},
        }
    )
    seconds = []
    with aliquot.Trainer(config) as trainer:
        for seed in range(4):
            start = time.perf_counter()
            trainer.sample(prompts, max_tokens=NEW_TOKENS, seed=seed)
            seconds.append(time.perf_counter() - start)
    return seconds


def transformers_draws(folder: Path, prompts: list[list[int]]) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if chosen_precision("auto") == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder / "tokenizer", dtype=dtype).eval()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "eos_token_id": -1, "pad_token_id": 0}
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        ids = torch.tensor(prompts)
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
