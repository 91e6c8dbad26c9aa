"""The disks of this machine: how fast they are for states and checkpoints, and whether a run has room on them."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from aliquot.config.due import times_due
from aliquot.config.plan import Plan
from aliquot.config.schema import RunConfig
from aliquot.plan.planned_machine import Machine

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
    from aliquot.offload.disk_rate import disk_rate

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


def short_disks(config: RunConfig, plan: Plan, done: int = 0) -> list[str]:
    """A line for each file system that is too small: checkpoints that exist at once, the export, states on disk.

    `done`: steps behind the checkpoint that a run goes on from."""
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
    wanted: dict[int, list[tuple[str, int]]] = defaultdict(list)
    free: dict[int, tuple[Path, int]] = {}
    for directory, what, size in (
        (run, f"{at_once} checkpoint{'s' if at_once > 1 else ''}", max(0, at_once * plan.checkpoint_bytes - there)),
        (run, "the export", plan.export_bytes),
        (config.offload_directory, "what lies on disk while it trains", plan.scratch_bytes_per_node),
    ):
        place = _existing(directory)
        found = os.statvfs(place)
        if found.f_blocks and size:  # some network file systems say nothing
            device = place.stat().st_dev
            free[device] = (directory, found.f_bavail * found.f_frsize)
            wanted[device].append((what, size))
    return [
        f"{free[device][0]} has {free[device][1] / 1e9:.2f} GB free, and"
        f" {' and '.join(f'{what} take {size / 1e9:.2f} GB' for what, size in sizes)}"
        for device, sizes in wanted.items()
        if sum(size for _, size in sizes) > free[device][1]
    ]
