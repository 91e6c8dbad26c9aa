"""AdamW on flat shards in blocks that stay in the cache: unpack, clip, update, pack and publish in one visit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.optim.adamw import adamw

from aliquot.optim.moments import ExactMoment, Moment, Noise
from aliquot.optim.weights import Weights

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 17  # elements: 512 KiB of fp32


@dataclass(frozen=True)
class FlatShard:
    """One rank's flat range of one weight, with its moments and its gradient [numel], fp32 or bf16."""

    weights: Weights
    exp_avg: Moment
    exp_avg_sq: Moment
    gradient: Tensor
    decays: bool  # matrices do; norms and biases do not
    start: int  # of the range in the whole tensor


class BlockedAdamW:
    """torch's fused AdamW kernel, block by block. Only exact moments are updated where they lie."""

    def __init__(
        self, shards: Sequence[FlatShard], betas: tuple[float, float], epsilon: float, weight_decay: float
    ) -> None:
        self.shards = list(shards)
        self.steps = 0
        self._betas = betas
        self._epsilon = epsilon
        self._weight_decay = weight_decay
        longest = max(map(_block_size, shards), default=1)
        self._scratch = torch.empty(4, longest)
        frugal = any(not isinstance(shard.exp_avg, ExactMoment) for shard in shards)
        self._noise = Noise(longest) if frugal else None

    def step(self, learning_rate: float, grad_norm: float, max_grad_norm: float | None) -> None:
        """Scale gradients so that their global norm is at most `max_grad_norm`, and update."""
        clip = 1.0
        # As torch.nn.utils.clip_grad_norm_: the coefficient is clamped to 1.
        if max_grad_norm is not None and grad_norm + 1e-6 > max_grad_norm:
            clip = max_grad_norm / (grad_norm + 1e-6)
        if not math.isfinite(grad_norm):
            raise ValueError(f"the gradient norm is {grad_norm}: nothing to update by")
        if self._noise is not None:
            self._noise.draw(self.steps)
        for shard in self.shards:
            size = _block_size(shard)
            for start in range(0, shard.weights.numel, size):
                self._update(shard, start, min(size, shard.weights.numel - start), learning_rate, clip)
        self.steps += 1

    def _update(self, shard: FlatShard, start: int, count: int, learning_rate: float, clip: float) -> None:
        room = self._scratch[:, :count]
        values = shard.weights.load(start, room[0])
        gradient = torch.mul(shard.gradient[start : start + count], clip, out=room[1])
        exp_avg = shard.exp_avg.load(start, room[2])
        exp_avg_sq = shard.exp_avg_sq.load(start, room[3])
        adamw(
            [values], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(self.steps))],
            fused=True, amsgrad=False, beta1=self._betas[0], beta2=self._betas[1], lr=learning_rate,
            weight_decay=self._weight_decay if shard.decays else 0.0, eps=self._epsilon, maximize=False,
        )  # fmt: skip
        noise = None if self._noise is None else self._noise.at(shard.start + start, count)
        shard.weights.store(start, values)
        shard.exp_avg.store(start, exp_avg, noise)
        shard.exp_avg_sq.store(start, exp_avg_sq, noise)


def _block_size(shard: FlatShard) -> int:
    """Whole blocks of quantised moments."""
    unit = max(getattr(shard.exp_avg, "block", 1), getattr(shard.exp_avg_sq, "block", 1))
    return max(unit, BLOCK // unit * unit)
