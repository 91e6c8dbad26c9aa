"""Kill real two-rank runs, or tell them to stop, at random moments, and compare what is left with undisturbed runs.

    python -m tests.tools.crash --kills 300          (make crash KILLS=300)

The runs train on texts, on pairs of answers (with a reference pass) and on a stream. Saves happen at every step; fsync,
rename and removal are slowed down by random pauses, so that kills fall into saving, publishing and retention, too.
After each kill every directory that is named like a checkpoint is verified byte by byte, and the run is started again,
with its states in memory or on disk as chance has it. At its end its curves must equal the undisturbed ones bit for
bit, and nothing may be left of what was on disk.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

import aliquot
from aliquot.checkpoint.directories import directories
from aliquot.distributed.signals import Terminated
from aliquot.tensor_io.manifest import verify
from tests import plain
from tests.run.test_streaming_run import corpus
from tests.runs import OVERFITTING, WORDS, curve, free_port, other_text, write_config

STEPS = 12
RANKS = 2
PAUSE_S = 0.005
TERMINATED = 143
CURVES = ("loss", "grad_norm", "eval_loss")


@dataclass(frozen=True)
class Run:
    """A run that is killed again and again, and the curves of the same run when nothing disturbs it."""

    folder: Path
    configs: tuple[Path, ...]  # of the killed run: chance chooses one for each start
    curves: dict[str, dict[int, float]]
    best: int  # the step that evaluates best
    seconds: float

    @classmethod
    def undisturbed(cls, folder: Path, sections: dict[str, dict[str, Any]]) -> Self:
        config = write_config(folder, "undisturbed", **sections)
        configs = [write_config(folder, "killed", **sections)]
        if "streaming" not in sections["data"]:  # a plan for a disk needs the length of the data
            shard = {"offload": "disk", "memory": 0.1, "offload_directory": str(folder / "scratch")}
            configs.append(folder / "on-disk.yaml")
            configs[1].write_text(yaml.safe_dump({**yaml.safe_load(configs[0].read_text()), "shard": shard}))
        began = time.monotonic()
        assert _wait(_start(config, None)) == [0] * RANKS
        curves = {key: curve(folder / "undisturbed", key) for key in CURVES}
        best = min(curves["eval_loss"], key=lambda step: curves["eval_loss"][step])
        return cls(folder, tuple(configs), curves, best, time.monotonic() - began)

    def check_checkpoints(self) -> int:
        """Verify every directory that is named like a checkpoint; return their number."""
        saved = directories(self.folder / "killed" / "checkpoints")
        for directory in saved:
            verify(directory)
        return len(saved)

    def check_end(self) -> None:
        """Compare a complete run with the undisturbed one, then delete it."""
        killed = self.folder / "killed"
        assert {key: curve(killed, key) for key in CURVES} == self.curves
        left = {path.name for path in (killed / "checkpoints").iterdir()}
        assert left == {"best", *(f"step-{step:08d}" for step in (self.best, STEPS - 1, STEPS))}, left
        assert (killed / "checkpoints" / "best").readlink().name == f"step-{self.best:08d}"
        shutil.rmtree(killed)


def write_inputs(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Write the data of all runs, and return the sections of their configs, by name."""
    for name in ("texts", "preferences", "stream"):
        (folder / name).mkdir()
    plain.save_llama(folder / "model")
    words = [" ".join(random.Random(n).choices(WORDS, k=9)) for n in range(40)]
    pairs = [{"prompt": text[:9], "chosen": text[9:], "rejected": text[20:]} for text in words]
    (folder / "preferences/pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    path = corpus(folder / "stream")
    held_out = {"eval_path": str(other_text(folder)), "eval_fraction": 0.0}
    tokenizer = {"tokenizer": str(folder / "stream/tokenizer"), "tokenizer_vocab_size": None}
    data = {"path": str(folder / "preferences/pairs.jsonl"), "document": None, "sequence_length": 64}
    return {
        "texts": {"data": held_out, "train": OVERFITTING},
        "preferences": {
            "model": {"path": str(folder / "model"), "config": None}, "data": {**data, "eval_fraction": 0.2},
            "train": {"objective": "dpo", "beta": 0.3, "learning_rate": 1e-2},
        },
        "stream": {"data": {"path": str(path), "streaming": True, "shuffle_buffer": 16, **tokenizer, **held_out}},
    }  # fmt: skip


def crash(kills: int, seed: int, folder: Path) -> dict[str, int]:
    """Counts of what happened. Raises AssertionError where anything was lost."""
    os.environ["ALIQUOT_CACHE"] = str(folder / "cache")
    draw = random.Random(seed)
    # Once, before ranks are forked. Forking must find no thread of OpenMP, so a child computes what the runs need.
    for name in ("aliquot.run.trainer", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        settings = pool.apply(write_inputs, (folder,))
    common: dict[str, dict[str, Any]] = {
        "checkpoint": {"every": 1, "best": True, "export": False},
        "train": {"max_steps": STEPS, "logging_steps": 1, "eval_steps": 2},
        "observe": {"report_to": [], "console": "quiet"},
    }
    runs = [
        Run.undisturbed(
            folder / name,
            {key: {**common.get(key, {}), **sections.get(key, {})} for key in {**common, **sections}},
        )
        for name, sections in settings.items()
    ]
    assert runs[0].best < STEPS - 1, "the best checkpoint is kept although it is old"

    kinds = ("kills", "of all ranks", "of one rank", "by SIGTERM", "runs completed", "checkpoints verified")
    counts = dict.fromkeys(kinds, 0)
    while counts["kills"] < kills:
        run = draw.choice(runs)
        children = _start(draw.choice(run.configs), draw.randrange(1 << 30))
        time.sleep(draw.uniform(0, 1.3 * run.seconds))
        kind = draw.choice(("of all ranks", "of one rank", "by SIGTERM"))
        victims = [draw.choice(children)] if kind == "of one rank" else children
        alive = [child for child in victims if _kill(child, signal.SIGTERM if kind == "by SIGTERM" else signal.SIGKILL)]
        if alive and kind != "by SIGTERM":
            # What a launcher does when a rank has died; until then the others may go on or fail, as they like.
            time.sleep(draw.uniform(0, 0.2))
            for child in children:
                if child not in _codes and child not in alive:
                    _kill(child)
        codes = _wait(children)
        if kind == "by SIGTERM":
            # Saved and stopped, complete, or (before training began) ended at once: -15 and the echo of it.
            assert set(codes) in ({TERMINATED}, {0}) or -signal.SIGTERM in codes or 1 in codes, codes
        if alive:
            counts["kills"] += 1
            counts[kind] += 1
        scratch = run.folder / "scratch"
        assert not scratch.exists() or not list(scratch.iterdir())
        counts["checkpoints verified"] += run.check_checkpoints()
        if codes == [0] * RANKS:
            run.check_end()
            counts["runs completed"] += 1
        if alive and counts["kills"] % 50 == 0:
            print(f"{counts['kills']} kills", file=sys.stderr, flush=True)
    return counts


def _start(config: Path, pauses: int | None) -> list[int]:
    """Fork the ranks of a run; their process ids. `pauses`: seed of random pauses around what makes things durable."""
    port, children = free_port(), []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            os._exit(_rank(config, rank, port, pauses))
        children.append(child)
    return children


def _rank(config: Path, rank: int, port: int, pauses: int | None) -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1")
    if pauses is not None:
        _slow_down(random.Random(pauses + rank))
    try:
        aliquot.train(aliquot.read_config(config), force=True)
    except Terminated:
        return TERMINATED
    except Exception as error:
        # Expected where a peer was killed; anything else shows in what the parent verifies.
        if "--debug" in sys.argv:
            print(f"rank {rank}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return 1
    return 0


def _slow_down(draw: random.Random) -> None:
    for module, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
        original = getattr(module, name)

        def slow(*arguments: object, original=original, **options: object) -> object:  # type: ignore[no-untyped-def]
            time.sleep(draw.uniform(0, PAUSE_S))
            result = original(*arguments, **options)
            time.sleep(draw.uniform(0, PAUSE_S))
            return result

        setattr(module, name, slow)


def _kill(child: int, number: int = signal.SIGKILL) -> bool:
    """Whether it was still running."""
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        _codes[child] = os.waitstatus_to_exitcode(status)
        return False
    os.kill(child, number)
    return True


_codes: dict[int, int] = {}


def _wait(children: list[int]) -> list[int]:
    for child in children:
        if child not in _codes:
            _codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [_codes.pop(child) for child in children]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--debug", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = crash(arguments.kills, arguments.seed, Path(folder))
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    print("nothing was lost: every loss and gradient norm equals the undisturbed run's, bit for bit")


if __name__ == "__main__":
    main()
