"""Kill a real two-rank run, or tell it to stop, at random moments, and compare what is left with an undisturbed run.

    python -m tests.tools.crash --kills 300          (make crash KILLS=300)

Saves happen at every step; fsync, rename and removal are slowed down by random pauses, so that kills fall into saving,
publishing and retention too. After each kill every directory that is named like a checkpoint is verified byte by byte,
and the run is started again, with its states in memory or on disk as chance has it; at its end the loss curve must
equal the undisturbed one bit for bit, and nothing may be left of what was on disk.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

import aliquot
from aliquot.checkpoint.directories import directories
from aliquot.distributed.signals import Terminated
from aliquot.tensor_io.manifest import verify
from tests.runs import OVERFITTING, curve, other_text, write_config

STEPS = 12
RANKS = 2
PAUSE_S = 0.005
TERMINATED = 143


def crash(kills: int, seed: int, folder: Path) -> dict[str, int]:
    """Counts of what happened. Raises AssertionError where anything was lost."""
    os.environ["ALIQUOT_CACHE"] = str(folder / "cache")
    draw = random.Random(seed)
    settings: dict[str, Any] = {
        "checkpoint": {"every": 1, "best": True, "export": False},
        "train": {"max_steps": STEPS, "logging_steps": 1, "eval_steps": 2, **OVERFITTING},
        "data": {"eval_path": str(other_text(folder)), "eval_fraction": 0.0},
        "observe": {"report_to": [], "console": "quiet"},
    }
    undisturbed = write_config(folder, "undisturbed", **settings)
    config = write_config(folder, "killed", **settings)
    on_disk = folder / "on-disk.yaml"
    shard = {"offload": "disk", "memory": 0.1, "offload_directory": str(folder / "scratch")}
    on_disk.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "shard": shard}))
    for name in (
        "aliquot.run.trainer",
        "transformers.models.llama.modeling_llama",
    ):  # once, before ranks are forked, which
        importlib.import_module(name)  # must find no thread of OpenMP: nothing may be computed here
    began = time.monotonic()
    assert _wait(_start(undisturbed, None)) == [0] * RANKS
    run_s = time.monotonic() - began
    expected, expected_norms = curve(folder / "undisturbed"), curve(folder / "undisturbed", "grad_norm")
    evaluations = curve(folder / "undisturbed", "eval_loss")
    best = min(evaluations, key=lambda step: evaluations[step])
    assert best < STEPS - 1, "the best checkpoint is kept although it is old"

    kinds = ("kills", "of all ranks", "of one rank", "by SIGTERM", "runs completed", "checkpoints verified")
    counts = dict.fromkeys(kinds, 0)
    while counts["kills"] < kills:
        children = _start(draw.choice((config, on_disk)), draw.randrange(1 << 30))
        time.sleep(draw.uniform(0, 1.3 * run_s))
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
        assert not (folder / "scratch").exists() or not list((folder / "scratch").iterdir())
        for directory in directories(folder / "killed" / "checkpoints"):
            verify(directory)
            counts["checkpoints verified"] += 1
        if codes == [0] * RANKS:
            assert curve(folder / "killed") == expected
            assert curve(folder / "killed", "grad_norm") == expected_norms
            left = {path.name for path in (folder / "killed" / "checkpoints").iterdir()}
            assert left == {"best", *(f"step-{step:08d}" for step in (best, STEPS - 1, STEPS))}, left
            assert (folder / "killed" / "checkpoints" / "best").readlink().name == f"step-{best:08d}"
            counts["runs completed"] += 1
            shutil.rmtree(folder / "killed")
        if alive and counts["kills"] % 50 == 0:
            print(f"{counts['kills']} kills", file=sys.stderr, flush=True)
    return counts


def _start(config: Path, pauses: int | None) -> list[int]:
    """Fork the ranks of a run; their process ids. `pauses`: seed of random pauses around what makes things durable."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
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
