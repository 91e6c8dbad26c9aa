"""Which modules of a model are experts, by the attributes that transformers' ExpertsInterface defines."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def weights_of(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter] | None:
    """The two large weights of a module of experts that transformers hands to `sorted_experts`; None: it is none."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
        return None
    return module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj  # type: ignore[return-value]


def has_experts(model: nn.Module) -> bool:
    return any(weights_of(module) is not None for module in model.modules())


def experts_weights(model: nn.Module) -> list[nn.Parameter]:
    """Large weights of experts that learn and belong to one module alone."""
    pairs = [weights for module in model.modules() if (weights := weights_of(module)) is not None]
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [each for pair in pairs if all(names[id(w)] == 1 and w.requires_grad for w in pair) for each in pair]
