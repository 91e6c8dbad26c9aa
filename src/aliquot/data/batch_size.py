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

    def sequences(self, world_size: int, sources: int = 1) -> int:
        """Of an optimizer step, of the rank that has most, where each of the `sources` gives equally many."""
        of_sources = [self.total // sources + (source < self.total % sources) for source in range(sources)]
        whole = sum(count // self.micro for count in of_sources)
        rests = sorted((count % self.micro for count in of_sources), reverse=True)
        # Micro-batch m goes to rank m % world_size, the whole ones first.
        of_ranks = [self.micro * len(range(rank, whole, world_size)) for rank in range(world_size)]
        for number, rest in enumerate(rests, whole):
            of_ranks[number % world_size] += rest
        return max(of_ranks)


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
