"""Gradient sums of an embedding on their way to another host: the rows that tokens have looked up, the rest is zero.

A message is the number of rows, their numbers, and what is in them; where most were looked up, all rows and no numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aliquot.collectives.alignment import aligned
from aliquot.collectives.message_checksums import not_as_sent

_ALL = -1


def most_bytes(rows: int, width: int, itemsize: int) -> int:
    """Of the message about so many rows."""
    return aligned(4 * (1 + rows)) + rows * width * itemsize


def encode_rows(values: Tensor, looked_up: Tensor) -> Tensor:
    """uint8, of `values` [rows, width], zeros where `looked_up`, bool [rows], is false."""
    rows = len(values)
    found = looked_up.nonzero().flatten()
    count = len(found) if 10 * len(found) < 9 * rows else _ALL
    head = torch.tensor([count] if count == _ALL else [count, *found.tolist()], dtype=torch.int32)
    sent = values if count == _ALL else values[found]
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
    """What was encoded, flat. Raises SelfTestError, beginning with `who`, where there are no such rows."""
    count = int(message[:4].view(torch.int32))
    values = message[aligned(4 * (1 + max(0, count))) :].view(dtype)
    if count == _ALL:
        return values
    numbers = message[4 : 4 * (1 + count)].view(torch.int32).long()
    if count and not 0 <= int(numbers.min()) <= int(numbers.max()) < rows:
        raise not_as_sent(who)
    found = torch.zeros(rows, width, dtype=dtype)
    found[numbers] = values.view(count, width)
    return found.view(-1)
