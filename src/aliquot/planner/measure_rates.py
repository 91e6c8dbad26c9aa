"""How fast a rank computes and moves bytes: measured in the rank itself, while its peers measure the same."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
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
    apart_bytes: int  # of what is multiplied or summed in turn: in a step nothing finds its own in a core's cache
    socket_bytes: int


# What `train` and `plan` do the first time on a machine, in about a second; and what `plan --calibrate` does.
QUICK = Effort((128, 512, 1024, 2048), 0.1, (1 << 20, 4 << 20), 0.02, 64 << 20, 16 << 20)
THOROUGH = Effort(
    (128, 256, 512, 1024, 2048), 2.0, (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20), 0.15, 256 << 20, 64 << 20
)
_SMALL = (64, 256, 64, 64)  # a product of attention, [batch, m, k, n]
_BETWEEN_BYTES = 16 << 20  # of tensors that are worked on in turn: in a step others come between
_SCRATCH_BYTES = 1 << 20  # a larger result is written where nothing was of late: in a step most are kept for backward
_STAGED = 1 << 20  # elements of a gradient that is added to its sum: read in bf16, read and written in fp32
_PATCHED = 1 << 20  # weights of which it is told how they have changed
_CALLS = 10  # operations of torch in what is timed for one, those of the way back included
_HEAD = 64  # elements of a head, as attention reorders them


def measure_rates(agree: Agree, effort: Effort, of_core: float = 1.0) -> Tables:
    """Of one rank, with the threads that torch has in it. `spread`: how much longer than the fastest quarter of the
    largest products half of them took, or all of them than their thread had `of_core`, its part of a core, whichever is
    more; more than a few per cent says that the cores did something else, too.

    Where ranks share cores most calls end within their rank's turn: what one takes of a core counts, and that a core is
    shared.
    """
    import torch

    from aliquot.distributed.collectives.weight_patch import WeightPatches, most_bytes
    from aliquot.machine.matmul import copies_transposed, copy_pays
    from aliquot.planner.measure_updates import measure_updates

    def of_shared_core() -> float:
        return time.thread_time() / of_core

    clock = time.perf_counter if of_core == 1 else of_shared_core

    def timed(work: Callable[[], Any]) -> tuple[list[float], float]:
        """Seconds of one call, ascending, and how many times as long all took as on a core of their own; all ranks
        begin together."""
        work()  # chooses kernels and touches pages
        agree(0)
        times: list[float] = []
        began, on_core = time.perf_counter(), time.thread_time()
        until = began + effort.each_s
        while time.perf_counter() < until or len(times) < 3:
            start = clock()
            work()
            times.append(clock() - start)
        return sorted(times), (time.perf_counter() - began) / (time.thread_time() - on_core)

    def seconds(work: Callable[[], Any]) -> list[float]:
        return timed(work)[0]

    def multiply_next(turn: Iterator[tuple[Any, ...]]) -> None:
        left, right, out = next(turn)
        torch.mm(left, right, out=out)

    def multiply_as_layers_do(turn: Iterator[tuple[Any, ...]], copies: bool) -> None:
        """Three products: a layer's, of its input and the transposed weight; the gradient of the input; that of the
        weight, of the transposed gradient of the output or, in a product like the second, of a copy of it."""
        left, right, out = next(turn)
        torch.mm(left, right.t(), out=out)
        multiply_next(turn)
        left, right, out = next(turn)
        torch.mm(left if copies else left.t(), right, out=out)

    products: dict[str, list[list[float]]] = {}
    of_layers: dict[str, list[list[float]]] = {}
    small: dict[str, float] = {}
    spreads = []
    room = torch.ones(effort.apart_bytes // 2, dtype=torch.bfloat16).view(torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        table: list[list[float]] = []
        of_layers[str(dtype.itemsize)] = []
        times, stretched = [0.0], 1.0
        for side in effort.sides:
            if table and agree(_fastest(times)) * (side / table[-1][0]) ** 3 > effort.longest_s:
                break
            matrices = room.view(dtype)[: len(room) // (3 * side * side * dtype.itemsize) * 3 * side * side]
            turn = cycle([tuple(of_one) for of_one in matrices.view(-1, 3, side, side)])
            matrices.fill_(1)  # what was multiplied before grows without end
            times, stretched = timed(partial(multiply_next, turn))
            table.append([float(side), 2.0 * side**3 / _fastest(times)])
            copies = copies_transposed("cpu", dtype) and copy_pays(side, side, side)
            three_s = _fastest(seconds(partial(multiply_as_layers_do, turn, copies)))
            of_layers[str(dtype.itemsize)].append([float(side), 3 * 2.0 * side**3 / three_s])
        # A core that is shared evenly makes all products as slow.
        spreads.append(max(statistics.median(times) / _fastest(times), of_core * stretched) - 1)
        products[str(dtype.itemsize)] = table
        batch, m, k, n = _SMALL
        left, right = torch.randn(batch, m, k, dtype=dtype), torch.randn(batch, k, n, dtype=dtype)
        multiply = partial(torch.bmm, left, right, out=torch.empty(batch, m, n, dtype=dtype))
        small[str(dtype.itemsize)] = 2.0 * batch * m * k * n / _fastest(seconds(multiply))
    memory: dict[str, list[list[float]]] = {}
    operations: dict[str, tuple[Callable[[Any, Any], Any], float]] = {
        "copy": (lambda x, out: out.copy_(x), 2),
        "add": (lambda x, out: torch.mul(x, 2, out=out), 2),
        "silu": (lambda x, out: torch.ops.aten.silu.out(x, out=out), 2),
        "tanh": (lambda x, out: torch.tanh(x, out=out), 2),
        "softmax": (lambda x, out: torch.softmax(x, -1, out=out), 2),
        "sum": (lambda x, out: torch.sum(x, -1, out=out.view(-1)[: len(x)]), 1),
        # The result is the larger.
        "convert": (lambda x, out: out.view(torch.float32).copy_(x.view(-1)[: x.numel() // 2].view(len(x), -1)), 1.5),
        "permute": (lambda x, out: out.view(-1, len(x), _HEAD).copy_(x.view(len(x), -1, _HEAD).transpose(0, 1)), 2),
        "transpose": (lambda x, out: out.view(-1, len(x)).copy_(x.t()), 2),
    }
    drawn, results = torch.randn(max(_BETWEEN_BYTES, *effort.tensor_bytes) // 2).bfloat16(), room.view(torch.bfloat16)
    for kind, (operation, moves) in operations.items():
        memory[kind] = []
        for size in effort.tensor_bytes:
            tensors = drawn[: max(1, _BETWEEN_BYTES // size) * size // 2].view(-1, size // 1024, 512)
            room_bytes = effort.apart_bytes if size > _SCRATCH_BYTES else 4 * size
            outs = results[: room_bytes // size * size // 2].view(-1, size // 1024, 512)
            times = seconds(partial(_apply, operation, cycle(tensors), cycle(outs)))
            memory[kind].append([float(size), moves * size / _fastest(times)])
    count = effort.apart_bytes // (6 * _STAGED)
    room.view(torch.bfloat16).fill_(1)
    sums = room[: 4 * count * _STAGED].view(torch.float32).view(count, _STAGED)
    gradients = room[-2 * count * _STAGED :].view(torch.bfloat16).view(count, _STAGED)
    parts = cycle(list(zip(sums, gradients, strict=True)))
    old, new = _stepped()
    message, patches = torch.empty(most_bytes(_PATCHED), dtype=torch.uint8), WeightPatches()
    of_encoding = seconds(lambda: patches.encode(old, new, message))
    size = patches.encode(old, new, message)

    def decode() -> None:
        patches.decode(message[:size], weights.copy_(old), "weights")

    weights = old.clone()
    coded_s = (_fastest(of_encoding) + _fastest(seconds(decode))) / 2
    tables = {
        "products": products,
        "of_layers": of_layers,
        "small": small,
        "memory": memory,
        "stage": 10 * _STAGED / _fastest(seconds(lambda: _add(parts))),
        "patch": 2 * _PATCHED / coded_s,
        "call_s": _call_s(parts, clock),
        "socket_bytes_per_s": _socket_rate(effort.socket_bytes),
        "spread": max(spreads),
    }
    # Last: numbers that it leaves in the room may be so small that operations on them are slow.
    return tables | measure_updates(lambda work: _fastest(seconds(work)), room)


def _stepped() -> tuple[Any, Any]:
    """Weights in bf16, flat, before and after a step of a fine-tune at a rate of 2e-5: one in five has changed, three
    quarters of these by one unit in the last place (benchmarks/patches.py)."""
    import torch

    draw = torch.Generator().manual_seed(0)
    old = (torch.randn(_PATCHED, generator=draw) / 50).bfloat16()
    moved = torch.rand(_PATCHED, generator=draw)
    units = (moved < 0.2).to(torch.int16) + 4 * (moved < 0.05).to(torch.int16)
    return old, (old.view(torch.int16) + units).view(torch.bfloat16)


def _apply(operation: Callable[[Any, Any], Any], turn: Iterator[Any], outs: Iterator[Any]) -> None:
    operation(next(turn), next(outs))


def _add(turn: Iterator[tuple[Any, Any]]) -> None:
    total, gradient = next(turn)
    total.add_(gradient)


def _call_s(parts: Iterator[tuple[Any, Any]], clock: Callable[[], float]) -> float:
    """Of an operation on a few numbers: half of them follow another such, half follow one that took the cache."""
    import torch

    tiny = torch.ones(8, requires_grad=True)

    def seconds() -> float:
        start = clock()
        ((tiny + tiny).view(2, 4) * 2).sum().backward()  # type: ignore[no-untyped-call]
        return clock() - start

    warm = [seconds() for _ in range(20)]
    cold = []
    for _ in range(20):
        _add(parts)
        cold.append(seconds())
    return (_fastest(sorted(warm)) + _fastest(sorted(cold))) / 2 / _CALLS


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
