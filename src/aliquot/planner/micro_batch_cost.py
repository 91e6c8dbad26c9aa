"""What a micro-batch costs: numbers alone, which activations.py finds and planned_model.py keeps. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from aliquot.nn.loss.logits_room import HOST_BYTES

# ("matmul", batch, m, k, n, itemsize) -> how often; ("memory", operation, bytes of its largest tensor) -> bytes moved;
# ("calls",) -> operations of any kind.
Work = defaultdict[tuple[Any, ...], float]
Works = tuple[Work, Work]  # of layers as they are; of compiled ones

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Step:
    """How micro-batches are computed."""

    precision: Literal["bf16", "fp32"]
    checkpointing: Checkpointing
    device: Literal["cpu", "cuda"]
    looks_up: bool  # the embedding's gradient is a row a token, as in engine host; else a whole table
    head_gradient: bool  # the head's gradient exists as a whole; engine host writes it into its ring piece by piece
    compiled: bool = False  # decoder layers
    logits_bytes: int = HOST_BYTES  # that the loss keeps at once
    copies_transposed: bool = False  # products with a transposed left side are made from copies (machine/matmul.py)


WORKS = ("forward", "backward", "evaluation")  # passes of a micro-batch


@dataclass(frozen=True)
class MicroBatchCost:
    """Bytes alive beside weights and their gradients, and the operations of one micro-batch."""

    saved_bytes: int  # for the backward pass, when the forward pass of the layers is done
    layer_bytes: int  # of them, what the largest layer saved
    forward_bytes: int  # most at once, head and loss included
    backward_bytes: int
    evaluation_bytes: int  # most at once in a forward pass without gradients
    largest_bytes: int  # the largest block of a forward and backward pass
    # Products of different shape or order, in rows of one length: of attention's tiles and of an expert for each shape
    # of a tile or number of rows, the head's for each number of rows that have a label, and all others. 0: attention
    # and experts are not ours, or there are none.
    tile_products: int
    expert_products: int
    other_products: int
    head_products: int
    forward: Work
    backward: Work
    evaluation: Work  # a forward pass without gradients

    def with_work(self, of: Sequence[tuple[float, MicroBatchCost]]) -> MicroBatchCost:
        """These bytes, and so much of the work of each of those."""
        works: dict[str, Any] = {}
        for name in WORKS:
            works[name] = defaultdict(float)
            for share, cost in of:
                for key, amount in getattr(cost, name).items():
                    works[name][key] += share * amount
        return replace(self, **works)

    def plus(self, other: MicroBatchCost, base: MicroBatchCost, times: int) -> MicroBatchCost:
        """This, and `times` what `other` has more than `base`; the largest block is the largest of all,
        and products are those of the one that has most."""
        values: dict[str, Any] = {}
        for field in fields(self):
            own, less, more = (getattr(each, field.name) for each in (self, base, other))
            if isinstance(own, int):
                values[field.name] = own + times * (more - less)
            else:
                work: Work = defaultdict(float)
                work.update({key: own[key] + times * (more[key] - less[key]) for key in {*own, *less, *more}})
                values[field.name] = work
        of_most = ("largest_bytes", "other_products", "head_products")
        most = {name: max(getattr(self, name), getattr(other, name)) for name in of_most}
        return replace(MicroBatchCost(**values), **most)


Costs = tuple[MicroBatchCost, MicroBatchCost]  # of layers as they are; of compiled ones, which differ in work alone
