"""Batch arithmetic: two of global batch, per-device batch and accumulation steps fix the third."""

from __future__ import annotations

from dataclasses import dataclass

from aliquot.config.schema import RunConfig, TrainSection


@dataclass(frozen=True)
class BatchSize:
    """In sequences. `micro` is one rank's forward pass, `total` one optimizer step over all ranks."""

    total: int
    micro: int

    def micro_batches(self, world_size: int, sources: int = 1) -> int:
        """Of a rank and optimizer step, at most: each micro-batch is of one of the `sources`."""
        of_all = min(self.total, -(-self.total // self.micro) + sources - 1)
        return -(-of_all // world_size)


def batch_size(train: TrainSection, world_size: int) -> BatchSize:
    """The sizes that `train` means at `world_size` ranks."""
    total, steps = train.global_batch_size, train.gradient_accumulation_steps
    if total is None:
        micro = train.per_device_train_batch_size
        return BatchSize(micro * (steps or 1) * world_size, micro)
    if steps is None:
        return BatchSize(total, min(train.per_device_train_batch_size, total))
    return BatchSize(total, -(-total // (steps * world_size)))


def micro_batch_tokens(config: RunConfig, world_size: int) -> int:
    """At most, of one rank's forward pass."""
    return batch_size(config.train, world_size).micro * config.data.sequence_length
