"""Encode gradient sums of an embedding for another host: only the rows that tokens have looked up are not zero.

A message holds the number of rows, their row numbers, and their values. If tokens have looked up most rows, the message
holds all rows and no row numbers. The looked-up rows of a tied embedding are sent separately, after the gradient of the
head. The receiver adds these rows to the sum of the head's gradient over all hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aliquot.distributed.collectives.buffer_sizes import align
from aliquot.distributed.collectives.wire import corruption_error

_ALL = -1  # sent as the number of rows if the message holds all rows

Rows = tuple[Tensor, Tensor]  # row numbers, int64 [n], and values [n, width]


def most_bytes(rows: int, width: int, itemsize: int) -> int:
    """Return the size in bytes of the longest message about `rows` rows."""
    return align(4 * (1 + rows)) + rows * width * itemsize


def encode_table(values: Tensor, looked_up: Tensor) -> Tensor:
    """Encode `values` [rows, width], which are zero where `looked_up`, bool [rows], is false. Return uint8."""
    rows = len(values)
    numbers = looked_up.nonzero().flatten()
    if 10 * len(numbers) < 9 * rows:
        return encode_rows((numbers, values[numbers]))
    return _message([_ALL], values)


def encode_rows(rows: Rows) -> Tensor:
    """Encode n rows as a uint8 message of at most `most_bytes(n, width, itemsize)` bytes."""
    numbers, values = rows
    return _message([len(numbers), *numbers.tolist()], values)


def _message(numbers: list[int], values: Tensor) -> Tensor:
    head = torch.tensor(numbers, dtype=torch.int32)
    message = torch.zeros(align(head.nbytes) + values.nbytes, dtype=torch.uint8)
    message[: head.nbytes] = head.view(torch.uint8)
    message[align(head.nbytes) :] = values.reshape(-1).view(torch.uint8)
    return message


def message_in(buffer: Tensor, rows: int, width: int, itemsize: int, sender: str) -> Tensor:
    """Return the message at the beginning of `buffer`, uint8, without the unused end of the buffer.

    Raises SelfTestError, which names `sender`, if the message has an impossible number of rows or more than `rows`.
    """
    count = int(buffer[:4].view(torch.int32))
    if not _ALL <= count <= rows:
        raise corruption_error(sender)
    sent_rows = rows if count == _ALL else count
    return buffer[: align(4 * (1 + max(0, count))) + sent_rows * width * itemsize]


def decode_table(message: Tensor, rows: int, width: int, dtype: torch.dtype, sender: str) -> Tensor:
    """Return the values that `encode_table` has encoded, flat. Raises SelfTestError like `decode_rows`."""
    if int(message[:4].view(torch.int32)) == _ALL:
        return message[align(4) :].view(dtype)
    numbers, values = decode_rows(message, rows, width, dtype, sender)
    table = torch.zeros(rows, width, dtype=dtype)
    table[numbers] = values
    return table.view(-1)


def decode_rows(message: Tensor, rows: int, width: int, dtype: torch.dtype, sender: str) -> Rows:
    """Return the rows that `encode_rows` has encoded. The receiver owns `rows` rows.

    Raises SelfTestError, which names `sender`, if a row number is out of range.
    """
    count = int(message[:4].view(torch.int32))
    numbers = message[4 : 4 * (1 + max(0, count))].view(torch.int32).long()
    if count < 0 or (count and not 0 <= int(numbers.min()) <= int(numbers.max()) < rows):
        raise corruption_error(sender)
    return numbers, message[align(4 * (1 + count)) :].view(dtype).view(count, width)


def sum_rows(parts: Sequence[Rows], width: int) -> Rows:
    """Sum all rows with the same row number, part by part in the given order, in fp32.

    Row numbers may repeat within a part and are unique in the result.
    """
    unique, places = torch.unique(torch.cat([numbers for numbers, _ in parts]), return_inverse=True)
    total = torch.zeros(len(unique), width)
    places_by_part = places.split([len(numbers) for numbers, _ in parts])
    for (_, values), places_of_part in zip(parts, places_by_part, strict=True):
        total += torch.zeros_like(total).index_add_(0, places_of_part, values.float())
    return unique, total
