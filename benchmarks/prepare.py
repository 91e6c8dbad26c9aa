"""Measure tokenising and indexing many short documents, next to `datasets`; then again, as later starts do.

python benchmarks/prepare.py --json prepare.json

The text has --megabytes 100 of lines of a few words from a fixed seed; each line is a document. Every row is a new
process that has already imported its libraries. `memory` is the peak of private memory of the process and its children
beyond that, without mapped files.
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

from benchmarks import smoke
from benchmarks.report import Row, finish

SEQUENCE = 512
VOCABULARY = 8192
SYLLABLES = [consonant + vowel for consonant in "bdklmnst" for vowel in "aeio"]
MIB = 1 << 20


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--megabytes", type=int, default=100)
    arguments.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # name and folder, for a child process
    given = smoke.parse(arguments, megabytes=1)
    if given.part is not None:
        part(PARTS[given.part[0]], Path(given.part[1]))
        return
    with tempfile.TemporaryDirectory(prefix="aliquot-prepare-") as folder:
        lines = make(Path(folder), given.megabytes)
        rows: list[Row] = []
        for name in PARTS:
            command = [sys.executable, __file__, "--part", name, folder]
            seconds, mib = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-2:]
            rows.append({"what": name, "lines": lines, "seconds": float(seconds), "memory MiB": float(mib)})
    finish(f"preparing {given.megabytes} MB of short lines", rows, [], given.json)


def make(folder: Path, megabytes: int) -> int:
    """Write lines.txt and a tokenizer; return the number of lines."""
    draw = random.Random(0)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(20_000)]
    lines = written = 0
    with (folder / "lines.txt").open("w") as file:
        while written < megabytes * 1_000_000:
            written += file.write(" ".join(draw.choices(words, k=draw.randint(2, 12))) + "\n")
            lines += 1
    make_tokenizer(folder, [" ".join(words)])
    return lines


def make_tokenizer(folder: Path, texts: list[str], vocabulary: int = VOCABULARY) -> None:
    """Write a byte-level tokenizer, trained on the texts, to `folder`/tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder / "tokenizer")


def part(work: Callable[[Path], Callable[[], object]], folder: Path) -> None:
    run = work(folder)
    with Peak() as peak:
        begun = time.perf_counter()
        _kept = run()
        seconds = time.perf_counter() - begun
        beyond = peak.beyond()
    print(seconds, beyond / MIB)


class Peak:
    """The peak of private memory of this process and its children, sampled in a thread."""

    def __enter__(self) -> Peak:
        self._before = self._most = private_bytes()
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._sample)
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watching.join()

    def beyond(self) -> int:
        """Return the peak in bytes since the last call, minus the memory at the start."""
        most, self._most = max(self._most, private_bytes()), 0
        return most - self._before

    def _sample(self) -> None:
        while not self._over.wait(0.02):
            self._most = max(self._most, private_bytes())


def private_bytes() -> int:
    """Return private memory of this process and its children."""
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
    "datasets, tokens (map, one process per core), first time": mapped_by_datasets,
    "datasets, tokens, again": mapped_by_datasets,
}


if __name__ == "__main__":
    main()
