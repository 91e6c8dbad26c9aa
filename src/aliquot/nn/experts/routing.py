"""Sort tokens by the experts that they chose, and count how evenly the experts are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from aliquot.nn.row_counts import filled_up


@dataclass(frozen=True)
class Routing:
    """Slots 0 to S - 1, ordered by expert.

    The slots of an expert are filled up to one of a few numbers of rows, because oneDNN keeps a kernel for every shape
    of product. Filling slots hold token 0 with a score of 0.
    """

    tokens: Tensor  # int64 [S]: the token of each slot
    slots: Tensor  # int64 [T, K]: the slot of each choice of a token; S: not one of these experts
    spans: tuple[tuple[int, int], ...]  # [expert]: its range of slots; empty without tokens
    counts: tuple[int, ...]  # [expert]: tokens that chose it

    @property
    def size(self) -> int:
        return len(self.tokens)

    def scores(self, choice_scores: Tensor) -> Tensor:
        """Return the score of each slot, [T, K] -> [S]; 0 for filling slots."""
        slot_scores = choice_scores.new_zeros(self.size + 1)
        slot_scores[self.slots.reshape(-1)] = choice_scores.reshape(-1)
        return slot_scores[: self.size]


def route(chosen: Tensor, experts: int) -> Routing:
    """Sort tokens by expert. `chosen`: int64 [T, K], experts of each token; a number beyond the last is no expert.

    On the meta device, without values, all experts are chosen equally often.
    """
    if chosen.is_meta:
        return _even(chosen, experts)
    tokens, per_token = chosen.shape
    flat = chosen.reshape(-1)
    counts = torch.bincount(flat.clamp(max=experts), minlength=experts + 1)[:experts].tolist()
    ends = list(accumulate(filled_up(count) for count in counts))
    starts = [0, *ends[:-1]]
    choice_count = sum(counts)
    order = torch.argsort(flat, stable=True)[:choice_count]
    shifts = [start - before for start, before in zip(starts, [0, *accumulate(counts[:-1])], strict=True)]
    shift = torch.tensor(shifts, device=flat.device).repeat_interleave(
        torch.tensor(counts, device=flat.device), output_size=choice_count
    )
    places = torch.arange(choice_count, device=flat.device) + shift
    slots = flat.new_full((flat.numel(),), ends[-1])
    slots[order] = places
    token_of_slot = flat.new_zeros(ends[-1])
    token_of_slot[places] = order // per_token
    return Routing(token_of_slot, slots.view(tokens, per_token), tuple(zip(starts, ends, strict=True)), tuple(counts))


def _even(chosen: Tensor, experts: int) -> Routing:
    count = -(-chosen.numel() // experts)
    rows = filled_up(count)
    spans = tuple((expert * rows, (expert + 1) * rows) for expert in range(experts))
    return Routing(chosen.new_empty(experts * rows), torch.empty_like(chosen), spans, (count,) * experts)


_COUNTS = "aliquot_tokens_per_expert"
_BALANCE = "aliquot_router_loss"

Counts = list[list[int]]  # [layer][expert]


def count(module: nn.Module, tokens: Sequence[int]) -> None:
    """Add to the numbers of tokens that chose each expert of `module` in training."""
    before = getattr(module, _COUNTS, None) or [0] * len(tokens)
    setattr(module, _COUNTS, [a + b for a, b in zip(before, tokens, strict=True)])


def take_counts(model: nn.Module) -> Counts:
    """Return and reset the counts of each module of experts, in the model's order."""
    modules = [module for module in model.modules() if hasattr(module, _COUNTS)]
    counts = [getattr(module, _COUNTS) for module in modules]
    for module in modules:
        delattr(module, _COUNTS)
    return counts


def note_balance(model: nn.Module, loss: Tensor, tokens: Tensor) -> None:
    """Record the auxiliary `loss` of a micro-batch, which applies to each of its predicted `tokens`."""
    before = getattr(model, _BALANCE, None)
    weighted = torch.stack([loss.detach().float() * tokens, tokens.float()])
    setattr(model, _BALANCE, weighted if before is None else before + weighted)


def take_balance(model: nn.Module) -> list[float]:
    """Return and reset [sum of losses over tokens, tokens]; empty without a record."""
    noted = getattr(model, _BALANCE, None)
    if noted is None:
        return []
    delattr(model, _BALANCE)
    values: list[float] = noted.tolist()
    return values


def mean_balance(rank_balances: Sequence[list[float]]) -> dict[str, object]:
    """Return the mean auxiliary loss of a token over the global batch, for metrics.jsonl."""
    balances = [noted for noted in rank_balances if noted]
    return {"router_loss": sum(loss for loss, _ in balances) / max(1, sum(n for _, n in balances))} if balances else {}


def spread(rank_counts: Sequence[Counts]) -> dict[str, object]:
    """Return the load of the busiest expert over the mean, by layer, and unused experts, for metrics.jsonl.

    A load of 1 is even; a load of the number of experts means that one expert has all tokens.
    """
    layers = max(map(len, rank_counts), default=0)
    if not layers:
        return {}
    known_counts = [counts for counts in rank_counts if len(counts) == layers]  # a rank without a batch has no counts
    totals = [
        [sum(counts_of_expert) for counts_of_expert in zip(*layer, strict=True)]
        for layer in zip(*known_counts, strict=True)
    ]
    return {
        "busiest_expert": [round(max(of) * len(of) / max(1, sum(of)), 3) for of in totals],
        "unused_experts": sum(tokens == 0 for of in totals for tokens in of),
    }
