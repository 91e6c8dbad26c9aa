"""Measure memory and seconds of the index of many documents: private memory must not grow with them.

python benchmarks/index.py --millions 2 40 160 --json index.json

10 GB of short lines are about 160 million documents, which take hours to tokenise. The benchmark therefore draws only
their lengths (25 tokens on average), and the file of tokens has no content. For each size, one process packs the
documents, makes the first epoch and reads a batch; another makes the second epoch; a third opens everything again, as
later starts do. Memory is the peak of private memory beyond imports, without mapped files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.prepare import MIB, Peak
from benchmarks.report import Row, finish, target

SEQUENCE = 1024
_DOCUMENTS_AT_ONCE = 1 << 20
MOST_GROWTH_MIB = 64  # from the smallest to the largest
PARTS = {"first epoch": 0, "second epoch": 1, "again": 0}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--millions", type=float, nargs="+", default=[2, 40, 160], help="millions of documents")
    arguments.add_argument("--apart", action="store_true", help="one document per sequence (data.packing=false)")
    arguments.add_argument("--directory", type=Path, help="needs 60 bytes per document, 100 with --apart")
    arguments.add_argument("--part", nargs=3, help=argparse.SUPPRESS)  # store, epoch and packing, for a child process
    given = smoke.parse(arguments, millions=[0.01])
    if given.part is not None:
        part(Path(given.part[0]), int(given.part[1]), given.part[2] == "packed")
        return
    rows: list[Row] = []
    for millions in given.millions:
        with tempfile.TemporaryDirectory(prefix="aliquot-index-", dir=given.directory) as folder:
            make_store(Path(folder), round(millions * 1e6))
            for name, epoch in PARTS.items():
                of_part = [folder, str(epoch), "apart" if given.apart else "packed"]
                told = measured(of_part)
                rows.append({"documents, M": millions, "what": name, **told, "disk, GB": used_gb(Path(folder))})
                print(rows[-1], flush=True)
    most = {name: [row["private, MiB"] for row in rows if row["what"] == name] for name in PARTS}
    targets = [
        target(f"growth_{name.replace(' ', '_')}_mib", of[-1] - of[0], MOST_GROWTH_MIB, "lower")
        for name, of in most.items()
    ]
    finish("the index of many documents", rows, targets, given.json)


def make_store(folder: Path, documents: int) -> None:
    """Write a token store with random offsets and a file of tokens without content."""
    draw, tokens = np.random.default_rng(0), 0
    with (folder / "offsets.bin").open("wb") as file:
        file.write(np.zeros(1, np.int64).tobytes())
        for start in range(0, documents, _DOCUMENTS_AT_ONCE):
            lengths = 2 + draw.geometric(1 / 23, min(_DOCUMENTS_AT_ONCE, documents - start))
            ends = tokens + np.cumsum(lengths)
            file.write(ends.tobytes())
            tokens = int(ends[-1])
    with (folder / "tokens.bin").open("wb") as file:
        file.truncate(tokens * 2)
    counts = {"documents": documents, "tokens": tokens, "text_bytes": None}
    facts = {"dtype": "uint16", **counts, "answers": False, "formats": {"text": documents}}
    facts |= {"left_out": {}}
    (folder / "store.json").write_text(json.dumps(facts))


def measured(of_part: list[str]) -> Row:
    """Return the measurements of a new process."""
    command = [sys.executable, __file__, "--part", *of_part]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
    row: Row = json.loads(told)
    return row


def part(store: Path, epoch: int, packed: bool) -> None:
    from aliquot.data.packing import Packing
    from aliquot.data.token_store import TokenStore

    opened = TokenStore.open(store)
    with Peak() as peak:
        begun, worked = time.perf_counter(), time.process_time()
        packing = Packing.of(opened, SEQUENCE, packed)
        made_s = time.perf_counter() - begun
        packing.epoch(1, epoch).sequence(0)
        row = {
            "pieces, M": round(len(packing.pieces.start) / 1e6, 1),
            "sequences, M": round(packing.sequences / 1e6, 2),
            "packing, s": round(made_s, 1),
            "epoch, s": round(time.perf_counter() - begun - made_s, 1),
            "of a core, s": round(time.process_time() - worked, 1),
            "private, MiB": round(peak.beyond() / MIB),
        }
    print(json.dumps(row))


def used_gb(folder: Path) -> float:
    """Return the disk space of all files of a folder."""
    blocks = sum(path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
    return round(blocks * 512 / 1e9, 2)


if __name__ == "__main__":
    main()
