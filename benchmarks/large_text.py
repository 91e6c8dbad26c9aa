"""Measure memory and seconds of preparing texts of several sizes: only files of the cache may grow with a text.

python benchmarks/large_text.py --gigabytes 0.4 1.5 5 10 --document file line --json large_text.json

A text repeats the blocks of a real text (--text; by default, the modules of Python's library) in random order, each
with a number. For each size, the first start tokenises the text, makes its index and first epoch, and reads a batch;
the second start repeats this with the cache. Each start is a process. Memory is the peak of private memory of the
process and its children beyond imports, without mapped files. Only one text is on the disk at a time. With --words, the
tokenizer looks up whole words, which is faster than byte pairs.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.prepare import MIB, VOCABULARY, Peak, make_tokenizer
from benchmarks.report import Row, finish, target

SEQUENCE = 1024
_BLOCKS_AT_ONCE = 4096
MOST_GROWTH_MIB = 64  # from the smallest to the largest


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gigabytes", type=float, nargs="+", default=[0.4, 1.5, 5, 10])
    arguments.add_argument("--document", nargs="+", default=["file"], choices=["file", "line", "block"])
    arguments.add_argument("--text", type=Path, help="a real text")
    arguments.add_argument("--words", action="store_true", help="tokenise whole words instead of byte pairs")
    arguments.add_argument("--directory", type=Path, help="needs room for the text and its tokens")
    arguments.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # unit and folder, for a child process
    given = smoke.parse(arguments, gigabytes=[0.002], text=smoke.text)
    if given.part is not None:
        part(given.part[0], Path(given.part[1]))
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="aliquot-large-", dir=given.directory) as folder:
        blocks = real_blocks(given.text)
        (make_tokenizer_of_words if given.words else make_tokenizer)(Path(folder), blocks)
        for gigabytes in given.gigabytes:
            make(Path(folder) / "text.txt", blocks, gigabytes)
            for unit in given.document:
                for start in ("first", "again"):
                    row = {"GB": gigabytes, "a document is a": unit, "start": start, **measured(unit, folder)}
                    print(row, flush=True)
                    rows.append(row)
                shutil.rmtree(Path(folder) / "cache")
    targets = []
    for unit in given.document:
        firsts = [row for row in rows if row["a document is a"] == unit and row["start"] == "first"]
        again = max(row["seconds"] for row in rows if row["a document is a"] == unit and row["start"] == "again")
        for what in ("tokens", "index"):
            growth = firsts[-1][f"{what}, MiB"] - firsts[0][f"{what}, MiB"]
            targets.append(target(f"growth_of_{what}_{unit}_mib", growth, MOST_GROWTH_MIB, "lower"))
        targets.append(target(f"second_start_{unit}_s", again, 10, "lower"))
    finish("preparing large texts", rows, targets, given.json)


def real_blocks(text: Path | None) -> list[str]:
    """Return the blocks between blank lines."""
    if text is None:
        from aliquot.data.data_files import find_files

        whole = "\n\n".join(file.read_text() for file in find_files("stdlib", "benchmark", Counter()))
    else:
        whole = text.read_text()
    return [block for block in re.split(r"\n\s*\n", whole) if block.strip()]


def make_tokenizer_of_words(folder: Path, texts: list[str]) -> None:
    """Write a tokenizer of the most frequent words of the texts to `folder`/tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<s>", "</s>", "<unk>"]
    trainer = trainers.WordLevelTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder / "tokenizer")


def make(path: Path, blocks: list[str], gigabytes: float) -> None:
    draw, written, number = random.Random(0), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < gigabytes * 1e9:
            drawn = draw.choices(blocks, k=_BLOCKS_AT_ONCE)
            written += file.write("".join(f"{number + n} {block}\n\n" for n, block in enumerate(drawn)))
            number += len(drawn)


def measured(unit: str, folder: str) -> Row:
    """Return the measurements of a new process."""
    command = [sys.executable, __file__, "--part", unit, folder]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
    row: Row = json.loads(told)
    return row


def part(unit: str, folder: Path) -> None:
    from aliquot.config.schema import DataSection
    from aliquot.data.batches import Batches
    from aliquot.data.prepare import prepare
    from aliquot.data.workload import BatchSize

    section = DataSection(
        path=str(folder / "text.txt"), document=unit, sequence_length=SEQUENCE, tokenizer=str(folder / "tokenizer"),
        cache_directory=folder / "cache",
    )  # fmt: skip
    text_bytes = (folder / "text.txt").stat().st_size
    told = 0

    def progress(what: str, done_bytes: int, total_bytes: int) -> None:
        nonlocal told
        told += 1

    with Peak() as peak:
        begun = time.perf_counter()
        prepared = prepare(section, None, VOCABULARY, progress)
        tokens_s, of_tokens = time.perf_counter() - begun, peak.beyond()
        Batches.of(prepared, section, 1, BatchSize(total=8, micro=1), None).step_batch(0, 0, 1)
        seconds, of_index = time.perf_counter() - begun, peak.beyond()
    (store,) = prepared.open_train().values()
    row = {
        "documents": store.documents,
        "tokens": len(store.tokens),
        "seconds": round(seconds, 1),
        "tokens, MB/s": round(text_bytes / 1e6 / tokens_s, 1),
        "progress told": told,
        "tokens, MiB": round(of_tokens / MIB),
        "index, MiB": round(of_index / MIB),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
