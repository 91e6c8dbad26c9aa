"""Batch arithmetic: two of global batch, micro-batch and gradient accumulation steps fix the third."""

from __future__ import annotations

from dataclasses import dataclass

from aliquot.config.schema import RunConfig, TrainSection


@dataclass(frozen=True)
class BatchSize:
    """Sizes in sequences."""

    total: int  # of an optimizer step over all ranks
    micro: int  # of one rank's forward pass

    def micro_batches(self, world_size: int, sources: int = 1) -> int:
        """Return the most micro-batches of a rank per optimizer step; a micro-batch comes from one of `sources`."""
        all_ranks = min(self.total, -(-self.total // self.micro) + sources - 1)
        return -(-all_ranks // world_size)

    def sequences(self, world_size: int, sources: int = 1) -> int:
        """Return the most sequences of a rank in an optimizer step to which the `sources` contribute equally."""
        per_source = [self.total // sources + (source < self.total % sources) for source in range(sources)]
        whole = sum(count // self.micro for count in per_source)
        remainders = sorted((count % self.micro for count in per_source), reverse=True)
        # Micro-batch m goes to rank m % world_size; full micro-batches come first.
        per_rank = [self.micro * len(range(rank, whole, world_size)) for rank in range(world_size)]
        for number, remainder in enumerate(remainders, whole):
            per_rank[number % world_size] += remainder
        return max(per_rank)


def batch_size(train: TrainSection, world_size: int) -> BatchSize:
    """Return the batch sizes of the section `train` at `world_size` ranks."""
    total, steps = train.global_batch_size, train.gradient_accumulation_steps
    if total is None:
        micro = train.per_device_train_batch_size
        return BatchSize(micro * (steps or 1) * world_size, micro)
    if steps is None:
        return BatchSize(total, min(train.per_device_train_batch_size, total))
    return BatchSize(total, -(-total // (steps * world_size)))


def micro_batch_tokens(config: RunConfig, world_size: int) -> int:
    """Return the most tokens of one rank's forward pass."""
    return batch_size(config.train, world_size).micro * config.data.sequence_length
