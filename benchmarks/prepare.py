"""Many short documents: tokenising and indexing them, beside `datasets`; then again, as every later start does it.

python benchmarks/prepare.py --json prepare.json

--megabytes 100 of lines of a few words, each a document, made from a seed. Every row is a process of its own that has
imported what it needs; `memory` is what it and its children needed at most beyond that, files that are mapped left out.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Row, finish

SEQUENCE = 512
VOCABULARY = 8192
SYLLABLES = [consonant + vowel for consonant in "bdklmnst" for vowel in "aeio"]
MIB = 1 << 20


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--megabytes", type=int, default=100)
    arguments.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # its name and the folder: a process of ours
    given = arguments.parse_args()
    if given.part is not None:
        part(PARTS[given.part[0]], Path(given.part[1]))
        return
    with tempfile.TemporaryDirectory(prefix="aliquot-prepare-") as folder:
        lines = make(Path(folder), given.megabytes)
        rows: list[Row] = []
        for name in PARTS:
            command = [sys.executable, __file__, "--part", name, folder]
            seconds, mib = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:]
            rows.append({"what": name, "lines": lines, "seconds": float(seconds), "memory MiB": float(mib)})
    finish(f"preparing {given.megabytes} MB of short lines", rows, [], given.json)


def make(folder: Path, megabytes: int) -> int:
    """lines.txt and tokenizer.json; how many lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    draw = random.Random(0)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(20_000)]
    lines = written = 0
    with (folder / "lines.txt").open("w") as file:
        while written < megabytes * 1_000_000:
            written += file.write(" ".join(draw.choices(words, k=draw.randint(2, 12))) + "\n")
            lines += 1
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    (folder / "tokenizer").mkdir()
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder / "tokenizer")
    return lines


def part(work: Callable[[Path], Callable[[], object]], folder: Path) -> None:
    run = work(folder)
    before = most = private_bytes()
    over = threading.Event()

    def sample() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, private_bytes())

    watching = threading.Thread(target=sample)
    watching.start()
    begun = time.perf_counter()
    _kept = run()
    seconds = time.perf_counter() - begun
    over.set()
    watching.join()
    print(seconds, (max(most, private_bytes()) - before) / MIB)


def private_bytes() -> int:
    """Of this process and those that it has started."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        with suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text().split("\n")
            total += sum(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))
    return total


def prepared(folder: Path) -> Callable[[], object]:
    import aliquot.data.prepare as own
    from aliquot.config.schema import DataSection

    section = DataSection(
        path=str(folder / "lines.txt"), document="line", sequence_length=SEQUENCE, tokenizer=str(folder / "tokenizer"),
        cache_directory=folder / "cache",
    )  # fmt: skip
    return lambda: own.prepare(section, None, VOCABULARY)


def indexed(folder: Path) -> Callable[[], object]:
    from aliquot.data.packing import Packing
    from aliquot.data.token_store import TokenStore

    (store,) = (folder / "cache" / "tokens").iterdir()
    return lambda: Packing.of(TokenStore.open(store), SEQUENCE, True).epoch(1, 0).sequence(0)


def mapped_by_datasets(folder: Path) -> Callable[[], object]:
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def run() -> object:
        lines = datasets.load_dataset(
            "text", data_files=str(folder / "lines.txt"), split="train", cache_dir=str(folder / "datasets")
        )
        return lines.map(
            lambda batch: tokenizer(batch["text"]), batched=True, num_proc=os.cpu_count(), remove_columns=["text"]
        )

    return run


PARTS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "aliquot, tokens, first time": prepared,
    "aliquot, tokens, again": prepared,
    "aliquot, index and first epoch, first rank": indexed,
    "aliquot, index and first epoch, every further rank": indexed,
    "datasets, tokens (map, a process a core), first time": mapped_by_datasets,
    "datasets, tokens, again": mapped_by_datasets,
}


if __name__ == "__main__":
    main()
