"""The cost of checkpoints: bytes to write, seconds for which steps wait, and memory for copies of unsaved states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from aliquot.config.schema import RunConfig
from aliquot.core.intervals import is_due, times_due, times_either_due
from aliquot.distributed.topology import RankLayout
from aliquot.models.model_shape import ModelShape, numel
from aliquot.optim.sizes import moment_bytes
from aliquot.planner.step_time import MicroBatchTime

# The fraction of the storage rate that a save reaches while training uses the cores and other processes may write. An
# assumed storage rate has the lower fraction, because a plan of memory must not rely on an assumption.
_MEASURED_REACHED, _ASSUMED_REACHED = 0.8, 0.5
# Elements of int8 moments that a rank decodes and encodes per second while it trains: about the rate of Zen 4 and of a
# Xeon with AMX.
_INT8_NUMEL_PER_S = 5e6
_COPIED_BYTES = 3 * 4  # per parameter: weight and two moments in fp32


@dataclass(frozen=True)
class Saving:
    """The size of one checkpoint, and the speed of its storage."""

    numel: int  # trainable parameters of all ranks
    checkpoint_bytes: int  # written by all nodes together
    storage_bytes_per_s: float  # of all nodes together
    storage_is_measured: bool = False

    @property
    def save_s(self) -> float:
        return self.checkpoint_bytes / self.storage_bytes_per_s


class SaveCounts(NamedTuple):
    """The saves of a run, and the time that they cost training."""

    blocking: int  # saves during which training waits
    overlapped: int  # saves that overlap with steps
    stall_s: float  # total time that steps wait for overlapped saves


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of master weights in fp32 and of moments in their own format."""
    states = config.train.optimizer_states
    moments = sum(
        2 * count * moment_bytes(states, numel(weight), numel(weight[1:])) for weight, count in shape.alike.items()
    )
    return 4 * (shape.numel if config.adapter is None else shape.learned_numel) + moments


def export_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of the exported model or adapter; 0 if the run exports nothing."""
    if not config.checkpoint.export:
        return 0
    if config.model.dtype != "auto":
        itemsize = 4 if config.model.dtype == "float32" else 2
    elif config.adapter is None and config.model.path is not None:
        itemsize = shape.dtype_bytes
    else:
        itemsize = 4 if config.train.chosen_precision == "fp32" or config.adapter is not None else 2
    return itemsize * (shape.numel if config.adapter is None else shape.learned_numel)


def saves_overlap(config: RunConfig, steps: int | None) -> bool:
    """Whether training continues with the next steps during a save."""
    intervals = (config.checkpoint.save_steps, config.best_steps)
    continues = any(every and (steps is None or every < steps) for every in intervals)
    return continues and config.checkpoint.asynchronous


def count_saves(
    config: RunConfig, steps: int, saving: Saving, ranks: int, step_s: float, until_update_s: float
) -> SaveCounts:
    """Count the saves of a run of `steps` steps on `ranks` ranks, and the seconds for which its steps wait.

    With `checkpoint.best`, every evaluation counts as the best so far, and therefore causes a save.

    Args:
        until_update_s: seconds from the beginning of a step to its weight update.
    """
    settings, best = config.checkpoint, config.best_steps
    between = times_either_due(settings.save_steps, best, steps)
    # `between` counts the save of the last step; an unknown number of steps is 0.
    last_step_is_due = steps > 0 and (is_due(settings.save_steps, steps) or is_due(best, steps))
    at_end = settings.last or last_step_is_due or bool(best)
    if not settings.asynchronous:
        return SaveCounts(between + (at_end and not last_step_is_due), overlapped=0, stall_s=0.0)
    overlapped = between - last_step_is_due
    not_copied = max(0, saving.checkpoint_bytes - ranks * settings.buffer_bytes)
    until_copied_s = not_copied / saving.storage_bytes_per_s - until_update_s
    until_next_s = saving.save_s - step_s * min(filter(None, (settings.save_steps, best, steps)), default=0)
    return SaveCounts(int(at_end), overlapped, overlapped * max(0.0, until_copied_s, until_next_s))


def most_checkpoints(config: RunConfig, steps: int, done: int = 0, existing: bool = False) -> int:
    """Return the most checkpoints that a run stores at once.

    With `checkpoint.best`, every evaluation counts as the best so far. A new checkpoint is complete before retention
    deletes an old one.

    Args:
        steps: of the run; 0 if the number is unknown.
        done: steps of the checkpoint that the run resumes from.
        existing: whether the run has checkpoints already.
    """
    settings = config.checkpoint
    most = settings.keep + settings.best + 1
    saves = times_due(settings.save_steps, steps, settings.last)
    saves += settings.best * times_due(config.train.eval_steps, steps)
    future = max(0, saves - times_due(settings.save_steps, done, last=False))
    return min(future + existing, most) if steps else most


def snapshot_bytes(
    config: RunConfig,
    layout: RankLayout,
    steps: int | None,
    saving: Saving,
    micro_batch: MicroBatchTime,
    micro_batches: int,
    freed_bytes: int,
) -> int:
    """Return the bytes by which a running save raises the peak memory of a rank.

    Before an update changes weights and moments that the save has not written yet, the rank copies them in fp32, up to
    `checkpoint.buffer_bytes` (checkpoint/live_parts.py).

    Args:
        micro_batches: per rank and optimizer step.
        freed_bytes: activations of the backward pass, whose memory is free again at the update.
    """
    if not saves_overlap(config, steps):
        return 0

    def unsaved_after(seconds: float) -> int:
        reached = _MEASURED_REACHED if saving.storage_is_measured else _ASSUMED_REACHED
        saved = reached * saving.storage_bytes_per_s * seconds / max(1, saving.checkpoint_bytes)
        if config.train.optimizer_states == "int8":
            saved = min(saved, _INT8_NUMEL_PER_S * seconds * layout.world_size / max(1, saving.numel))
        left = max(0.0, 1 - saved)
        return min(config.checkpoint.buffer_bytes, int(left * _COPIED_BYTES * saving.numel / layout.world_size))

    at_update_s = micro_batches * micro_batch.step_s
    # At first the copies use the memory of freed activations. The next forward pass needs this memory again. Therefore
    # only the copies that the save has not written by then add to the peak.
    return max(unsaved_after(at_update_s + sum(micro_batch.forward)), unsaved_after(at_update_s) - freed_bytes)
