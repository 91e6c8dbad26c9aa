"""What checkpoints cost a run beside its steps: for some training stands still, for others while more of them is not
written yet than may be copied (checkpoint/live_parts.py)."""

from __future__ import annotations

from dataclasses import dataclass

from aliquot.config.schema import RunConfig
from aliquot.core.intervals import is_due, times_either_due


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
