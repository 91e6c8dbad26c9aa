"""Which weights AdamW makes smaller: matrices, but no norms and biases; some models have one a head or an expert."""

from __future__ import annotations

import re
from collections.abc import Sequence

# As transformers' Trainer knows them.
_NORM_OR_BIAS = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm(\.|$)")


def decays(name: str, shape: Sequence[int]) -> bool:
    """Whether weight decay applies to the parameter of that name, of whatever model."""
    module, _, own = name.rpartition(".")
    holder = module.rpartition(".")[2]  # a norm within whose name others lie makes none of them
    return len(shape) >= 2 and _NORM_OR_BIAS.search(f"{holder}.{own}".lower()) is None
