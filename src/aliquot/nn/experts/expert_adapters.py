"""Low-rank adapters of experts: each expert's weight W becomes W + B A, with A [r, in] and B [out, r].

`sorted_experts` multiplies the rows of an expert with A and B, right beside the product with W. The sum W + B A never
exists. Model code attaches the source of A and B to a module of experts, because only this code knows peft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from aliquot.nn.experts.expert_modules import weight_names

Factors = tuple[Tensor, Tensor]  # A [E, r, in] and B [E, out, r], which includes the scaling of the adapter

_FACTORS = "aliquot_expert_adapters"  # attribute of a module: {name of its weight: source of its factors}


def attach_factors(experts: nn.Module, weight_name: str, source: Callable[[], Factors | None]) -> None:
    """Let `source` give the adapter of a weight of `experts` for each pass; None: the pass has no adapter."""
    vars(experts).setdefault(_FACTORS, {})[weight_name] = source


def adapters_of(experts: nn.Module) -> list[LowRank | None]:
    """Return the adapters of both weights of a module of experts, in the order of `weights_of`."""
    sources = getattr(experts, _FACTORS, {})
    factors = [
        # peft itself has already added the change to a parametrized weight.
        sources[name]() if name in sources and not is_parametrized(experts, name) else None
        for name in weight_names(experts)
    ]
    return [None if pair is None else LowRank(*pair) for pair in factors]


@dataclass(frozen=True)
class LowRank:
    """The adapter of one weight of all experts."""

    a: Tensor
    b: Tensor

    def add_forward(self, expert: int, rows: Tensor, out: Tensor) -> None:
        """Add the adapter's product of `rows` [n, in] to `out` [n, out]."""
        out.addmm_(rows @ self.a[expert].t(), self.b[expert].t())

    def add_backward(self, expert: int, gradient: Tensor, out: Tensor) -> None:
        """Add the gradient of the rows to `out` [n, in], from the `gradient` of the product [n, out]."""
        out.addmm_(gradient @ self.b[expert], self.a[expert])

    def write_gradients(self, expert: int, rows: Tensor, gradient: Tensor, into: LowRank) -> None:
        """Write the gradients of A and B of an expert into the tensors of `into`."""
        torch.mm((gradient @ self.b[expert]).t(), rows, out=into.a[expert])
        torch.mm(gradient.t(), rows @ self.a[expert].t(), out=into.b[expert])

    def zeros(self) -> LowRank:
        """Return zeros of the same shapes, because an expert without tokens has a gradient of zero."""
        return LowRank(torch.zeros_like(self.a), torch.zeros_like(self.b))
