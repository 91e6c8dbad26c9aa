"""The check that a plan fits its machines: memory, /dev/shm and disks."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from aliquot.config.schema import RunConfig
from aliquot.core.errors import DoesNotFitError
from aliquot.core.number_format import count_of, gib
from aliquot.machine.storage import nearest_directory
from aliquot.planner.checkpoint_cost import most_checkpoints
from aliquot.planner.memory_phases import START_PRIVATE_BYTES, START_SHARED_BYTES, helper_process_bytes
from aliquot.planner.memory_plan import UNCERTAINTY
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine


def cannot_fit(plan: Plan) -> bool:
    """Whether the run cannot fit, even if the plan overestimates memory by the largest measured error, UNCERTAINTY."""
    host_is_short = plan.host_peak_bytes_per_rank * (1 - UNCERTAINTY) > plan.host_limit_bytes
    return host_is_short or plan.peak_bytes_per_rank * (1 - UNCERTAINTY) > plan.limit_bytes


def check_start(config: RunConfig, ranks: int, memory_bytes: int) -> None:
    """Check that a node has enough memory for the processes of its ranks, even before the ranks make a plan.

    Raises:
        DoesNotFitError: `memory_bytes`, the memory of the node, is too small for `ranks` processes without a model.
    """
    needed = ranks * START_PRIVATE_BYTES + START_SHARED_BYTES + helper_process_bytes(config, ranks)
    if needed * (1 - UNCERTAINTY) > memory_bytes:
        raise DoesNotFitError(
            f"this run would not fit: the processes of {ranks} ranks need {gib(needed)} of memory before they have a"
            f" model, and this machine or container has {gib(memory_bytes)}. Lower launch.ranks (--force starts the"
            " run anyway)"
        )


def problems(plan: Plan, machine: Machine) -> list[str]:
    """Return a line for each kind of memory that is too small; none if the plan fits."""
    where = f"of {'GPU ' if plan.device == 'cuda' else ''}memory in the phase `{plan.peak.name}`"
    helpers = f", of which the launcher and dashboards take {gib(plan.beside_bytes)}" if plan.beside_bytes else ""
    node = f"{gib(plan.limit_bytes_per_node)}{helpers}"
    lines = [
        f"a rank needs {gib(peak)} {what}, but its limit is {gib(limit)} ({count_of(plan.ranks_per_node, 'rank')} per"
        f" node of {whole}): {gib(peak - limit)} too much"
        for peak, what, limit, whole in (
            (plan.peak_bytes_per_rank, where, plan.limit_bytes, node),
            (
                plan.host_peak_bytes_per_rank, "of host memory", plan.host_limit_bytes,
                gib(plan.host_limit_bytes_per_node),
            ),
        )
        if peak > limit
    ]  # fmt: skip
    if machine.shm_bytes is not None and plan.shm_bytes_per_node > machine.shm_bytes:
        lines.append(f"/dev/shm has {gib(machine.shm_bytes)}, but the run needs {gib(plan.shm_bytes_per_node)} there")
    return lines


@dataclass(frozen=True)
class _DiskUse:
    """Bytes that a run needs on the file system of a directory."""

    directory: Path
    key: str  # the config key that sets the directory
    words: str
    size: int


def full_disks(config: RunConfig, plan: Plan, done: int = 0) -> list[str]:
    """Return a line for each file system that is too small for checkpoints, export and states, with a remedy.

    Args:
        done: steps of the checkpoint that the run resumes from.
    """
    lines = []
    for device, uses in _disk_uses(config, plan, done).items():
        directory = uses[-1].directory
        if (free := _free_bytes(directory)) is None or sum(use.size for use in uses) <= free:
            continue
        fewest = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep": 1})})
        enough = sum(use.size for use in _disk_uses(fewest, plan, done).get(device, [])) <= free
        keys = " and another ".join(dict.fromkeys(use.key for use in uses))
        needs = " and ".join(f"{use.words} {use.size / 1e9:.2f} GB" for use in uses)
        remedy = f"{'checkpoint.keep=1, or ' if enough else ''}another {keys}"
        lines.append(f"{directory} has {free / 1e9:.2f} GB free, and {needs}: set {remedy}")
    return lines


def disk_suffices(config: RunConfig, plan: Plan, done: int = 0) -> bool:
    """Whether the file system of `shard.offload_directory` is large enough for everything that the run puts there."""
    directory = nearest_directory(config.offload_directory)
    free = _free_bytes(directory)
    return free is None or sum(use.size for use in _disk_uses(config, plan, done)[directory.stat().st_dev]) <= free


def _disk_uses(config: RunConfig, plan: Plan, done: int) -> dict[int, list[_DiskUse]]:
    """Return what the run needs on each file system, by device number."""
    run = config.run.directory
    existing = sum(file.stat().st_size for file in (run / "checkpoints").rglob("*") if file.is_file())
    at_once = most_checkpoints(config, plan.steps, done, bool(existing))
    checkpoints = f"{at_once:,} checkpoints take" if at_once > 1 else f"{at_once} checkpoint takes"
    uses: dict[int, list[_DiskUse]] = defaultdict(list)
    for use in (
        _DiskUse(run, "run.directory", checkpoints, max(0, at_once * plan.checkpoint_bytes - existing)),
        _DiskUse(run, "run.directory", "the export takes", plan.export_bytes),
        _DiskUse(
            config.offload_directory, "shard.offload_directory", "optimizer state on disk takes",
            plan.scratch_bytes_per_node,
        ),
    ):  # fmt: skip
        if use.size:
            uses[nearest_directory(use.directory).stat().st_dev].append(use)
    return uses


def _free_bytes(directory: Path) -> int | None:
    """Return the free bytes of the file system; None if it does not report its size, like some network file systems."""
    facts = os.statvfs(nearest_directory(directory))
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None
