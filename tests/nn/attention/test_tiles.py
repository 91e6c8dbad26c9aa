"""However documents lie in a row, the products that attention and the head make of it have few different shapes."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aliquot.nn.attention.document_attention import Documents, Scoring
from aliquot.nn.attention.tiled_attention import TiledAttention
from aliquot.nn.attention.tiles import cut
from aliquot.nn.head_loss import head_loss_on
from aliquot.nn.logits_gradient import IGNORE
from aliquot.nn.product_shapes import LONGEST_BINNED, NARROWEST, QUERY_BLOCK, tile_shapes

TOKENS = 1024
WIDTHS = (LONGEST_BINNED - NARROWEST) // 32 + 1


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The shapes and orders of all matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.shapes.add((str(func.overloadpacket), *((*x.shape, *order(x)) for x in args[:2])))
        return func(*args, **(kwargs or {}))


def order(x: Tensor) -> tuple[bool, bool]:
    """What oneDNN's kernels depend on beside the shape: which side is in one piece; whether a batch of transposed ones
    is, of which torch makes a copy that is not transposed if not."""
    rows = x.stride(-1) == 1
    return rows, rows or x.ndim == 2 or x.stride(0) == x.shape[1] * x.shape[2]


def largest_side(products: Products) -> int:
    return max(max(side[1:3]) for _, *sides in products.shapes for side in sides)


def packing(draw: random.Random) -> tuple[int, ...]:
    """Documents of very unequal lengths that fill a row."""
    longest = draw.choice((20, 100, 300, TOKENS))
    lengths: list[int] = []
    while (room := TOKENS - sum(lengths)) > 0:
        lengths.append(min(room, draw.randint(1, longest)))
    return (0, *accumulate(lengths))


@pytest.mark.parametrize("window", [None, 200])
def test_bins_and_blocks_come_in_few_sizes(window: int | None) -> None:
    draw = random.Random(0)
    bins: set[tuple[int, int]] = set()
    blocks: set[tuple[int, int]] = set()
    for _ in range(300):
        tiles = cut(packing(draw), window, torch.zeros(0))
        bins |= {(each.count, each.width) for each in tiles.bins}
        blocks |= {(block.last - block.first, block.last - block.key) for long in tiles.longs for block in long.blocks}
    assert len(bins) <= 3 * WIDTHS and len(bins) + len(blocks) <= tile_shapes(TOKENS, TOKENS, window)
    assert {queries for queries, _ in blocks} == {QUERY_BLOCK}
    assert len(blocks) <= TOKENS // QUERY_BLOCK


def test_products_of_a_run_come_in_few_shapes() -> None:
    """Forward and backward: three kernels a size, for the two products each way and the two of keys and values."""
    draw = random.Random(0)
    seen = []
    with Products() as products:
        for _ in range(25):
            query, key, value = (torch.randn(1, heads, TOKENS, 4, requires_grad=True) for heads in (2, 1, 1))
            documents = Documents(packing(draw), TiledAttention())
            TiledAttention().attend(query, key, value, documents, Scoring(0.3)).sum().backward()
            seen.append(len(products.shapes))
    assert seen[-1] <= 5 * (3 * WIDTHS + TOKENS // QUERY_BLOCK)
    assert seen[-1] - seen[15] <= 25  # most of them in the first steps


@pytest.mark.few(2)
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(("heads", "window"), [((4, 2, 2), None), ((2, 2, 2), 200)])
def test_after_the_first_row_no_row_needs_another_kernel(
    heads: tuple[int, ...], window: int | None, selective: bool
) -> None:
    """Or memory would grow over hundreds of steps: 47 MiB in one of 125 M with rows of 2,048 tokens, with AMX."""
    draw, attention = random.Random(1), TiledAttention(selective)

    def step(edges: tuple[int, ...]) -> None:
        query, key, value = (torch.randn(1, count, edges[-1], 4, requires_grad=True) for count in heads)
        attention.attend(query, key, value, Documents(edges, attention), Scoring(0.3, window)).sum().backward()
        attention.warm_up_shapes(edges, most=edges[-1])

    with Products() as products:
        step((0, LONGEST_BINNED, TOKENS))
        met = len(products.shapes)
        for _ in range(30):
            step(packing(draw))
        assert len(products.shapes) == met
        step((0, TOKENS + 512))  # a longer row can need more
        assert len(products.shapes) > met


def test_products_of_blocks_are_not_made_where_all_documents_are_short() -> None:
    attention, few = TiledAttention(), tuple(range(0, TOKENS + 1, 64))
    query = torch.randn(1, 1, TOKENS, 4, requires_grad=True)
    attention.attend(query, query, query, Documents(few, attention), Scoring(0.3)).sum().backward()
    for edges, longest in ((few, LONGEST_BINNED), ((0, TOKENS), TOKENS)):
        with Products() as products:
            attention.warm_up_shapes(edges, TOKENS)
        assert largest_side(products) == longest
    with Products() as products:
        attention.warm_up_shapes(few, TOKENS)
    assert not products.shapes  # all are there


def test_no_document_is_longer_than_a_sequence_however_many_are_in_a_row() -> None:
    """Or kernels would be made that nothing needs, in time that grows with the square of the row."""
    attention, edges = TiledAttention(), tuple(range(0, 4200 + 1, 600))
    query = torch.randn(1, 1, edges[-1], 4, requires_grad=True)
    with Products() as products:
        attention.attend(query, query, query, Documents(edges, attention), Scoring(0.3)).sum().backward()
        attention.warm_up_shapes(edges, most=700)
    assert len(products.shapes) <= 4 * tile_shapes(edges[-1], 700, None)  # three, and products of both sides' orders
    assert largest_side(products) == 768  # in whole blocks


@pytest.mark.parametrize("longest", [300, 700])
def test_blocks_are_met_up_to_the_next_power_of_two(longest: int) -> None:
    attention = TiledAttention()
    query = torch.randn(1, 1, longest, 4, requires_grad=True)
    attention.attend(query, query, query, Documents((0, longest), attention), Scoring(0.3)).sum().backward()
    with Products() as products:
        attention.warm_up_shapes((0, longest), most=4096)
    assert largest_side(products) == (512 if longest == 300 else 1024)


def test_products_of_the_head_come_in_few_shapes() -> None:
    draw = random.Random(0)
    weight = torch.randn(50, 8, requires_grad=True)
    with Products() as products:
        for _ in range(100):
            hidden = torch.randn(256, 8, requires_grad=True)
            labels = torch.randint(0, 50, (256,))
            labels[torch.rand(256) < draw.random()] = IGNORE
            _, scaled = head_loss_on("cpu")(hidden, weight, labels, 1.0)
            scaled.backward()
    assert len(products.shapes) <= 3 * 9  # forward, and the gradients of both: of 0 to 8 eighths of the rows


@pytest.mark.parametrize("learned", [0, 1, 31, 33, 255, 256])
def test_rows_without_a_label_add_nothing(learned: int) -> None:
    """They fill up the products: loss and gradients are those of the rows with a label alone."""

    def computed(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaf, weight = hidden.clone().requires_grad_(), torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
        weight.requires_grad_()
        summed, scaled = head_loss_on("cpu")(leaf, weight, labels, 0.5)
        scaled.backward()
        assert leaf.grad is not None and weight.grad is not None
        with torch.no_grad():
            assert torch.allclose(head_loss_on("cpu")(leaf, weight, labels, 0.5)[0], summed, rtol=1e-5)
        return summed, leaf.grad, weight.grad

    hidden = torch.randn(256, 8, generator=torch.Generator().manual_seed(2))
    labels = torch.full((256,), IGNORE)
    places = torch.randperm(256, generator=torch.Generator().manual_seed(3))[:learned].sort().values
    labels[places] = places % 50
    summed, of_hidden, of_weight = computed(hidden, labels)
    alone, of_own, weight_alone = computed(hidden[places], labels[places])
    assert torch.allclose(summed, alone, rtol=1e-6)
    assert torch.allclose(of_weight, weight_alone, rtol=1e-5, atol=1e-6)
    assert torch.allclose(of_hidden[places], of_own, rtol=1e-5, atol=1e-6)
    assert of_hidden.count_nonzero() == of_hidden[places].count_nonzero()
