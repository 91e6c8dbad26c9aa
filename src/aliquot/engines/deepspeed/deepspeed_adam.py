"""AdamW for DeepSpeed's flat groups: its own C++ one for states that are offloaded, else torch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aliquot.engines.base import EngineSpec
from aliquot.optim.decay import decays


def adamw(
    weights: Sequence[tuple[str, nn.Parameter]], spec: EngineSpec, settings: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """AdamW over two groups, matrices with weight decay and the rest without, as all engines have it."""
    decaying = [w for name, w in weights if decays(name, _shape(w))]
    rest = [w for name, w in weights if not decays(name, _shape(w))]
    groups = [{"params": decaying, "weight_decay": spec.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {
        "lr": 0.0,
        "betas": (spec.adam_beta1, spec.adam_beta2),
        "eps": spec.adam_epsilon,
    }
    offload = settings["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    if offload == "none" or not settings.get("zero_force_ds_cpu_optimizer", True):
        return torch.optim.AdamW(groups, **options)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    return optimizer


def prepare_states(optimizer: Any) -> None:
    """Make the zero moments that Adam would make in its first step: the engine's parts exist from the start."""
    for flat in optimizer.fp32_partitioned_groups_flat:
        optimizer.optimizer.state[flat] = {
            "step": _step(optimizer.optimizer, 0),
            "exp_avg": torch.zeros_like(flat, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(flat, requires_grad=False),
        }


def set_steps(optimizer: Any, steps: int) -> None:
    """Set the step that Adam's bias correction counts from."""
    for flat in optimizer.fp32_partitioned_groups_flat:
        optimizer.optimizer.state[flat]["step"] = _step(optimizer.optimizer, steps)


def _step(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.tensor(float(steps)) if type(optimizer) is torch.optim.AdamW else steps


def _shape(weight: Any) -> tuple[int, ...]:
    return tuple(weight.ds_shape)
