"""Measure how fast a rank computes and moves bytes while all ranks of its node do the same."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, FiniteFloat

from aliquot.distributed.gloo_interface import address_of, listen

if TYPE_CHECKING:
    from torch import Tensor

Rate = Annotated[FiniteFloat, Field(gt=0)]
Curve = Annotated[tuple[tuple[Rate, Rate], ...], Field(min_length=1)]  # (size, rate), sizes ascending
Agree = Callable[[float], float]  # collective: returns the maximum over all ranks

ITEMSIZES = (2, 4)  # bf16, fp32
# Kinds of elementwise operations: plain, with an exponential, and copies that reorder.
KINDS = ("stream", "exp", "transpose")


@dataclass(frozen=True)
class Measurement:
    """Rates of one rank."""

    products: dict[int, Curve]  # itemsize -> (side of square matrices, FLOP/s of their product)
    memory: dict[str, Curve]  # kind -> (bytes of a tensor, bytes/s read and written)
    call_s: Rate  # seconds of a torch operation on a few numbers, with autograd
    socket_bytes_per_s: Rate  # loopback TCP, sender and receiver on one core
    spread: FiniteFloat  # 0: the cores did nothing else; 0.1: the median product took 10 % longer than a fast one

    def __post_init__(self) -> None:
        if set(self.products) != set(ITEMSIZES) or set(self.memory) != set(KINDS):
            raise ValueError("the measurement lacks a data type or a kind of operation")


@dataclass(frozen=True)
class Effort:
    """The sizes to measure, and the time per measurement."""

    sides: tuple[int, ...]  # sides of square matrices; products slower than `longest_s` are skipped
    longest_s: float
    tensor_bytes: tuple[int, ...]
    seconds_each: float
    apart_bytes: int  # total size of the tensors to cycle through: larger than caches, as in a training step


# The first `train` or `plan` on a machine takes about a second, `plan --calibrate` half a minute.
QUICK = Effort((128, 512, 1024, 2048), 0.1, (1 << 20, 4 << 20), 0.02, 64 << 20)
THOROUGH = Effort((128, 256, 512, 1024, 2048), 2.0, (64 << 10, 1 << 20, 4 << 20, 64 << 20), 0.3, 256 << 20)

# A training step reads a tensor again only after `_BETWEEN_BYTES` of other tensors. It writes results of at most
# `_SMALL_BYTES` into recently used memory: one of `_REUSED` tensors.
_BETWEEN_BYTES, _SMALL_BYTES, _REUSED = 16 << 20, 1 << 20, 4
_SOCKET_BYTES = 16 << 20
_CALLS = 10  # operations of torch in one timed expression, backward pass included


def measure_rates(agree: Agree, effort: Effort, core_share: float = 1.0) -> Measurement:
    """Measure one rank with the threads that torch has in it.

    Args:
        agree: lets all ranks start each measurement together and skip the same sizes.
        core_share: fraction of a core per thread. If ranks share cores, the measurement divides CPU time by this
            fraction. The wall time of a short call would not show the sharing, because the call fits one time slice.
    """
    import torch

    clock = time.perf_counter if core_share == 1 else lambda: time.thread_time() / core_share

    def timed(work: Callable[[], Any]) -> tuple[float, float]:
        """Return the seconds of a fast call, and the fraction by which other work on the core slowed the calls down."""
        work()  # the first call chooses kernels and touches memory pages
        agree(0)
        times: list[float] = []
        began, began_on_core = time.perf_counter(), time.thread_time()
        while time.perf_counter() < began + effort.seconds_each or len(times) < 3:
            start = clock()
            work()
            times.append(clock() - start)
        stretched = core_share * (time.perf_counter() - began) / (time.thread_time() - began_on_core)
        fast = sorted(times)[len(times) // 4]
        return fast, max(statistics.median(times) / fast, stretched) - 1

    buffer = torch.ones(effort.apart_bytes // 2, dtype=torch.bfloat16)
    products, spreads = {}, []
    for dtype in (torch.bfloat16, torch.float32):
        points: list[tuple[float, float]] = []
        seconds, spread = 0.0, 0.0
        for side in effort.sides:
            if points and agree(seconds) * (side / points[-1][0]) ** 3 > effort.longest_s:
                break
            seconds, spread = timed(_next_product(buffer.view(dtype), side))
            points.append((float(side), 2.0 * side**3 / seconds))
        spreads.append(spread)
        products[dtype.itemsize] = tuple(points)
    memory = {
        kind: tuple((float(size), 2 * size / timed(_next_pass(buffer, kind, size))[0]) for size in effort.tensor_bytes)
        for kind in KINDS
    }
    return Measurement(products, memory, _call_s(buffer, clock), _socket_rate(), max(spreads))


def median_measurement(measurements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number over measurements of equal structure, as JSON."""

    def medians(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: medians([value[key] for value in values]) for key in values[0]}
        if isinstance(values[0], list | tuple):
            return [medians(together) for together in zip(*values, strict=True)]
        return statistics.median(values)

    return medians(measurements)  # type: ignore[no-any-return]


def _next_product(buffer: Tensor, side: int) -> Callable[[], Any]:
    """Return a function that multiplies the next matrices in the tensor `buffer` at each call."""
    import torch

    buffer.fill_(1)  # because repeated products would overflow
    matrices = cycle(buffer[: len(buffer) // (3 * side * side) * 3 * side * side].view(-1, 3, side, side))

    def multiply() -> None:
        left, right, out = next(matrices)
        torch.mm(left, right, out=out)

    return multiply


def _next_pass(buffer: Tensor, kind: str, size: int) -> Callable[[], Any]:
    """Return a function that applies an operation of a kind in KINDS to the next tensor of `size` bytes in `buffer`."""
    import torch

    buffer.fill_(1)  # doubling overflows, and infinities are slow
    tensors = buffer[: len(buffer) * 2 // size * size // 2].view(-1, size // 1024, 512)
    half = len(tensors) // 2
    sources = cycle(tensors[: max(1, min(half, _BETWEEN_BYTES // size))])
    targets = cycle(tensors[half:][: _REUSED if size <= _SMALL_BYTES else half])
    if kind == "stream":
        return lambda: torch.mul(next(sources), 2, out=next(targets))
    if kind == "exp":
        return lambda: torch.ops.aten.silu.out(next(sources), out=next(targets))
    return lambda: next(targets).view(512, -1).copy_(next(sources).t())


def _call_s(buffer: Tensor, clock: Callable[[], float]) -> float:
    """Return the seconds of a torch operation on a few numbers, as the mean over a warm and a cold cache."""
    import torch

    tiny = torch.ones(8, requires_grad=True)
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(60):
        if cold := index >= 40:
            buffer[:_BETWEEN_BYTES].fill_(1)
        start = clock()
        ((tiny + tiny).view(2, 4) * 2).sum().backward()  # type: ignore[no-untyped-call]
        times[cold].append(clock() - start)
    return sum(sorted(series)[len(series) // 4] for series in times) / 2 / _CALLS


def _socket_rate() -> float:
    """Return the bytes/s of loopback TCP. One process sends and receives, as gloo does in each rank."""
    with listen(address_of("lo")) as listener:
        sender = socket.create_connection(listener.getsockname()[:2])
        receiver, _ = listener.accept()
    with sender, receiver:
        thread = threading.Thread(target=sender.sendall, args=(bytes(_SOCKET_BYTES),))
        start, left, buffer = time.perf_counter(), _SOCKET_BYTES, bytearray(1 << 20)
        thread.start()
        while left:
            left -= receiver.recv_into(buffer)
        thread.join()
        return _SOCKET_BYTES / (time.perf_counter() - start)
