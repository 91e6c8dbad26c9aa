"""How evenly tokens are spread over experts: what a mixture that falls apart shows first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_ATTRIBUTE = "aliquot_tokens_per_expert"
_BALANCE = "aliquot_router_loss"

Counts = list[list[int]]  # [layer][expert]


def count(module: nn.Module, tokens: Sequence[int]) -> None:
    """So many tokens more have chosen each expert of `module`, and been learned from."""
    before = getattr(module, _ATTRIBUTE, None) or [0] * len(tokens)
    setattr(module, _ATTRIBUTE, [a + b for a, b in zip(before, tokens, strict=True)])


def counted(model: nn.Module) -> Counts:
    """Of each module of experts, in the model's order, since this was asked last."""
    modules = [module for module in model.modules() if hasattr(module, _ATTRIBUTE)]
    found = [getattr(module, _ATTRIBUTE) for module in modules]
    for module in modules:
        delattr(module, _ATTRIBUTE)
    return found


def note_balance(model: nn.Module, loss: Tensor, tokens: Tensor) -> None:
    """A micro-batch of so many predicted `tokens` has added `loss` for its routers' balance to the loss of each."""
    before = getattr(model, _BALANCE, None)
    own = torch.stack([loss.detach().float() * tokens, tokens.float()])
    setattr(model, _BALANCE, own if before is None else before + own)


def noted_balance(model: nn.Module) -> list[float]:
    """[sum of losses over tokens, tokens] since this was asked last; empty: none was noted."""
    found = getattr(model, _BALANCE, None)
    if found is None:
        return []
    delattr(model, _BALANCE)
    values: list[float] = found.tolist()
    return values


def mean_balance(of_ranks: Sequence[list[float]]) -> dict[str, object]:
    """For metrics.jsonl: what balance has added to the loss of a token, on average over the global batch."""
    known = [noted for noted in of_ranks if noted]
    return {"router_loss": sum(loss for loss, _ in known) / max(1, sum(n for _, n in known))} if known else {}


def spread(of_ranks: Sequence[Counts]) -> dict[str, object]:
    """For metrics.jsonl: of each layer the load of its busiest expert over the mean, and how many got no token.

    1 is even; the number of experts: one has all.
    """
    layers = max(map(len, of_ranks), default=0)
    if not layers:
        return {}
    known = [counts for counts in of_ranks if len(counts) == layers]  # a rank without a batch has counted nothing
    totals = [[sum(each) for each in zip(*layer, strict=True)] for layer in zip(*known, strict=True)]
    return {
        "busiest_expert": [round(max(of) * len(of) / max(1, sum(of)), 3) for of in totals],
        "unused_experts": sum(tokens == 0 for of in totals for tokens in of),
    }
