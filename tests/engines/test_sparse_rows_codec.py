"""Rows of an embedding's gradient between hosts: what is decoded is what was encoded."""

from __future__ import annotations

import pytest
import torch

from aliquot.core.errors import SelfTestError
from aliquot.engines.host.sparse_rows_codec import (
    decode_rows,
    decode_table,
    encode_rows,
    encode_table,
    message_in,
    most_bytes,
    sum_rows,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("looked_up", [0, 1, 7, 44, 45, 50])
def test_decoded_rows_equal_encoded_rows(looked_up: int, dtype: torch.dtype) -> None:
    rows, width = 50, 6
    generator = torch.Generator().manual_seed(looked_up)
    marked = torch.zeros(rows, dtype=torch.bool)
    marked[torch.randperm(rows, generator=generator)[:looked_up]] = True
    values = torch.randn(rows, width, generator=generator).to(dtype) * marked[:, None]
    room = torch.full((most_bytes(rows, width, dtype.itemsize),), 255, dtype=torch.uint8)  # what was there before
    message = encode_table(values, marked)
    room[: len(message)] = message
    arrived = message_in(room, rows, width, dtype.itemsize, "they")
    assert torch.equal(arrived, message)
    assert torch.equal(decode_table(arrived, rows, width, dtype, "they"), values.view(-1))
    if looked_up < 40:
        assert len(message) < 64 + 4 * looked_up + 64 + looked_up * width * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_after_a_dense_sum_add_up(dtype: torch.dtype) -> None:
    """Of two hosts, of which one has a row twice and the other none of some, or nothing at all."""
    rows, width = 50, 6
    first = torch.tensor([3, 7, 3]), torch.randn(3, width).to(dtype)
    for second in ((torch.tensor([7, 49]), torch.randn(2, width).to(dtype)), (first[0][:0], first[1][:0])):
        sent = encode_rows(second)
        message = message_in(sent, rows, width, dtype.itemsize, "they")
        assert torch.equal(message, sent) and len(sent) <= most_bytes(2, width, dtype.itemsize)
        arrived = decode_rows(message, rows, width, dtype, "they")
        numbers, values = sum_rows([first, arrived], width)
        expected = torch.zeros(rows, width)
        for part in (first, second):
            expected += torch.zeros(rows, width).index_add_(0, part[0], part[1].float())
        assert torch.equal(torch.zeros(rows, width).index_add_(0, numbers, values), expected)
        assert len(numbers) == len({*numbers.tolist()})


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("number", [-7, 51, 1 << 30])
def test_impossible_rows_are_refused(where: int, number: int) -> None:
    """Their count, or the number of one."""
    rows, width = 50, 6
    marked = torch.arange(rows) < 20
    message = encode_table(torch.randn(rows, width) * marked[:, None], marked)
    message[4 * where : 4 * where + 4] = torch.tensor([number], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(SelfTestError, match=r"^they differ from the values that were sent"):
        decode_table(message_in(message, rows, width, 4, "they"), rows, width, torch.float32, "they")
