"""Whether a plan fits what its machines have, and by how much not."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from aliquot.config.schema import RunConfig
from aliquot.core.errors import DoesNotFitError
from aliquot.core.intervals import times_due
from aliquot.planner.phase_memory import START_PRIVATE_BYTES, START_SHARED_BYTES, helper_process_bytes
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine, existing_directory

# Plans of peak memory have been off by up to this much: benchmarks/foresight.py.
UNCERTAINTY = 0.08


def hopeless(plan: Plan) -> bool:
    """It does not fit even if the plan is as much too high as plans have been."""
    of_host = plan.host_peak_bytes_per_rank * (1 - UNCERTAINTY) > plan.host_limit_bytes
    return of_host or plan.peak_bytes_per_rank * (1 - UNCERTAINTY) > plan.limit_bytes


def check_start(config: RunConfig, ranks: int, memory_bytes: int) -> None:
    """Before any rank of a node starts: later ones make a plan, but only if all of them live until then.

    Raises DoesNotFitError where `memory_bytes`, those of the node, do not hold `ranks` processes without a model.
    """
    needed = ranks * START_PRIVATE_BYTES + START_SHARED_BYTES + helper_process_bytes(config, ranks)
    if needed * (1 - UNCERTAINTY) > memory_bytes:
        raise DoesNotFitError(
            f"this run would not fit: the processes of {ranks} ranks need {_gib(needed)} of memory before they have a"
            f" model, and this machine or container has {_gib(memory_bytes)}. Lower launch.ranks (--force starts it all"
            " the same)"
        )


def problems(plan: Plan, machine: Machine) -> list[str]:
    """Each thing that is short, in words; none: it fits."""
    found = []
    if plan.peak_bytes_per_rank > plan.limit_bytes:
        peak, limit = plan.peak_bytes_per_rank, plan.limit_bytes
        beside = f", of which the processes beside them have {_gib(plan.beside_bytes)}" if plan.beside_bytes else ""
        where = "of GPU memory" if plan.device == "cuda" else "of memory"
        found.append(
            f"a rank needs {_gib(peak)} {where} in the phase `{plan.peak.name}` and can have {_gib(limit)}"
            f" ({plan.ranks_per_node} a node of {_gib(plan.limit_bytes_per_node)}{beside}):"
            f" {_gib(peak - limit)} too much"
        )
    if plan.host_peak_bytes_per_rank > plan.host_limit_bytes:
        peak, limit = plan.host_peak_bytes_per_rank, plan.host_limit_bytes
        found.append(
            f"a rank needs {_gib(peak)} of the machine's memory beside its GPU's and can have {_gib(limit)}"
            f" ({plan.ranks_per_node} a node of {_gib(plan.host_limit_bytes_per_node)}): {_gib(peak - limit)} too much"
        )
    if machine.shm_bytes is not None and plan.shm_bytes_per_node > machine.shm_bytes:
        found.append(f"/dev/shm has {_gib(machine.shm_bytes)} and {_gib(plan.shm_bytes_per_node)} are needed there")
    return found


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


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
    device, free = existing_directory(config.offload_directory).stat().st_dev, _free_bytes(config.offload_directory)
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
            found[existing_directory(use.directory).stat().st_dev].append(use)
    return found


def _free_bytes(directory: Path) -> int | None:
    """None: some network file systems say nothing."""
    found = os.statvfs(existing_directory(directory))
    return found.f_bavail * found.f_frsize if found.f_blocks else None
