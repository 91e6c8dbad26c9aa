"""AdamW on the shards of a rank: `BlockedAdamW` for engine host, torch's fused optimizer for engine fsdp."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from aliquot.machine.torch_compile import compile_function, inductor_options
from aliquot.optim.master_weights import PairedWeights, Weights
from aliquot.optim.moments import ExactValues, Moment, Noise
from aliquot.optim.sizes import BLOCK, SCRATCH_ROWS

_NORM_OR_BIAS = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm(\.|$)")  # as in transformers' Trainer


def decays(name: str, shape: Sequence[int]) -> bool:
    """Whether weight decay applies to a parameter: to matrices, but not to norms and biases.

    The name decides, because some models store norms or biases as a matrix with a row per head or expert.
    """
    module, _, parameter = name.rpartition(".")
    parent = module.rpartition(".")[2]  # modules further up may have "norm" in their name without being norms
    return len(shape) >= 2 and _NORM_OR_BIAS.search(f"{parent}.{parameter}".lower()) is None


def rate_ratio(name: str, loraplus_lr_ratio: float) -> float:
    """Return the learning rate of a weight as a multiple of the rate of the step: LoRA+ multiplies that of B."""
    return loraplus_lr_ratio if ".lora_B." in name else 1.0


def clip_coefficient(grad_norm: float, max_grad_norm: float) -> float:
    """Return the factor for gradients of norm `grad_norm`, clamped to 1 as in torch.nn.utils.clip_grad_norm_."""
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))


def clip_on_device(grad_norm: Tensor, max_grad_norm: float) -> tuple[Tensor, Tensor]:
    """Return `clip_coefficient` in fp32, and whether the norm is finite, without waiting for the device."""
    return (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0).float(), grad_norm.isfinite()


def parameter_groups(
    weights: Sequence[Tensor], decays: Sequence[bool], rate_ratios: Sequence[float], weight_decay: float
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer: weights of one learning rate, with or without weight decay."""
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    for weight, ratio, decaying in zip(weights, rate_ratios, decays, strict=True):
        groups.setdefault((ratio, decaying), []).append(weight)
    return [
        {"params": groups[ratio, decaying], "weight_decay": weight_decay if decaying else 0.0, "rate_ratio": ratio}
        for ratio, decaying in sorted(groups, reverse=True)
    ]


@dataclass(frozen=True)
class FlatShard:
    """A rank's flat range of one weight, with its moments and its gradient [numel], fp32 or bf16."""

    weights: Weights
    exp_avg: Moment
    exp_avg_sq: Moment
    gradient: Tensor
    decays: bool
    start: int  # first element of the range, counted in the whole weight
    rate_ratio: float = 1.0  # multiplies the learning rate


class BlockedAdamW:
    """AdamW block by block: a block stays in the CPU cache while it is loaded, clipped, updated and stored.

    torch's fused AdamW kernel updates the blocks. fp32 state is updated in place. Compressed state is decoded into fp32
    scratch memory and encoded again.
    """

    def __init__(
        self,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        frugal: bool = False,
        longest: int = BLOCK,
        compiled: bool = False,
    ) -> None:
        """Allocate the scratch memory for blocks of up to `longest` elements (`update_block`).

        `frugal`: some moments are bf16 or int8 and need noise for stochastic rounding. `compiled`: a compiled kernel
        updates paired weights with fp32 moments.
        """
        self.steps = 0
        self._betas = betas
        self._epsilon = epsilon
        self._weight_decay = weight_decay
        self._kernel = compile_function(_update_halves, dynamic=True, options=inductor_options()) if compiled else None
        self._scratch = torch.empty(SCRATCH_ROWS, longest)
        self._noise = Noise(longest) if frugal else None

    def step(self, shards: Iterable[FlatShard], learning_rate: float, grad_norm: float, max_grad_norm: float) -> None:
        """Update the shards one by one, with gradients clipped to the global norm `max_grad_norm`."""
        clip = clip_coefficient(grad_norm, max_grad_norm)
        if not math.isfinite(grad_norm):
            raise ValueError(f"the gradient norm is {grad_norm}: nothing to update by")
        if self._noise is not None:
            self._noise.draw(self.steps)
        for shard in shards:
            rate = learning_rate * shard.rate_ratio
            done = self._update_whole(shard, rate, clip)
            # A multiple of the block size of int8 moments.
            unit = max(getattr(moment, "block", 1) for moment in (shard.exp_avg, shard.exp_avg_sq))
            size = max(unit, BLOCK // unit * unit)
            for start in range(done, shard.weights.numel, size):
                self._update(shard, start, min(size, shard.weights.numel - start), rate, clip)
        self.steps += 1

    def _update(self, shard: FlatShard, start: int, count: int, learning_rate: float, clip: float) -> None:
        scratch = self._scratch[:, :count]
        values = shard.weights.load(start, scratch[0])
        gradient = torch.mul(shard.gradient[start : start + count], clip, out=scratch[1])
        exp_avg = shard.exp_avg.load(start, scratch[2])
        exp_avg_sq = shard.exp_avg_sq.load(start, scratch[3])
        adamw(
            [values], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(self.steps))],
            fused=True, amsgrad=False, beta1=self._betas[0], beta2=self._betas[1], lr=learning_rate,
            weight_decay=self._weight_decay if shard.decays else 0.0, eps=self._epsilon, maximize=False,
        )  # fmt: skip
        noise = None if self._noise is None else self._noise.at(shard.start + start, count)
        shard.weights.store(start, values)
        shard.exp_avg.store(start, exp_avg, noise)
        shard.exp_avg_sq.store(start, exp_avg_sq, noise)

    def _update_whole(self, shard: FlatShard, learning_rate: float, clip: float) -> int:
        """Update a whole shard by the compiled kernel, which processes both halves together and reads each value once.

        Return the number of elements; 0 without the kernel, or if it does not suit the formats.
        """
        weights, exp_avg, exp_avg_sq = shard.weights, shard.exp_avg, shard.exp_avg_sq
        if self._kernel is None or not isinstance(weights, PairedWeights) or weights.numel % 2 or not weights.numel:
            return 0
        if not isinstance(exp_avg, ExactValues) or not isinstance(exp_avg_sq, ExactValues):
            return 0
        (beta1, beta2), step = self._betas, self.steps + 1
        decay = self._weight_decay if shard.decays else 0.0
        settings = [clip, 1 - beta1, beta2, 1 - beta2, 1 - learning_rate * decay]
        settings += [learning_rate / (1 - beta1**step), math.sqrt(1 - beta2**step), self._epsilon]
        sequences = (weights.high, shard.gradient, exp_avg.values, exp_avg_sq.values)
        halves = [half for values in sequences for half in (values[: weights.half], values[weights.half :])]
        self._kernel(torch.tensor(settings), weights.low, *halves)
        for replica in weights.replicas:
            replica.copy_(weights.high)
        return weights.numel


def _update_halves(settings: Tensor, low: Tensor, *halves: Tensor) -> None:
    """Unpack paired weights (optim/master_weights.py), apply AdamW as torch.optim.AdamW documents it, and pack again.

    `halves`: first and second half of the bf16 weights, of the gradient, and of both moments.
    """
    high_1, high_2, gradient_1, gradient_2, exp_avg_1, exp_avg_2, exp_avg_sq_1, exp_avg_sq_2 = halves
    clip, one_minus_beta1, beta2, one_minus_beta2, decay, rate, root_correction, epsilon = settings.unbind()
    masters = []
    for high, distance, gradient, exp_avg, exp_avg_sq in (
        (high_1, (low << 16) >> 16, gradient_1, exp_avg_1, exp_avg_sq_1),
        (high_2, low >> 16, gradient_2, exp_avg_2, exp_avg_sq_2),
    ):
        clipped = gradient * clip
        first = exp_avg + (clipped - exp_avg) * one_minus_beta1
        second = exp_avg_sq * beta2 + clipped * clipped * one_minus_beta2
        master = (high.float().view(torch.int32) + distance).view(torch.float32)
        bits = (master * decay - rate * first / (second.sqrt() / root_correction + epsilon)).view(torch.int32)
        high.copy_(((bits + 0x8000) & -0x10000).view(torch.float32))
        exp_avg.copy_(first)
        exp_avg_sq.copy_(second)
        masters.append(bits)
    low.copy_((masters[0] & 0xFFFF) | (masters[1] << 16))


class ShardedAdamW:
    """torch's fused AdamW over local fp32 shards, which it updates in place.

    The moments exist from the start, so that a checkpoint can be restored into them, and the first step allocates no
    more memory for them.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        decays: Sequence[bool],
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        rate_ratios: Sequence[float],
    ) -> None:
        """Give each weight its moments.

        Args:
            weights: leaf tensors.
            decays: for each weight, whether weight decay applies.
            rate_ratios: for each weight, a factor of its learning rate.
        """
        self.weights = list(weights)
        groups = parameter_groups(weights, decays, rate_ratios, weight_decay)
        self._adamw = torch.optim.AdamW(groups, betas=betas, eps=epsilon, fused=True)
        for weight in self.weights:
            self._adamw.state[weight] = {
                "step": torch.zeros((), device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }

    def moment(self, weight: Tensor, kind: str) -> Tensor:
        """Return the `exp_avg` or `exp_avg_sq` of a weight, in the weight's shape."""
        return cast("Tensor", self._adamw.state[weight][kind])

    def set_steps(self, steps: int) -> None:
        """Set the number of completed updates, which Adam's bias correction needs."""
        for weight in self.weights:
            self._adamw.state[weight]["step"].fill_(steps)

    def step(self, learning_rate: float, grad_norm: float | Tensor, max_grad_norm: float) -> None:
        """Clip the gradients to the global norm `max_grad_norm`, update, and drop the gradients.

        If `grad_norm` is not finite, the weights and moments stay unchanged. If it is a tensor on the device of the
        weights, this method does not wait for the device.
        """
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate * group["rate_ratio"]
        if isinstance(grad_norm, Tensor):
            clip, finite = clip_on_device(grad_norm, max_grad_norm)
            # The kernel divides gradients by `grad_scale`, and changes nothing if `found_inf` is 1.
            self._adamw.grad_scale, self._adamw.found_inf = 1 / clip, (~finite).float()  # type: ignore[attr-defined]
            self._adamw.step()
        elif math.isfinite(grad_norm):
            if (coefficient := clip_coefficient(grad_norm, max_grad_norm)) != 1.0:
                torch._foreach_mul_([w.grad for w in self.weights if w.grad is not None], coefficient)
            self._adamw.step()
        for weight in self.weights:
            weight.grad = None
