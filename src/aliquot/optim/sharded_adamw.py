"""AdamW on a rank's own shards: fp32 weights, fp32 moments allocated up front, clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class ShardedAdamW:
    """torch's fused AdamW over local shards. `weights` are updated in place; matrices decay, norms and biases do not.

    The moments exist from the start, so that a checkpoint can be restored into them and memory is known before the
    first step.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],  # fp32 local shards, leaves
        decays: Sequence[bool],
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
    ) -> None:
        self.weights = list(weights)
        groups = [
            {"params": [w for w, d in zip(weights, decays, strict=True) if d], "weight_decay": weight_decay},
            {"params": [w for w, d in zip(weights, decays, strict=True) if not d], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, eps=epsilon, fused=True)
        for weight in self.weights:
            self._adamw.state[weight] = {
                "step": torch.zeros((), device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }

    def moment(self, index: int, kind: str) -> Tensor:
        """The `exp_avg` or `exp_avg_sq` of weight `index`, of that weight's shape."""
        moment: Tensor = self._adamw.state[self.weights[index]][kind]
        return moment

    def set_steps(self, steps: int) -> None:
        """The moments are those after `steps` updates."""
        for weight in self.weights:
            self._adamw.state[weight]["step"].fill_(steps)

    def step(self, learning_rate: float, grad_norm: float, max_grad_norm: float | None) -> None:
        """Scale the gradients so that their global norm is at most `max_grad_norm`, update, drop the gradients.

        A norm that is not finite updates nothing.
        """
        if math.isfinite(grad_norm):
            # As torch.nn.utils.clip_grad_norm_: the coefficient is clamped to 1.
            if max_grad_norm is not None and grad_norm + 1e-6 > max_grad_norm:
                coefficient = max_grad_norm / (grad_norm + 1e-6)
                torch._foreach_mul_([w.grad for w in self.weights if w.grad is not None], coefficient)
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
        for weight in self.weights:
            weight.grad = None
