"""The disks of this machine: how fast they are for states and checkpoints, and whether a run has room on them."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from aliquot.config.schema import RunConfig
from aliquot.core.intervals import times_due
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine

_PIECE_BYTES, _PIECES = 4 << 20, 4


def with_disks(machine: Machine, config: RunConfig) -> Machine:
    """With the rates of this machine's disks: of the one that checkpoints go to, measured in a tenth of a second, and
    of the one that `config` puts states on, in half of one. Raises StorageError."""
    if not machine.here:
        return machine
    if config.cluster is None:
        machine = replace(machine, written_bytes_per_s=_written_bytes_per_s(_existing(config.run.directory)))
    if config.shard.offload != "disk":
        return machine
    from aliquot.offload.stream import disk_rate

    return replace(machine, disk_bytes_per_s=disk_rate(config.offload_directory))


def _written_bytes_per_s(directory: Path) -> float | None:
    """As checkpoints are written: through the page cache, and fsynced. None: nothing can be written there."""
    piece, fastest = os.urandom(_PIECE_BYTES), 0.0
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            for _ in range(2):  # others may have written meanwhile
                file.seek(0)
                began = time.perf_counter()
                for _ in range(_PIECES):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                fastest = max(fastest, _PIECES * _PIECE_BYTES / (time.perf_counter() - began))
    except OSError:  # which the run itself will tell of
        return None
    return fastest


def _existing(directory: Path) -> Path:
    return next(each for each in (directory.absolute(), *directory.absolute().parents) if each.is_dir())


@dataclass(frozen=True)
class _Use:
    """Of a file system: `key` of the config says that it is this one."""

    directory: Path
    key: str
    words: str
    size: int


def short_disks(config: RunConfig, plan: Plan, done: int = 0) -> list[str]:
    """A line for each file system that is too small: checkpoints that exist at once, the export, states on disk; and
    what helps. `done`: steps behind the checkpoint that a run goes on from."""
    found = []
    for device, uses in _uses(config, plan, done).items():
        directory = uses[-1].directory
        if (free := _free_bytes(directory)) is None or sum(use.size for use in uses) <= free:
            continue
        fewest = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep": 1})})
        enough = sum(use.size for use in _uses(fewest, plan, done).get(device, [])) <= free
        keys = " and another ".join(dict.fromkeys(use.key for use in uses))
        told = " and ".join(f"{use.words} {use.size / 1e9:.2f} GB" for use in uses)
        helps = f"{'checkpoint.keep=1, or ' if enough else ''}another {keys}"
        found.append(f"{directory} has {free / 1e9:.2f} GB free, and {told}: set {helps}")
    return found


def has_room(config: RunConfig, plan: Plan, done: int = 0) -> bool:
    """Whether the disk that states go to is large enough for all that lies on it."""
    device, free = _existing(config.offload_directory).stat().st_dev, _free_bytes(config.offload_directory)
    return free is None or sum(use.size for use in _uses(config, plan, done)[device]) <= free


def _uses(config: RunConfig, plan: Plan, done: int) -> dict[int, list[_Use]]:
    """By device."""
    run = config.run.directory
    checkpoints = run / "checkpoints"
    every = config.checkpoint.every
    saves = times_due(every, plan.steps, config.checkpoint.last) if plan.steps else 2
    there = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    kept = config.checkpoint.keep + config.checkpoint.best
    if config.checkpoint.best:
        saves += times_due(config.train.eval_steps, plan.steps)  # at most
    to_come = max(0, saves - times_due(every, done, last=False))
    at_once = min(to_come + bool(there), kept + 1)  # a new one is complete before an old one goes
    counted = f"{at_once:,} checkpoints take" if at_once > 1 else f"{at_once} checkpoint takes"
    found: dict[int, list[_Use]] = defaultdict(list)
    for use in (
        _Use(run, "run.directory", counted, max(0, at_once * plan.checkpoint_bytes - there)),
        _Use(run, "run.directory", "the export takes", plan.export_bytes),
        _Use(
            config.offload_directory, "shard.offload_directory", "what lies on disk while it trains takes",
            plan.scratch_bytes_per_node,
        ),
    ):  # fmt: skip
        if use.size:
            found[_existing(use.directory).stat().st_dev].append(use)
    return found


def _free_bytes(directory: Path) -> int | None:
    """None: some network file systems say nothing."""
    found = os.statvfs(_existing(directory))
    return found.f_bavail * found.f_frsize if found.f_blocks else None
