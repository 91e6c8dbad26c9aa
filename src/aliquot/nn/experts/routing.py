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
    """Slots 0 to S - 1 lie expert by expert. Those of an expert are filled up to a number of rows of which there are
    few: of every shape of product oneDNN keeps a kernel. What fills up is token 0, with a score of 0."""

    tokens: Tensor  # int64 [S]: whose row a slot is
    slots: Tensor  # int64 [T, K]: where each choice of a token lies; S: it chose none of these experts
    spans: tuple[tuple[int, int], ...]  # [expert]: its slots; empty: it was not chosen
    counts: tuple[int, ...]  # [expert]: tokens that chose it

    @property
    def size(self) -> int:
        return len(self.tokens)

    def scores(self, of_choices: Tensor) -> Tensor:
        """[T, K] -> [S]: of each slot, 0 where it only fills up."""
        found = of_choices.new_zeros(self.size + 1)
        found[self.slots.reshape(-1)] = of_choices.reshape(-1)
        return found[: self.size]


def route(chosen: Tensor, experts: int) -> Routing:
    """`chosen`: int64 [T, K], experts of each token; a number beyond the last is none. In order of tokens per expert.

    On the meta device, where nothing is known, all experts are chosen equally often.
    """
    if chosen.is_meta:
        return _even(chosen, experts)
    tokens, per_token = chosen.shape
    flat = chosen.reshape(-1)
    counts = torch.bincount(flat.clamp(max=experts), minlength=experts + 1)[:experts].tolist()
    ends = list(accumulate(filled_up(count) for count in counts))
    starts = [0, *ends[:-1]]
    real = sum(counts)
    order = torch.argsort(flat, stable=True)[:real]
    shifts = [start - before for start, before in zip(starts, [0, *accumulate(counts[:-1])], strict=True)]
    shift = torch.tensor(shifts, device=flat.device).repeat_interleave(
        torch.tensor(counts, device=flat.device), output_size=real
    )
    places = torch.arange(real, device=flat.device) + shift
    slots = flat.new_full((flat.numel(),), ends[-1])
    slots[order] = places
    of_slots = flat.new_zeros(ends[-1])
    of_slots[places] = order // per_token
    return Routing(of_slots, slots.view(tokens, per_token), tuple(zip(starts, ends, strict=True)), tuple(counts))


def _even(chosen: Tensor, experts: int) -> Routing:
    count = -(-chosen.numel() // experts)
    rows = filled_up(count)
    spans = tuple((expert * rows, (expert + 1) * rows) for expert in range(experts))
    return Routing(chosen.new_empty(experts * rows), torch.empty_like(chosen), spans, (count,) * experts)


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
