"""Which rows of a table belong to which expert: tokens sorted by the experts that they chose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

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
