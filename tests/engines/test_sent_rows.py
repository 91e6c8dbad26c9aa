"""Rows of an embedding's gradient between hosts: what is decoded is what was encoded."""

from __future__ import annotations

import pytest
import torch

from aliquot.engines.host.sent_rows import decode_rows, encode_rows, most_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("looked_up", [0, 1, 7, 44, 45, 50])
def test_rows_arrive_as_they_were_sent(looked_up: int, dtype: torch.dtype) -> None:
    rows, width = 50, 6
    generator = torch.Generator().manual_seed(looked_up)
    marked = torch.zeros(rows, dtype=torch.bool)
    marked[torch.randperm(rows, generator=generator)[:looked_up]] = True
    values = torch.randn(rows, width, generator=generator).to(dtype) * marked[:, None]
    room = torch.full((most_bytes(rows, width, dtype.itemsize),), 255, dtype=torch.uint8)  # what was there before
    message = encode_rows(values, marked)
    room[: len(message)] = message
    assert torch.equal(decode_rows(room, rows, width, dtype), values.view(-1))
    if looked_up < 40:
        assert len(message) < 64 + 4 * looked_up + 64 + looked_up * width * dtype.itemsize
