"""How fast a rank computes and moves bytes: measured in the rank itself, while its peers measure the same."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Tables = dict[str, Any]  # numbers in dicts and lists, as JSON; of every rank the same structure
Agree = Callable[[float], float]  # collective: the largest of all ranks' numbers, on each of them


@dataclass(frozen=True)
class Effort:
    """What is measured, and for how long."""

    sides: tuple[int, ...]  # of cubes; one that would take long is left out
    longest_s: float
    tensor_bytes: tuple[int, ...]
    each_s: float
    socket_bytes: int


# What `train` and `plan` do the first time on a machine, in about a second; and what `plan --calibrate` does.
QUICK = Effort((128, 512, 1024, 2048), 0.1, (1 << 20, 16 << 20), 0.02, 16 << 20)
THOROUGH = Effort((128, 256, 512, 1024, 2048), 20.0, (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20), 0.15, 64 << 20)
_SMALL = (64, 256, 64, 64)  # a product of attention, [batch, m, k, n]


def measure_rates(agree: Agree, effort: Effort) -> Tables:
    """Of one rank, with the threads that torch has in it. `spread`: how much longer than the fastest quarter of the
    largest products half of them took; more than a few per cent says that the cores did something else, too."""
    import torch
    import torch.nn.functional as F

    def seconds(work: Callable[[], Any]) -> list[float]:
        """Of one call, ascending; all ranks begin together."""
        work()  # chooses kernels and touches pages
        agree(0)
        times: list[float] = []
        until = time.perf_counter() + effort.each_s
        while time.perf_counter() < until or len(times) < 3:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return sorted(times)

    products: dict[str, list[list[float]]] = {}
    small: dict[str, float] = {}
    spreads = []
    for dtype in (torch.bfloat16, torch.float32):
        table: list[list[float]] = []
        times = [0.0]
        for side in effort.sides:
            if table and agree(_fastest(times)) * (side / table[-1][0]) ** 3 > effort.longest_s:
                break
            left, right, out = torch.randn(3, side, side, dtype=dtype)
            times = seconds(partial(torch.mm, left, right, out=out))
            table.append([float(side), 2.0 * side**3 / _fastest(times)])
        spreads.append(statistics.median(times) / _fastest(times) - 1)
        products[str(dtype.itemsize)] = table
        batch, m, k, n = _SMALL
        left, right = torch.randn(batch, m, k, dtype=dtype), torch.randn(batch, k, n, dtype=dtype)
        multiply = partial(torch.bmm, left, right, out=torch.empty(batch, m, n, dtype=dtype))
        small[str(dtype.itemsize)] = 2.0 * batch * m * k * n / _fastest(seconds(multiply))
    memory: dict[str, list[list[float]]] = {}
    operations: dict[str, tuple[Callable[[Any], Any], int]] = {
        "copy": (lambda x: x.clone(), 2),
        "add": (lambda x: x + x, 2),
        "silu": (F.silu, 2),
        "softmax": (lambda x: torch.softmax(x, -1), 2),
        "sum": (lambda x: x.sum(-1), 1),
    }
    for kind, (operation, moves) in operations.items():
        memory[kind] = []
        for size in effort.tensor_bytes:
            x = torch.randn(size // 1024, 512, dtype=torch.bfloat16)
            memory[kind].append([float(size), moves * size / _fastest(seconds(partial(operation, x)))])
    tiny = torch.ones(8, requires_grad=True)
    return {
        "products": products,
        "small": small,
        "memory": memory,
        "call_s": _fastest(seconds(lambda: tiny + tiny)),
        "socket_bytes_per_s": _socket_rate(effort.socket_bytes),
        "spread": max(spreads),
    }


def medians(found: Sequence[Any]) -> Any:
    """Of numbers that stand at the same place of equal structures."""
    first = found[0]
    if isinstance(first, dict):
        return {key: medians([each[key] for each in found]) for key in first}
    if isinstance(first, list):
        return [medians([each[at] for each in found]) for at in range(len(first))]
    return statistics.median(found)


def _fastest(times: list[float]) -> float:
    """The time at the fastest quarter: what else the machine does now is not what it can do."""
    return times[len(times) // 4]


def _socket_rate(size_bytes: int) -> float:
    """Bytes/s over loopback TCP, sender and receiver in one process, as gloo has them in each rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    start = time.perf_counter()
    thread = threading.Thread(target=_send, args=(sender, size_bytes))
    thread.start()
    room, left = bytearray(1 << 20), size_bytes
    while left:
        left -= receiver.recv_into(room)
    thread.join()
    elapsed = time.perf_counter() - start
    sender.close()
    receiver.close()
    return size_bytes / elapsed


def _send(sender: socket.socket, size_bytes: int) -> None:
    data = bytes(1 << 20)
    for _ in range(size_bytes >> 20):
        sender.sendall(data)
