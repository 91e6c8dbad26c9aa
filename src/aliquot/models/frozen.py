"""Weights that learn nothing: autograd knows it, and engines give them neither master nor gradient nor moments."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from aliquot.core.errors import ConfigError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the weights whose names match any of `patterns`, of which each must match some. Raises ConfigError."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [weight for name, weight in weights.items() if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, weights, n=1, cutoff=0.0)
            raise ConfigError(f"train.freeze: no weight is named {pattern}; one is {near[0]}, and `*.bias` means many")
        for weight in found:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise ConfigError("train.freeze: nothing is left to learn")
