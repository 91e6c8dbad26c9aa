"""Copies of what is being saved: of parts that are not on disk yet when the next update comes.

checkpoint/live_parts.py makes them, in fp32, of the parts that the drain would come to last, as far as
`checkpoint.buffer_bytes` goes.
"""

from __future__ import annotations

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout
from aliquot.planner.timing import MicroBatchTime

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
