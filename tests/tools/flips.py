"""Flip single bits of the newest checkpoint of a real run, and compare how the run goes on with an undisturbed one.

    python -m tests.tools.flips --flips 100

So many bits of each file are flipped, one at a time, half of them in the header where the file has one. After each flip
the run is started again: it must go back one checkpoint or, every other time, take the mirror's copy, and end with the
losses and gradient norms of the undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import aliquot
from aliquot.tensor_io.manifest import verify
from tests.runs import curve, write_config

STEPS = 4
FLIPPED, BEFORE = f"step-{STEPS - 1:08d}", f"step-{STEPS - 2:08d}"


def flip_bits(flips: int, seed: int, folder: Path) -> Counter[str]:
    """Flips of each file. Raises AssertionError where a flip was not taken for damage."""
    os.environ["ALIQUOT_CACHE"] = str(folder / "cache")
    logging.getLogger("aliquot").setLevel(logging.ERROR)
    draw = random.Random(seed)
    mirror = f"file://{folder}/mirror"
    settings: dict[str, Any] = {
        "checkpoint": {"every": 1, "keep": 3, "export": False},
        "train": {"max_steps": STEPS, "logging_steps": 1},
        "data": {"eval_fraction": 0.0},
        "observe": {"report_to": [], "console": "quiet"},
    }
    config = write_config(folder, "run", **settings)
    aliquot.train(aliquot.read_config(config))
    directory, stopped = folder / "run", folder / "stopped"
    expected = curve(directory), curve(directory, "grad_norm")
    shutil.rmtree(directory / "checkpoints" / f"step-{STEPS:08d}")
    directory.rename(stopped)

    counts = Counter[str]()
    for name in sorted(path.name for path in (stopped / "checkpoints" / FLIPPED).iterdir()):
        for number in range(flips):
            shutil.copytree(stopped, directory)
            shutil.copytree(stopped / "checkpoints", folder / "mirror" / "run")
            bit = flip(directory / "checkpoints" / FLIPPED / name, draw, in_header=number % 4 < 2)
            has_mirror = number % 2 == 1
            what = f"bit {bit} of {name}, {'with' if has_mirror else 'without'} a mirror"
            events = (directory / "events.jsonl").read_text()
            try:
                aliquot.train(aliquot.read_config(config, [f"checkpoint.mirror={mirror}"] if has_mirror else []))
            except Exception as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
            resumed = (directory / "events.jsonl").read_text().removeprefix(events)
            assert f"/{FLIPPED if has_mirror else BEFORE}" in resumed.partition("\n")[0], what
            assert (curve(directory), curve(directory, "grad_norm")) == expected, what
            for checkpoint in (directory / "checkpoints").glob("step-*"):
                verify(checkpoint)
            counts[name] += 1
            shutil.rmtree(directory)
            shutil.rmtree(folder / "mirror")
        print(f"{name}: {counts[name]} flips", flush=True)
    return counts


def flip(path: Path, draw: random.Random, in_header: bool) -> int:
    """Flip a random bit of a file, of the header of a safetensors file if it is to be there; which one."""
    data = bytearray(path.read_bytes())
    end = len(data)
    if in_header and path.suffix == ".safetensors":
        end = 8 + int.from_bytes(data[:8], "little")
    bit = draw.randrange(8 * end)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return bit


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=100, help="of each file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = flip_bits(arguments.flips, arguments.seed, Path(folder))
    print(f"{counts.total()} flips in {len(counts)} files: each ended with the undisturbed losses and gradient norms")


if __name__ == "__main__":
    main()
