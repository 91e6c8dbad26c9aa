"""A job that many people have: HF Trainer, DeepSpeed ZeRO-3 with a JSON, gloo, wikitext-2, on CPU nodes.

    torchrun --nproc-per-node 2 examples/seed/train.py --model DIRECTORY --data wikitext2.parquet
    python examples/seed/train.py --model DIRECTORY --data wikitext2.parquet                   # alone

`--load transformers` reads the weights as such scripts did; the default, aliquot.load_zero3, changes two lines.
run.yaml beside this file is the same job for `aliquot train`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import aliquot

SETTINGS = Path(__file__).with_name("cpu-ds.json")
ALONE = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", required=True, help="a directory or hub id")
    arguments.add_argument("--data", nargs="+", default=[], help=".parquet or text files; none: wikitext-2 of the hub")
    arguments.add_argument("--output", default="runs/seed-trainer")
    arguments.add_argument("--steps", type=int, default=-1)
    arguments.add_argument("--sequence-length", type=int, default=512)
    arguments.add_argument("--load", choices=["aliquot", "transformers"], default="aliquot")
    given = arguments.parse_args()
    for name, value in {"DS_ACCELERATOR": "cpu", **ALONE}.items():
        os.environ.setdefault(name, value)  # DeepSpeed reads them all; torchrun sets the second kind
    import deepspeed

    deepspeed.init_distributed("gloo")

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = documents(given.data).map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=given.sequence_length, padding="max_length"),
        batched=True,
        remove_columns=["text"],
    )
    settings = TrainingArguments(
        output_dir=given.output,
        deepspeed=zero3_settings(),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        learning_rate=2e-5,
        num_train_epochs=1,
        max_steps=given.steps,
        logging_steps=1,
        save_steps=100,
        report_to=[],
        disable_tqdm=True,
    )
    if given.load == "aliquot":  # each rank reads its own bytes
        model = aliquot.load_zero3(given.model, dtype=torch.bfloat16)
    else:  # rank 0 reads all and broadcasts
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=rows,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),  # makes the labels, none for padding
        callbacks=[RealTokens(rows)],
    )
    trainer.train()
    torch.distributed.destroy_process_group()


def documents(files: list[str]) -> Dataset:
    """Rows with some text in them."""
    if not files:
        found = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="train")
    else:
        kind = "parquet" if files[0].endswith(".parquet") else "text"
        found = load_dataset(kind, data_files=files, split="train")
    return found.filter(lambda row: bool(row["text"].strip()))


def zero3_settings() -> dict[str, Any]:
    """The JSON; without a compiler, which DeepSpeed's own Adam needs, with torch's."""
    settings: dict[str, Any] = json.loads(SETTINGS.read_text())
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        settings["zero_force_ds_cpu_optimizer"] = False
    return settings


class RealTokens(TrainerCallback):
    """Tokens that are not padding, per second, and this rank's private memory: what the two jobs are compared by."""

    def __init__(self, rows: Dataset) -> None:
        self._mean = sum(sum(mask) for mask in rows["attention_mask"]) / len(rows)
        self._times: list[float] = []

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        self._times.append(time.perf_counter())
        if state.is_world_process_zero and len(self._times) > 1:
            row_count = args.gradient_accumulation_steps * args.world_size * (len(self._times) - 1)
            speed = row_count * self._mean / (self._times[-1] - self._times[0])
            memory = psutil.Process().memory_full_info().uss / 2**30
            print(f"step {state.global_step}: {speed:,.0f} real tokens/s, {memory:.2f} GiB private", flush=True)


if __name__ == "__main__":
    main()
