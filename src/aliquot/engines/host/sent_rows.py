"""Gradient sums of an embedding on their way to another host: the rows that tokens have looked up, the rest is zero.

A message is the number of rows, their numbers, and what is in them; where most were looked up, all rows and no numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aliquot.collectives.alignment import aligned

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


def decode_rows(message: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """What was encoded, flat, from the beginning of `message`, uint8."""
    count = int(message[:4].view(torch.int32))
    head_bytes = aligned(4 * (1 + max(0, count)))
    sent = rows if count == _ALL else count
    values = message[head_bytes : head_bytes + sent * width * dtype.itemsize].view(dtype)
    if count == _ALL:
        return values
    found = torch.zeros(rows, width, dtype=dtype)
    found[message[4 : 4 * (1 + count)].view(torch.int32).long()] = values.view(count, width)
    return found.view(-1)
