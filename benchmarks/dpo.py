"""Compare DPO with TRL's DPOTrainer under DeepSpeed ZeRO-3: speed and memory of two ranks, from a file of pairs on.

python benchmarks/dpo.py --json dpo.json [--steps 3] [--rounds 1]

A Llama of 125 M parameters learns from pairs of answers of about 100 tokens to prompts of about 50 tokens: passages of
this repository's documentation. Every step takes the same eight pairs, four per rank, in bf16, with one thread per rank
on its own core and the same allocator. Reference log-probabilities are computed before the first step. With this model
under ZeRO-3, TRL 1.16 ends with an IndexError while it computes them. TRL therefore also runs with the reference in
memory, and with made-up log-probabilities of the reference, which cost it nothing. Figures are the median of all steps
but the first, and the peak PSS of a rank. The targets compare the fastest run of each side, and the smallest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.contestants import DEEPSPEED_JSON, LEARNING_RATE, quiet, trainer_arguments
from benchmarks.layouts import LLAMA_125M, llama_config
from benchmarks.prepare import make_tokenizer
from benchmarks.report import Row, finish, target
from benchmarks.worlds import Measured, PeakPss, run_world, tell

RANKS, PAIRS = 2, 4  # per rank and step
PROMPT_WORDS, ANSWER_WORDS = smoke.choose((30, 60), (4, 6))  # on average
MODEL = smoke.choose(LLAMA_125M, smoke.TINY)
PRECISION = smoke.choose("bf16", "fp32")
OURS = ("aliquot", "aliquot, gradient checkpointing")
BROKEN = "TRL + DeepSpeed ZeRO-3"
WHO = {
    OURS[0]: "",
    OURS[1]: "checkpointing",
    BROKEN: "zero3 precompute",
    "TRL + DeepSpeed ZeRO-3, reference in memory": "zero3",
    "TRL + DeepSpeed ZeRO-3, reference given": "zero3 precompute given",
    "TRL + DeepSpeed ZeRO-3, reference given, gradient checkpointing": "zero3 precompute given checkpointing",
    "TRL + DDP": "ddp precompute",
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--only", nargs="+", choices=WHO, default=list(WHO))
    given = smoke.parse(arguments, steps=1, only=[who for who in WHO if who != BROKEN])
    from aliquot.machine.allocator import allocator_environment

    environ = {"LD_PRELOAD": allocator_environment(os.environ).get("LD_PRELOAD", ""), "TQDM_DISABLE": "1"}
    found: dict[str, list[list[Measured]]] = {who: [] for who in given.only}
    with tempfile.TemporaryDirectory() as folder:
        write_work(Path(folder))
        for _ in range(given.rounds):
            for who, rounds in found.items():
                rounds.append(run_world(__file__, RANKS, who, folder, str(given.steps + 1), environ=environ))
                print(who, rounds[-1], flush=True)
    rows = [_row(who, rounds) for who, rounds in found.items()]
    ours, theirs = ([row for row in rows if (row["who"] in OURS) is is_ours] for is_ours in (True, False))
    seconds, peer_seconds = _least(ours, "step_s"), _least(theirs, "step_s")
    memory, peer_memory = _least(ours, "pss_gb"), _least(theirs, "pss_gb")
    targets = [
        target("dpo_speedup", peer_seconds / seconds if seconds and peer_seconds else None, 3.0, "higher"),
        target("dpo_memory", memory / peer_memory if memory and peer_memory else None, 0.4, "lower"),
    ]
    finish(f"DPO, 125m, {PRECISION}, {RANKS} ranks", rows, targets, given.json)


def write_work(folder: Path) -> None:
    """Write the pairs of one step, and a model with random weights and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    words, draw = smoke.text().read_text().split(), random.Random(1)
    make_tokenizer(folder, [" ".join(words)], MODEL["vocab_size"])

    def passage(mean: int) -> str:
        start = draw.randrange(len(words))
        return " ".join(words[start : start + 4 + int(draw.expovariate(1 / mean))])

    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(PAIRS * RANKS):
            prompt, chosen, rejected = passage(PROMPT_WORDS), passage(ANSWER_WORDS), passage(ANSWER_WORDS)
            file.write(json.dumps({"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}) + "\n")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**llama_config(MODEL))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "tokenizer")


def _row(who: str, rounds: list[list[Measured]]) -> Row:
    row: Row = {"who": who, "step_s": None, "pss_gb": None, "before_s": None}
    good = [ranks for ranks in rounds if "failed" not in ranks[0]]
    if not good:
        return row | {"note": rounds[0][0]["failed"]}
    seconds = statistics.median(second for ranks in good for second in ranks[0]["seconds"])
    pss = max(rank["pss"] for ranks in good for rank in ranks)
    before = statistics.median(ranks[0]["before_s"] for ranks in good)
    return row | {"step_s": seconds, "pss_gb": pss / 1e9, "before_s": before}


def _least(rows: list[Row], column: str) -> float | None:
    return min((row[column] for row in rows if row[column]), default=None)


def rank() -> None:
    who, folder, steps = sys.argv[2:]
    quiet()
    import torch

    number = int(os.environ["RANK"])
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
    pss = PeakPss()
    started = time.perf_counter()
    ends: list[float] = []

    def ended(*_: object) -> None:
        ends.append(time.perf_counter())
        if len(ends) == int(steps):
            pss.stop()

    if who in OURS:
        aliquot_run(Path(folder), int(steps), ended, "full" if WHO[who] else "none")
    else:
        trl_run(Path(folder), int(steps), ended, WHO[who])
    pss.stop()  # only rank 0 of aliquot has callbacks
    tell(
        {
            "pss": pss.bytes,
            "seconds": [b - a for a, b in pairwise(ends)],
            "before_s": ends[0] - started if ends else None,
        }
    )
    os._exit(0)


def aliquot_run(folder: Path, steps: int, ended: Callable[..., object], checkpointing: str) -> None:
    """Train as a user does; without packing, a step takes the same number of pairs as TRL's."""
    import aliquot

    class Ended(aliquot.Callback):
        def on_step_end(self, *_: Any) -> None:
            ended()

    aliquot.train(
        aliquot.RunConfig.model_validate(
            {
                "run": {"name": "dpo", "directory": str(folder / f"run-{checkpointing}")},
                "model": {"path": str(folder / "tokenizer")},
                "data": {
                    "path": str(folder / "pairs.jsonl"),
                    "sequence_length": 2048,
                    "packing": False,
                    "cache_directory": str(folder / "cache"),
                },
                "train": {
                    "objective": "dpo",
                    "max_steps": steps,
                    "global_batch_size": PAIRS * RANKS,
                    "per_device_train_batch_size": PAIRS,
                    "learning_rate": LEARNING_RATE,
                    "precision": PRECISION,
                    "gradient_checkpointing": checkpointing,
                    "compile": "none",
                },
                "launch": {"device": "cpu", "threads_per_rank": 1},
                "checkpoint": {"export": False},
                "observe": {"console": "quiet", "report_to": []},
            }
        ),
        callbacks=[Ended()],
    )


def trl_run(folder: Path, steps: int, ended: Callable[..., object], how: str) -> None:
    """Train as in TRL's documentation.

    The reference's log-probabilities are computed before the first step with "precompute", or made up with "given".
    """
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer  # type: ignore[attr-defined]

    class Ended(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended()

    class Given(DPOTrainer):
        def _precompute_ref_logps(self, dataset: Any, *_: Any) -> Any:
            for name in ("ref_chosen_logps", "ref_rejected_logps"):
                dataset = dataset.add_column(name, [-100.0] * len(dataset))
            return dataset

    more: dict[str, Any] = {"ddp_backend": "gloo"}
    if "zero3" in how:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        from aliquot.engines.deepspeed.deepspeed_setup import prepare_ops

        prepare_ops()
        deepspeed.init_distributed(dist_backend="gloo")
        file = folder / f"deepspeed-{os.environ['RANK']}.json"
        file.write_text(json.dumps(DEEPSPEED_JSON | {"bf16": {"enabled": PRECISION == "bf16"}}))
        more = {"deepspeed": str(file)}
    dtype = torch.bfloat16 if PRECISION == "bf16" and "zero3" in how else torch.float32
    settings = trainer_arguments(
        str(folder / "trl"), PRECISION, steps, PAIRS, 1, kind=DPOConfig, precompute_ref_log_probs="precompute" in how,
        gradient_checkpointing="checkpointing" in how, max_length=None, dataloader_pin_memory=False,
        model_init_kwargs={"dtype": dtype}, **more,
    )  # fmt: skip
    kind = Given if "given" in how else DPOTrainer
    kind(
        model=str(folder / "tokenizer"),
        args=settings,
        train_dataset=load_dataset(
            "json", data_files=str(folder / "pairs.jsonl"), split="train", cache_dir=str(folder / "datasets")
        ),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        callbacks=[Ended()],
    ).train()


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
