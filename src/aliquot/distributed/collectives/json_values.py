"""Exchange small JSON values among all ranks of the default process group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Any value that json writes and reads back unchanged.
JSON = Any

_CPU = torch.device("cpu")


def gather(value: JSON, device: torch.device = _CPU) -> list[JSON]:
    """Return the values of all ranks, by rank, on every rank, through tensors on `device`. Collective."""
    text = _encode(value).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([text.numel()], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [_decode(received[: int(size)]) for received, size in zip(texts, sizes, strict=True)]


def broadcast(value: JSON) -> JSON:
    """Return rank 0's value on every rank; the arguments of other ranks are ignored. Collective."""
    is_first = dist.get_rank() == 0
    text = _encode(value) if is_first else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([text.numel()])
    dist.broadcast(size, src=0)
    if not is_first:
        text = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, src=0)
    return _decode(text)


def _encode(value: JSON) -> Tensor:
    """Encode a value as JSON text in uint8 [bytes]."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> JSON:
    return json.loads(text.cpu().numpy().tobytes())
