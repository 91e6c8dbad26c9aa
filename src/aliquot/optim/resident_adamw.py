"""AdamW for weights that are whole in the memory of one GPU: norm, clipping and update without waiting for the GPU.

The update reads the gradient in the dtype of the backward pass, and writes the master weight, both moments and the
weight of the next forward pass. A compiled update needs one pass over memory; torch's fused AdamW needs several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import SupportsFloat

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from aliquot.machine.device_copies import read_early, send
from aliquot.machine.torch_compile import compile_function
from aliquot.optim.adamw import clip_on_device

_GRAPHS = 256  # one for each size of weight, with and without weight decay


@dataclass(frozen=True)
class ResidentWeight:
    """A weight with its state; all tensors are flat, [numel], and on one device."""

    compute: Tensor  # the weight of forward and backward passes: bf16, or `master` itself
    master: Tensor  # fp32
    exp_avg: Tensor  # fp32
    exp_avg_sq: Tensor  # fp32
    decays: bool  # whether weight decay applies
    rate_ratio: float = 1.0  # multiplies the learning rate


class ResidentAdamW:
    """Updates all weights by their gradients, unless a gradient is not finite."""

    def __init__(
        self,
        weights: Sequence[ResidentWeight],
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        compiled: bool,
    ) -> None:
        self.steps = 0  # completed updates
        self._weights = weights
        self._betas = betas
        self._epsilon = epsilon
        self._weight_decay = weight_decay
        self._compiled = compiled

    def step(self, gradients: Sequence[Tensor], learning_rate: float, max_grad_norm: float) -> SupportsFloat:
        """Clip the gradients to the global norm `max_grad_norm` and update. Return the norm before clipping.

        `gradients`: of each weight, flat, in fp32 or in the compute dtype. If the norm is not finite, weights and
        moments keep their values; the caller then ends the run, because `steps` counts the update.
        """
        norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)
        clip, finite = clip_on_device(norm, max_grad_norm)
        result = read_early(norm)
        if self._compiled:
            self._update_compiled(gradients, learning_rate, torch.stack([clip, finite.float()]))
        else:
            self._update_fused(gradients, learning_rate, clip, finite)
        self.steps += 1
        return result

    def _update_compiled(self, gradients: Sequence[Tensor], rate: float, clip_and_finite: Tensor) -> None:
        beta1, beta2 = self._betas
        corrections = 1 - beta1 ** (self.steps + 1), 1 - beta2 ** (self.steps + 1)
        numbers = {}
        for ratio in {weight.rate_ratio for weight in self._weights}:
            schedule = torch.tensor([rate * ratio, rate * ratio * self._weight_decay, *corrections])
            numbers[ratio] = torch.cat([send(schedule, clip_and_finite.device), clip_and_finite])
        for weight, gradient in zip(self._weights, gradients, strict=True):
            state = [weight.master, weight.exp_avg, weight.exp_avg_sq]
            if weight.compute is not weight.master:
                state.append(weight.compute)
            _kernel(beta1, beta2, self._epsilon, weight.decays)(state, gradient, numbers[weight.rate_ratio])

    def _update_fused(self, gradients: Sequence[Tensor], rate: float, clip: Tensor, finite: Tensor) -> None:
        for decays, ratio in dict.fromkeys((weight.decays, weight.rate_ratio) for weight in self._weights):
            pairs = [
                (weight, gradient)
                for weight, gradient in zip(self._weights, gradients, strict=True)
                if (weight.decays, weight.rate_ratio) == (decays, ratio)
            ]
            adamw(
                [weight.master for weight, _ in pairs], [gradient.float() for _, gradient in pairs],
                [weight.exp_avg for weight, _ in pairs], [weight.exp_avg_sq for weight, _ in pairs], [],
                # A kernel fills them. A copy of a number from the host would wait for the GPU, once for each weight.
                list(torch.full((len(pairs),), float(self.steps), device=clip.device).unbind()),
                fused=True, amsgrad=False, beta1=self._betas[0], beta2=self._betas[1], lr=rate * ratio,
                weight_decay=self._weight_decay if decays else 0.0, eps=self._epsilon, maximize=False,
                grad_scale=1 / clip, found_inf=(~finite).float(),
            )  # fmt: skip
        copied = [weight for weight in self._weights if weight.compute is not weight.master]
        if copied:
            torch._foreach_copy_([weight.compute for weight in copied], [weight.master for weight in copied])


@cache
def _kernel(beta1: float, beta2: float, epsilon: float, decays: bool) -> Callable[..., None]:
    function = partial(_update, betas=(beta1, beta2), epsilon=epsilon, decays=decays)
    return compile_function(function, dynamic=False, recompile_limit=_GRAPHS)


def _update(
    state: Sequence[Tensor],
    gradient: Tensor,
    numbers: Tensor,
    *,
    betas: tuple[float, float],
    epsilon: float,
    decays: bool,
) -> None:
    """Apply AdamW as torch.optim.AdamW documents it, unless a gradient is not finite.

    `state`: master weight, exp_avg and exp_avg_sq; then the weight of forward passes, if it is a tensor of its own.
    """
    master, exp_avg, exp_avg_sq, *compute = state
    rate, decay, correction1, correction2, clip, finite = numbers.unbind()
    clipped = gradient.float() * clip
    first = exp_avg + (clipped - exp_avg) * (1 - betas[0])
    second = exp_avg_sq * betas[1] + clipped * clipped * (1 - betas[1])
    decayed = master * (1 - decay) if decays else master
    updated = decayed - rate / correction1 * first / ((second / correction2).sqrt() + epsilon)
    updated = torch.where(finite > 0, updated, master)
    exp_avg.copy_(torch.where(finite > 0, first, exp_avg))
    exp_avg_sq.copy_(torch.where(finite > 0, second, exp_avg_sq))
    master.copy_(updated)
    for weight in compute:
        weight.copy_(updated)
