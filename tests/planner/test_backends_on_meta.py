"""The meta trace of a backend equals its run on CPU: the same bytes and the same products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aliquot.nn.attention.document_attention import Documents, Scoring, attention_on
from aliquot.nn.head_loss import IGNORE, FusedLoss, GradientRows
from aliquot.planner.meta_trace import MetaTrace
from aliquot.planner.micro_batch_cost import Work

TOKENS, LABELLED, WIDTH, VOCABULARY = 75, 61, 16, 101
EDGES = (0, 700, 701, 760, 1060)
Followed = tuple[int, int, int, Work]  # bytes kept for the backward pass, most in each pass; operations


def followed(device: str, weights: list[Tensor], work: object) -> Followed:
    with MetaTrace(weights, device) as live:
        loss = work(live)  # type: ignore[operator]
        kept, forward_bytes, live.peak_bytes = live.live_bytes, live.peak_bytes, live.live_bytes
        loss.backward()
        return kept, forward_bytes, live.peak_bytes, live.take_work()[0]


def products(work: Work) -> dict[tuple[object, ...], float]:
    return {key: count for key, count in work.items() if key[0] == "matmul"}


def assert_alike(planned: Followed, real: Followed, beside: int) -> None:
    """`beside`: bytes of labels and indices, which are on CPU in both."""
    assert products(planned[3]) == products(real[3])
    for ours, theirs in zip(planned[:3], real[:3], strict=True):
        assert theirs - beside <= ours <= theirs
    for key, moved in planned[3].items():
        if key[0] == "memory" and key[2] > beside:
            assert moved == pytest.approx(real[3][key], abs=beside), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_head(dtype: torch.dtype, by_rows: bool, chunks: int) -> None:
    fused = FusedLoss(4 * VOCABULARY * 4, logits_bytes=VOCABULARY * dtype.itemsize * (-(-LABELLED // chunks)))
    labels = torch.zeros(TOKENS, dtype=torch.int64)
    labels[LABELLED:] = IGNORE

    def on(device: str) -> Followed:
        hidden = torch.zeros(TOKENS, WIDTH, dtype=dtype, device=device, requires_grad=True)
        weight = torch.zeros(VOCABULARY, WIDTH, dtype=dtype, device=device, requires_grad=True)
        room = torch.empty(50, WIDTH, dtype=dtype, device=device)
        rows = GradientRows((0, 50, 100, 101), lambda a, b: room[: b - a], lambda: None) if by_rows else None

        def work(live: MetaTrace) -> Tensor:
            own = replace(fused, blocks=live.two_for_all) if device == "meta" else fused
            return own(hidden, weight, labels, 0.5, rows)[1]

        return followed(device, [hidden, weight, room], work)

    assert_alike(on("meta"), on("cpu"), beside=64 * TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("selective", [False, True])
def test_attention(dtype: torch.dtype, window: int | None, selective: bool) -> None:
    def on(device: str) -> Followed:
        attention = attention_on("cpu", selective=selective)
        query, key, value = (
            torch.zeros(1, heads, EDGES[-1], 8, dtype=dtype, device=device, requires_grad=True) for heads in (4, 2, 2)
        )
        documents = Documents(EDGES, attention)

        def work(live: MetaTrace) -> Tensor:
            return attention.attend(query, key, value, documents, Scoring(0.5, window)).sum()

        return followed(device, [query, key, value], work)

    assert_alike(on("meta"), on("cpu"), beside=40 * EDGES[-1])
