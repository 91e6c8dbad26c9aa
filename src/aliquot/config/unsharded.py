"""What engine fsdp keeps whole on every rank within a step: what a plan decides and the engine does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unsharded:
    weights: bool = False  # in the compute dtype, from the first forward pass of a step until its last backward pass
    gradients: bool = False  # their sums in fp32, until the last micro-batch: reduced once a step

    def __bool__(self) -> bool:
        return self.weights or self.gradients

    @property
    def words(self) -> str:
        """For people."""
        kept = [name for name, whole in (("weights", self.weights), ("gradients", self.gradients)) if whole]
        return " and ".join(kept)


SHARDED = Unsharded()
