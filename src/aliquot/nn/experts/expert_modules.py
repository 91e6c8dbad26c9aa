"""Find the modules of a model that are mixtures of experts, and attach data to them.

An engine attaches a receiver for the experts' gradients. A backward pass attaches the number of tokens per expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

Passes = Callable[[range], Iterable[int]]
Counts = list[list[int]]  # [layer][expert]

# Names of attributes of modules and weights
_GRADIENTS = "aliquot_expert_gradients"
_PASSES = "aliquot_expert_passes"
_COUNTS = "aliquot_tokens_per_expert"
_BALANCE = "aliquot_router_loss"


def weights_of(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter] | None:
    """Return the two large weights of a module of experts; None for any other module."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
        return None
    up, down = (getattr(module, name) for name in weight_names(module))
    return up, down


def weight_names(experts: nn.Module) -> tuple[str, str]:
    """Return the names of the two large weights in a module of experts."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def has_experts(model: nn.Module) -> bool:
    return any(weights_of(module) is not None for module in model.modules())


def experts_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the large weights of experts that are trainable and belong to a single module."""
    pairs = [weights for module in model.modules() if (weights := weights_of(module)) is not None]
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [weight for pair in pairs if all(names[id(w)] == 1 and w.requires_grad for w in pair) for weight in pair]


class ExpertGradients(Protocol):
    """Receiver of one weight's gradient in a backward pass: all blocks in order, or the whole gradient."""

    def begin(self) -> Iterable[tuple[int, int]] | None:
        """Begin a gradient. Return the experts [a, b) of each block; None: `whole` must get the whole gradient."""
        ...

    def buffer(self, first: int, last: int) -> Tensor:
        """Return a buffer for the gradient of experts [first, last), in the weight's dtype. Call `publish` next."""
        ...

    def publish(self, present: bool) -> None:
        """Publish the buffer. If `present` is false, the buffer is not filled, because no expert had a token."""
        ...

    def whole(self, gradient: Tensor) -> None: ...


def send_to(weight: nn.Parameter, gradients: ExpertGradients | None) -> None:
    """Send the gradient of `weight` to `gradients` instead of autograd. None: autograd gets the gradient again."""
    setattr(weight, _GRADIENTS, gradients)


def gradients_of(weight: Tensor) -> ExpertGradients | None:
    return getattr(weight, _GRADIENTS, None)


def pass_over(module: nn.Module, passes: Passes) -> None:
    """Set which experts of `module` are computed, in order: `passes` selects from the numbers of all experts."""
    setattr(module, _PASSES, passes)


def passes_of(module: nn.Module) -> Passes:
    passes: Passes = getattr(module, _PASSES, iter)
    return passes


def count(module: nn.Module, tokens: Sequence[int]) -> None:
    """Add `tokens` to the numbers of tokens that chose each expert of `module` in training."""
    before = getattr(module, _COUNTS, None) or [0] * len(tokens)
    setattr(module, _COUNTS, [a + b for a, b in zip(before, tokens, strict=True)])


def take_counts(model: nn.Module) -> Counts:
    """Return and reset the counts of each module of experts, in the model's order."""
    return [vars(module).pop(_COUNTS) for module in model.modules() if hasattr(module, _COUNTS)]


def note_balance(model: nn.Module, loss: Tensor, tokens: Tensor) -> None:
    """Record the auxiliary `loss` of a micro-batch, which counts in the mean once for each predicted token."""
    before = getattr(model, _BALANCE, None)
    weighted = torch.stack([loss.detach().float() * tokens, tokens.float()])
    setattr(model, _BALANCE, weighted if before is None else before + weighted)


def take_balance(model: nn.Module) -> list[float]:
    """Return and reset [sum of losses over tokens, tokens]; empty if nothing was recorded."""
    noted: Tensor | None = vars(model).pop(_BALANCE, None)
    return [] if noted is None else noted.tolist()


def mean_balance(rank_balances: Sequence[list[float]]) -> dict[str, object]:
    """Return the mean auxiliary loss of a token over the global batch, for metrics.jsonl."""
    balances = [noted for noted in rank_balances if noted]
    return {"router_loss": sum(loss for loss, _ in balances) / max(1, sum(n for _, n in balances))} if balances else {}


def spread(rank_counts: Sequence[Counts]) -> dict[str, object]:
    """Return, for metrics.jsonl, each layer's ratio of the busiest expert's tokens to the mean, and unused experts.

    A ratio of 1 means that all experts get the same number of tokens. If one of E experts gets all tokens, the ratio
    is E.
    """
    layers = max(map(len, rank_counts), default=0)
    if not layers:
        return {}
    known_counts = [counts for counts in rank_counts if len(counts) == layers]  # a rank without a batch has no counts
    totals = [[sum(ranks) for ranks in zip(*layer, strict=True)] for layer in zip(*known_counts, strict=True)]
    return {
        "busiest_expert": [round(max(of) * len(of) / max(1, sum(of)), 3) for of in totals],
        "unused_experts": sum(tokens == 0 for of in totals for tokens in of),
    }
