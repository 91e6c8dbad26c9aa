"""Gradient sums of an embedding on their way to another host: the rows that tokens have looked up, the rest is zero.

A message is the number of rows, their numbers, and what is in them; where most were looked up, all rows and no numbers.
Of an embedding that is the head, too, they follow the head's gradient and are added to its sum over all hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aliquot.distributed.collectives.buffer_sizes import aligned
from aliquot.distributed.collectives.messages import not_as_sent

_ALL = -1

Rows = tuple[Tensor, Tensor]  # numbers, int64 [n], and values [n, width]


def most_bytes(rows: int, width: int, itemsize: int) -> int:
    """Of the message about so many rows."""
    return aligned(4 * (1 + rows)) + rows * width * itemsize


def encode_rows(values: Tensor, looked_up: Tensor) -> Tensor:
    """uint8, of `values` [rows, width], zeros where `looked_up`, bool [rows], is false."""
    rows = len(values)
    found = looked_up.nonzero().flatten()
    if 10 * len(found) < 9 * rows:
        return encode_found((found, values[found]))
    return _message([_ALL], values)


def encode_found(rows: Rows) -> Tensor:
    """uint8; `most_bytes` of as many rows."""
    numbers, values = rows
    return _message([len(numbers), *numbers.tolist()], values)


def _message(numbers: list[int], sent: Tensor) -> Tensor:
    head = torch.tensor(numbers, dtype=torch.int32)
    message = torch.zeros(aligned(head.nbytes) + sent.nbytes, dtype=torch.uint8)
    message[: head.nbytes] = head.view(torch.uint8)
    message[aligned(head.nbytes) :] = sent.reshape(-1).view(torch.uint8)
    return message


def message_in(room: Tensor, rows: int, width: int, itemsize: int, who: str) -> Tensor:
    """The message at the beginning of `room`, uint8. Raises SelfTestError, beginning with `who`, if there is none."""
    count = int(room[:4].view(torch.int32))
    if not _ALL <= count <= rows:
        raise not_as_sent(who)
    sent = rows if count == _ALL else count
    return room[: aligned(4 * (1 + max(0, count))) + sent * width * itemsize]


def decode_rows(message: Tensor, rows: int, width: int, dtype: torch.dtype, who: str) -> Tensor:
    """What `encode_rows` made it of, flat. Raises SelfTestError, beginning with `who`, where there are no such rows."""
    if int(message[:4].view(torch.int32)) == _ALL:
        return message[aligned(4) :].view(dtype)
    numbers, values = decode_found(message, rows, width, dtype, who)
    found = torch.zeros(rows, width, dtype=dtype)
    found[numbers] = values
    return found.view(-1)


def decode_found(message: Tensor, rows: int, width: int, dtype: torch.dtype, who: str) -> Rows:
    """What `encode_found` made it of, of an owner of so many rows. Raises as `decode_rows`."""
    count = int(message[:4].view(torch.int32))
    numbers = message[4 : 4 * (1 + max(0, count))].view(torch.int32).long()
    if count < 0 or (count and not 0 <= int(numbers.min()) <= int(numbers.max()) < rows):
        raise not_as_sent(who)
    return numbers, message[aligned(4 * (1 + count)) :].view(dtype).view(count, width)


def sum_rows(parts: Sequence[Rows], width: int) -> Rows:
    """The sum over `parts` in their order, fp32, of each row that any has; in a part a row may stand several times."""
    unique, places = torch.unique(torch.cat([numbers for numbers, _ in parts]), return_inverse=True)
    total = torch.zeros(len(unique), width)
    at = 0
    for numbers, values in parts:
        total += torch.zeros_like(total).index_add_(0, places[at : at + len(numbers)], values.float())
        at += len(numbers)
    return unique, total
