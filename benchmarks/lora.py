"""Compare LoRA with training all weights, and with peft, HF Trainer and DDP over gloo: speed and memory of two ranks.

python benchmarks/lora.py --json lora.json [--shape 500m] [--precision auto] [--steps 2] [--rounds 2]

A step has about 1,024 real tokens per rank. Sequences are either full, with 512 tokens and no padding, or documents of
65 tokens on average. aliquot packs these documents; the peer pads eight of them to the longest, as it does by default.
Adapters have rank 16, on all linear layers. aliquot compiles the layers, as it does by default in a long run. Two
contestants have the base in nf4: aliquot, and peft with bitsandbytes, if that is installed. Both of aliquot's bases
also compute rows of 4,096 tokens. Rounds alternate. Figures are medians of all steps but the first ones, and the peak
PSS of a rank. Other work on the machine changes tokens per CPU second, of the slowest rank, less than tokens/s.
`--shape 8b-wide` is two layers of Llama-3-8B; `--who` and `--work` select. `--checkpointing full`: all contestants
recompute the activations of each layer, as runs that have little memory do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.contestants import PRECISIONS, Work, aliquot_steps, chosen_precision, quiet, trainer_arguments
from benchmarks.layouts import LLAMA_3B, LLAMA_8B, LLAMA_125M, LLAMA_500M, generate, llama_config
from benchmarks.report import Row, finish, target
from benchmarks.worlds import Measured, PeakPss, run_world, tell

RANKS, BATCH = 2, 8
TWO_LAYERS = {**LLAMA_8B, "num_hidden_layers": 2, "vocab_size": 8192}
SHAPES = {"125m": LLAMA_125M, "500m": LLAMA_500M, "3b": LLAMA_3B, "8b-wide": TWO_LAYERS, "tiny": smoke.TINY}
LONG = "rows of 4,096 tokens"
WORKS = {"full sequences": Work(512, 2), "documents of 65 tokens": Work(512, 2, 65), LONG: Work(4096, 1)}
NF4 = "aliquot, LoRA on nf4"
PEER = "peft + HF Trainer + DDP"
NF4_PEER = "peft + bitsandbytes nf4 + HF Trainer + DDP"
WHO = ("aliquot, LoRA", NF4, "aliquot, all weights", PEER, NF4_PEER)
R, ALPHA = 16, 32


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="500m")
    arguments.add_argument("--precision", choices=PRECISIONS, default="auto")
    arguments.add_argument("--steps", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--who", nargs="+", choices=WHO, default=WHO if find_spec("bitsandbytes") else WHO[:-1])
    arguments.add_argument("--work", nargs="+", choices=WORKS, default=tuple(WORKS))
    arguments.add_argument("--checkpointing", choices=("none", "full"), default="none")
    given = smoke.parse(arguments, shape="tiny", precision="fp32", steps=1, rounds=1)
    from aliquot.machine.allocator import allocator_environment

    precision = chosen_precision(given.precision)
    # All contestants get the better allocator. Without one, aliquot still sets up glibc's allocator itself.
    environ = {"LD_PRELOAD": allocator_environment(os.environ).get("LD_PRELOAD", "")}
    found: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for _ in range(given.rounds):
        for work in given.work:
            for who in given.who:
                if who == "aliquot, all weights" and work != "full sequences":
                    continue
                if work == LONG and who not in WHO[:2]:
                    continue
                options = (who, work, given.shape, precision, str(given.steps), given.checkpointing)
                found[who, work] += [max(_world(options, environ), key=lambda rank: float(rank.get("pss", 0)))]
                print(who, work, found[who, work][-1], flush=True)
    rows = [_row(who, work, measured) for (who, work), measured in found.items()]
    by = {(row["who"], row["work"]): row for row in rows}
    targets = []
    for work, name in zip(WORKS, ("_full_rows", "", "_long_rows"), strict=True):
        own, peer, compressed, nf4_peer = (by.get((who, work), {}) for who in ("aliquot, LoRA", PEER, NF4, NF4_PEER))
        if peer:
            targets += [
                target(f"lora_speedup{name}", _ratio("tokens_per_s", own, peer), 1.5, "higher"),
                target(f"lora_memory{name}", _ratio("pss_gb", own, peer), 0.5, "lower"),
            ]
        if nf4_peer:
            targets += [
                target(f"nf4_speedup{name}", _ratio("tokens_per_s", compressed, nf4_peer), 3.0, "higher"),
                target(f"nf4_peer_memory{name}", _ratio("pss_gb", compressed, nf4_peer), 0.3, "lower"),
            ]
        if compressed and own:
            least = 0.92 if name else 0.75
            targets += [
                target(f"nf4_speed{name}", _ratio("tokens_per_cpu_s", compressed, own), least, "higher"),
                target(f"nf4_memory{name}", _ratio("pss_gb", compressed, own), 0.45, "lower"),
            ]
    title = f"LoRA, {given.shape}, {precision}, {RANKS} ranks" + ", recomputed" * (given.checkpointing == "full")
    finish(title, rows, targets, given.json)


def _ratio(key: str, row: Row, other: Row) -> float | None:
    return row[key] / other[key] if row.get(key) and other.get(key) else None


def _world(options: tuple[str, ...], environ: dict[str, str]) -> list[Measured]:
    return run_world(__file__, RANKS, *options, environ=environ, timeout_s=1800)


def _row(who: str, work: str, measured: list[Measured]) -> Row:
    row: Row = {"who": who, "work": work, "tokens_per_s": None, "tokens_per_cpu_s": None, "pss_gb": None}
    good = [each for each in measured if "failed" not in each]
    if not good:
        return row | {"note": measured[0]["failed"]}
    seconds = statistics.median(second for each in good for second in each["seconds"])
    tokens = RANKS * good[0]["tokens"]
    busy = statistics.median(second for each in good for second in each["busy"])
    speeds = {"tokens_per_s": tokens / seconds, "tokens_per_cpu_s": tokens / RANKS / busy}
    return row | speeds | {"pss_gb": max(each["pss"] for each in good) / 1e9}


def rank() -> None:
    who, work, shape, precision, steps, checkpointing = sys.argv[2:]
    quiet()
    import torch
    import torch.distributed as dist

    from aliquot.config.adapter_section import AdapterSection
    from aliquot.distributed.topology import Topology

    number = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
    pss = PeakPss()
    ends: list[tuple[float, float]] = []  # wall and CPU time

    def ended() -> None:
        ends.append((time.perf_counter(), time.process_time()))

    tokens = float(WORKS[work].tokens * WORKS[work].rows)
    warm = 1 if who.startswith("peft") else 3  # compilation, and changing shapes
    config, count = llama_config(SHAPES[shape]), int(steps) + warm
    if who.startswith("peft"):
        more = {"gradient_checkpointing": checkpointing == "full"}
        tokens = peer(config, WORKS[work], precision, count, ended, nf4=who == NF4_PEER, more=more)
    else:
        topology = Topology(number, RANKS, number, RANKS, 0, 1, "cpu", 1, ())
        adapter = AdapterSection(r=R, alpha=ALPHA, base="nf4" if who == NF4 else "bf16") if "LoRA" in who else None
        settings = {"compile": "layers", "gradient_checkpointing": checkpointing}
        making = aliquot_steps("host", config, WORKS[work], topology, settings, precision, adapter=adapter)  # type: ignore[arg-type]
        for _ in range(count):
            next(making)
            ended()
    pss.stop()
    seconds, busy = ([b - a for a, b in pairwise(times)][warm - 1 :] for times in zip(*ends, strict=True))
    tell({"pss": pss.bytes, "tokens": tokens, "seconds": seconds, "busy": busy})
    os._exit(0)


def peer(
    config: dict[str, Any],
    work: Work,
    precision: str,
    steps: int,
    ended: Callable[[], object],
    *,
    nf4: bool,
    more: dict[str, Any],
) -> float:
    """Train as in peft's documentation (get_peft_model, Trainer); return the real tokens of a rank's mean step.

    With `nf4`, the documentation of QLoRA: load the stored model in 4 bits with double quantisation.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback

    class Documents(torch.utils.data.Dataset[torch.Tensor]):
        """The documents of the rows that aliquot packs, in batches with as many real tokens per step as possible."""

        def __init__(self) -> None:
            edges = [work.edges(row) for row in range(64)]
            self.lengths = [b - a for row in edges for a, b in pairwise(row)]

        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> torch.Tensor:
            length = self.lengths[index % len(self.lengths)]
            return torch.randint(0, config["vocab_size"], (length,), generator=torch.Generator().manual_seed(index))

    def padded(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=-100)
        mask = (labels != -100).long()
        return {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": mask}

    class Ended(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended()

    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if nf4:
        codes = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        with tempfile.TemporaryDirectory() as stored:
            generate(Path(stored) / "model", {name: value for name, value in config.items() if name != "dtype"})
            model = AutoModelForCausalLM.from_pretrained(
                f"{stored}/model", dtype=dtype, quantization_config=codes, device_map={"": "cpu"}
            )
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model = get_peft_model(model, LoraConfig(r=R, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"))
    documents = Documents()
    mean = sum(documents.lengths) / len(documents.lengths)
    batch = 1 if work.mean is None else BATCH
    accumulation = round(work.tokens * work.rows / (mean * batch))
    with tempfile.TemporaryDirectory() as folder:
        more = {"ddp_backend": "gloo", "remove_unused_columns": False, **more}
        settings = trainer_arguments(folder, precision, steps, batch, accumulation, **more)
        Trainer(model=model, args=settings, train_dataset=documents, data_collator=padded, callbacks=[Ended()]).train()
    return mean * batch * accumulation


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
