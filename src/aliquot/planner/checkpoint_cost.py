"""What checkpoints cost a run: seconds for which steps wait, and memory for copies of unsaved parts."""

from __future__ import annotations

from dataclasses import dataclass

from aliquot.config.schema import RunConfig
from aliquot.core.intervals import is_due, times_either_due
from aliquot.distributed.topology import RankLayout
from aliquot.models.model_shape import ModelShape, numel
from aliquot.optim.sizes import moment_bytes
from aliquot.planner.timing import MicroBatchTime


@dataclass(frozen=True)
class Saves:
    waited: int  # training stands still for all of each
    beside: int  # that go on beside steps
    stall_s: float  # for which steps wait, of all those together


def saves_of(
    config: RunConfig,
    steps: int,
    checkpoint_bytes: int,
    bytes_per_s: float,
    ranks: int,
    step_s: float,
    until_update_s: float,
) -> Saves:
    """Of a whole run, as if with `checkpoint.best` each evaluation were the best so far. `until_update_s`: from the
    beginning of a step."""
    saving = config.checkpoint
    best = config.train.eval_steps if saving.best else 0
    between = times_either_due(saving.every, best, steps)
    ends = is_due(saving.every, steps) or is_due(best, steps)  # counted among those
    at_end = saving.last or ends or bool(best)
    if not saving.asynchronous:
        return Saves(between + (at_end and not ends), 0, 0.0)
    beside = between - ends
    save_s = checkpoint_bytes / bytes_per_s
    not_copied_s = max(0, checkpoint_bytes - ranks * saving.buffer_bytes) / bytes_per_s - until_update_s
    not_ended_s = save_s - step_s * min(every for every in (saving.every, best, steps) if every) if steps else 0.0
    return Saves(int(at_end), beside, beside * max(0.0, not_copied_s, not_ended_s))


# Of the rate that disks were measured at: others may write there, and training has the cores. Of one that nobody has
# measured: what a run needs must not depend on it.
_OF_MEASURED, _OF_ASSUMED = 0.8, 0.5
# Of a rank whose moments in int8 are decoded and encoded beside training: about what Zen 4 and a Xeon with AMX reach.
_INT8_NUMEL_PER_S = 5e6
_COPIED_BYTES = 3 * 4  # of a parameter: weight and two moments


def saves_beside(config: RunConfig, steps: int | None) -> bool:
    """Whether steps follow while a checkpoint is being saved."""
    kept_best = config.train.eval_steps if config.checkpoint.best else 0
    goes_on = any(every and (steps is None or every < steps) for every in (config.checkpoint.every, kept_best))
    return goes_on and config.checkpoint.asynchronous


def snapshot_bytes(
    config: RunConfig,
    layout: RankLayout,
    steps: int | None,
    numel: int,
    checkpoint_bytes: int,
    storage_bytes_per_s: float,
    each: MicroBatchTime,
    micro_batches: int,
    freed_bytes: int,
    measured: bool = False,
) -> int:
    """What copies add to the peak of a rank. `numel`: parameters that learn, on all ranks; `checkpoint_bytes` and
    `storage_bytes_per_s`: of all nodes together; `micro_batches`: of a rank and step; `freed_bytes`: that it saves for
    a backward pass, free again when an update comes; `measured`: the rate of storage is."""
    if not saves_beside(config, steps):
        return 0
    forward_s, backward_s = sum(each.forward), sum(each.backward)

    def left_after(seconds: float) -> int:
        part = _OF_MEASURED if measured else _OF_ASSUMED
        done = part * storage_bytes_per_s * seconds / max(1, checkpoint_bytes)
        if config.train.optimizer_states == "int8":
            done = min(done, _INT8_NUMEL_PER_S * seconds * layout.world_size / max(1, numel))
        left = max(0.0, 1 - done)
        return min(config.checkpoint.buffer_bytes, int(left * _COPIED_BYTES * numel / layout.world_size))

    at_update = micro_batches * (forward_s + backward_s)
    # Made where activations were, which return with the next forward pass: what is written until then adds nothing.
    return max(left_after(at_update + forward_s), left_after(at_update) - freed_bytes)


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Master weights as fp32, moments as they are kept (checkpoint/checkpoint_files.py)."""
    states = config.train.optimizer_states
    moments = sum(2 * count * moment_bytes(states, numel(each), numel(each[1:])) for each, count in shape.alike.items())
    return 4 * (shape.numel if config.adapter is None else shape.learned_numel) + moments
