"""Attention backends against attention as it is defined, in fp64, forward and backward.

Lengths lie on both sides of where the tiled backend changes its way: documents above 256 tokens are cut into blocks of
128 queries, and probabilities beyond 128 for each token are computed again in the backward pass.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aliquot.nn.attention.document_attention import AttentionBackend, Documents, ReferenceAttention, Scoring
from aliquot.nn.attention.tiled_attention import TiledAttention
from aliquot.nn.attention.tiles import cut
from aliquot.nn.product_shapes import saved_numel

HEAD_DIM = 32  # flex_attention takes 16 and more
SHORT = (1, 40, 2, 97)  # packed around the long one
HEADS = {"grouped": (4, 2), "alone": (2, 2)}


def results(
    backend: AttentionBackend,
    lengths: tuple[int, ...],
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    softcap: float | None = None,
    has_sinks: bool = False,
    value_dim: int = HEAD_DIM,
) -> list[Tensor]:
    """The output of a row of documents, and the gradients of queries, keys, values and sinks."""
    generator = torch.Generator().manual_seed(sum(lengths))
    edges = (0, *accumulate(lengths))
    shapes = [(1, count, edges[-1], HEAD_DIM) for count in heads]
    shapes += [(1, heads[1], edges[-1], value_dim), *([(heads[0],)] if has_sinks else [])]
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16().to(dtype).requires_grad_()
        for shape in shapes
    ]
    scoring = Scoring(HEAD_DIM**-0.5, window, softcap, inputs[3] if has_sinks else None)
    out = backend.attend(*inputs[:3], Documents(edges, backend).on(torch.device("cpu")), scoring)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).bfloat16().to(dtype)
    out.backward(weights)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def assert_equal(found: list[Tensor], expected: list[Tensor], error: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=error * float(theirs.abs().max()))


@pytest.mark.few(12)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 100], ids=["whole", "window"])
@pytest.mark.parametrize("packed", [False, True], ids=["single", "packed"])
@pytest.mark.parametrize("length", [255, 257, 513, 700, 1500])
def test_tiled_is_exact(length: int, packed: bool, window: int | None, heads: str) -> None:
    lengths = (*SHORT[:2], length, *SHORT[2:]) if packed else (length,)
    case = (lengths, window, HEADS[heads], torch.float64)
    assert_equal(results(TiledAttention(), *case), results(ReferenceAttention(), *case), 1e-12)


@pytest.mark.parametrize("window", [1, 128, 129, 256, 600])
def test_tiled_is_exact_where_windows_end_at_blocks(window: int) -> None:
    case = ((257, 700), window, HEADS["alone"], torch.float64)
    assert_equal(results(TiledAttention(), *case), results(ReferenceAttention(), *case), 1e-12)


def test_tiled_in_bf16_is_as_near_as_bf16_is() -> None:
    """Eight bits of probabilities and of results: two roundings of 2^-9 each, and gradients take two more."""
    lengths = (*SHORT, 700)
    exact = results(ReferenceAttention(), lengths, 100, HEADS["grouped"], torch.float64)
    assert_equal(results(TiledAttention(), lengths, 100, HEADS["grouped"], torch.bfloat16), exact, 2**-6)


@pytest.mark.parametrize("window", [None, 100], ids=["whole", "window"])
@pytest.mark.parametrize(
    ("softcap", "has_sinks", "value_dim"),
    [(0.7, False, HEAD_DIM), (None, True, HEAD_DIM), (None, False, 5), (0.7, True, 12)],
    ids=["softcap", "sinks", "narrow-values", "all"],
)
def test_what_layers_ask_for(window: int | None, softcap: float | None, has_sinks: bool, value_dim: int) -> None:
    case = ((*SHORT, 700), window, HEADS["grouped"], torch.float64, softcap, has_sinks, value_dim)
    assert_equal(results(TiledAttention(), *case), results(ReferenceAttention(), *case), 1e-12)


@pytest.mark.parametrize("window", [None, 100], ids=["whole", "window"])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (0.7, True)], ids=["plain", "all"])
def test_without_kept_probabilities_it_is_the_same_to_the_bit(
    window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    case = ((*SHORT, 700), window, HEADS["grouped"], torch.bfloat16, softcap, has_sinks)
    for ours, theirs in zip(
        results(TiledAttention(selective=True), *case), results(TiledAttention(), *case), strict=True
    ):
        assert torch.equal(ours, theirs)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), st.sampled_from([None, 100]))
def test_what_a_row_keeps_does_not_depend_on_its_documents(lengths: list[int], window: int | None) -> None:
    kept: list[Tensor] = []

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        results(TiledAttention(), tuple(lengths), window, HEADS["grouped"], torch.float32)
    heads, kv_heads = HEADS["grouped"]
    of_inputs = (heads + 2 * kv_heads) * HEAD_DIM
    assert sum(each.numel() for each in kept) == sum(lengths) * of_inputs + saved_numel(sum(lengths)) * heads


@pytest.mark.parametrize(
    ("lengths", "again"),
    [((64,) * 7, False), ((20,), False), ((200,), False), ((250,), False), ((256, 256), True), ((900,), True)],
)
def test_probabilities_are_computed_again_where_there_is_no_room(lengths: tuple[int, ...], again: bool) -> None:
    with _Products() as products:
        results(TiledAttention(), lengths, None, HEADS["grouped"], torch.float32)
    tiles = cut((0, *accumulate(lengths)), None, torch.empty(0))
    count = len(tiles.bins) + sum(len(long.blocks) for long in tiles.longs)
    assert products.count > 6 * count if again else products.count == 6 * count


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten.bmm
        return func(*args, **(kwargs or {}))


def test_the_reference_sees_what_a_loop_sees() -> None:
    lengths, window = (3, 5), 2
    edges = (0, 3, 8)
    query, key, value = torch.randn(3, 1, 1, 8, HEAD_DIM, dtype=torch.float64)
    found = ReferenceAttention().attend(query, key, value, Documents(edges, ReferenceAttention()), Scoring(0.5, window))
    for start, length in zip(edges, lengths, strict=False):
        for at in range(start, start + length):
            seen = slice(max(start, at - window + 1), at + 1)
            weights = (key[0, 0, seen] @ query[0, 0, at] * 0.5).softmax(0)
            torch.testing.assert_close(found[0, at, 0], weights @ value[0, 0, seen])
