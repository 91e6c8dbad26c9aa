"""Measure how fast a rank computes and moves bytes: in the rank itself, while all ranks of the node do the same."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, FiniteFloat

if TYPE_CHECKING:
    from torch import Tensor

Rate = Annotated[FiniteFloat, Field(gt=0)]
Curve = Annotated[tuple[tuple[Rate, Rate], ...], Field(min_length=1)]  # (size, rate), sizes ascending
Agree = Callable[[float], float]  # collective: the largest of all ranks' numbers, on each rank

ITEMSIZES = (2, 4)  # bf16, fp32
KINDS = ("stream", "exp", "transpose")  # of elementwise operations: plain, with an exponential, reordering copies


@dataclass(frozen=True)
class Measurement:
    """Rates of one rank."""

    products: dict[int, Curve]  # itemsize -> (side of a cube, FLOP/s) of plain matrix products
    layer_products: dict[int, Curve]  # the same of the products of a linear layer's forward and backward pass
    batched: dict[int, Rate]  # itemsize -> FLOP/s of a batch of small products, as attention has them
    memory: dict[str, Curve]  # kind -> (bytes of a tensor, bytes/s read and written)
    stage_bytes_per_s: Rate  # of additions to tensors that lie in no cache
    call_s: Rate  # of an operation on a few numbers, with autograd
    socket_bytes_per_s: Rate  # loopback TCP, sender and receiver on one core
    spread: FiniteFloat  # 0: the cores did nothing else; 0.1: the median product took 10 % longer than a fast one

    def __post_init__(self) -> None:
        if set(self.products) != set(ITEMSIZES) or set(self.memory) != set(KINDS):
            raise ValueError("the measurement lacks a data type or a kind of operation")


@dataclass(frozen=True)
class Effort:
    """Sizes to measure, and how long."""

    sides: tuple[int, ...]  # of cubes; `longest_s` leaves slow cubes out
    longest_s: float
    tensor_bytes: tuple[int, ...]
    seconds_each: float
    apart_bytes: int  # of the tensors that take turns, because a step finds nothing in the cache of a core


# The first `train` or `plan` on a machine takes about a second, `plan --calibrate` half a minute.
QUICK = Effort((128, 512, 1024, 2048), 0.1, (1 << 20, 4 << 20), 0.02, 64 << 20)
THOROUGH = Effort((128, 256, 512, 1024, 2048), 2.0, (64 << 10, 1 << 20, 4 << 20, 64 << 20), 0.3, 256 << 20)

_BATCHED = (64, 256, 64, 64)  # a product of attention, [batch, m, k, n]
_STAGED_NUMEL = 1 << 20  # of a gradient in bf16 that is added to its sum in fp32: 10 bytes read and written
# A step reads a tensor after others of this size, and writes small results where it wrote shortly before.
_BETWEEN_BYTES, _SMALL_BYTES, _REUSED = 16 << 20, 1 << 20, 4
_SOCKET_BYTES = 16 << 20
_CALLS = 10  # operations of torch in one timed expression, backward pass included


def measure_rates(agree: Agree, effort: Effort, core_share: float = 1.0) -> Measurement:
    """Measure one rank with the threads that torch has in it.

    Args:
        agree: the ranks start each measurement together and skip the same sizes.
        core_share: part of a core that a thread has. Where ranks share cores, a call ends within the turn of its rank,
            so CPU time counts instead of wall time.
    """
    import torch

    clock = time.perf_counter if core_share == 1 else lambda: time.thread_time() / core_share

    def timed(work: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of a fast call, and how much longer the median call or all calls took than an idle core allows."""
        work()  # chooses kernels and touches pages
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

    room = torch.ones(effort.apart_bytes // 2, dtype=torch.bfloat16)
    products: dict[int, Curve] = {}
    layers: dict[int, Curve] = {}
    batched: dict[int, float] = {}
    spreads = []
    for dtype in (torch.bfloat16, torch.float32):
        points: list[tuple[float, float]] = []
        layer_points: list[tuple[float, float]] = []
        seconds, spread = 0.0, 0.0
        for side in effort.sides:
            if points and agree(seconds) * (side / points[-1][0]) ** 3 > effort.longest_s:
                break
            seconds, spread = timed(_next_product(room.view(dtype), side, as_layer=False))
            points.append((float(side), 2.0 * side**3 / seconds))
            layer_s, _ = timed(_next_product(room.view(dtype), side, as_layer=True))
            layer_points.append((float(side), 3 * 2.0 * side**3 / layer_s))
        spreads.append(spread)
        products[dtype.itemsize], layers[dtype.itemsize] = tuple(points), tuple(layer_points)
        batch, m, k, n = _BATCHED
        left, right = torch.ones(batch, m, k, dtype=dtype), torch.ones(batch, k, n, dtype=dtype)
        batched_s, _ = timed(partial(torch.bmm, left, right, out=torch.empty(batch, m, n, dtype=dtype)))
        batched[dtype.itemsize] = 2.0 * batch * m * k * n / batched_s
    memory: dict[str, Curve] = {}
    operations: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "stream": lambda x, out: torch.mul(x, 2, out=out),
        "exp": lambda x, out: torch.ops.aten.silu.out(x, out=out),
        "transpose": lambda x, out: out.view(-1, len(x)).copy_(x.t()),
    }
    for kind in KINDS:
        rates = []
        for size in effort.tensor_bytes:
            room.fill_(1)  # products and doubling overflow, and infinities are slow
            tensors = room[: len(room) * 2 // size * size // 2].view(-1, size // 1024, 512)
            half = len(tensors) // 2
            sources = cycle(tensors[: max(1, min(half, _BETWEEN_BYTES // size))])
            targets = cycle(tensors[half:][: _REUSED if size <= _SMALL_BYTES else half])
            seconds, _ = timed(partial(_run_next, operations[kind], sources, targets))
            rates.append((float(size), 2 * size / seconds))
        memory[kind] = tuple(rates)
    room.fill_(1)
    count = len(room) // (3 * _STAGED_NUMEL)
    sums = room[: 2 * count * _STAGED_NUMEL].view(torch.float32).view(count, _STAGED_NUMEL)
    gradients = room[2 * count * _STAGED_NUMEL :][: count * _STAGED_NUMEL].view(count, _STAGED_NUMEL)
    turn = cycle(list(zip(sums, gradients, strict=True)))

    def add_next() -> None:
        total, gradient = next(turn)
        total.add_(gradient)

    stage_s, _ = timed(add_next)
    return Measurement(
        products, layers, batched, memory, 10 * _STAGED_NUMEL / stage_s, _call_s(add_next, clock), _socket_rate(),
        max(spreads),
    )  # fmt: skip


def median_measurement(measurements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number over measurements of equal structure, as JSON."""
    result: dict[str, Any] = _medians(measurements)
    return result


def _medians(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _medians([value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return [_medians([value[index] for value in values]) for index in range(len(first))]
    return statistics.median(values)


def _run_next(operation: Callable[[Tensor, Tensor], Any], sources: Iterator[Tensor], targets: Iterator[Tensor]) -> None:
    operation(next(sources), next(targets))


def _next_product(room: Tensor, side: int, as_layer: bool) -> Callable[[], None]:
    """Multiply the next matrices of `room`, plainly or as a linear layer does in its forward and backward pass."""
    import torch

    from aliquot.machine.matmul import copies_transposed, copy_pays

    room.fill_(1)  # products grow without end
    matrices = room[: len(room) // (3 * side * side) * 3 * side * side].view(-1, 3, side, side)
    turn = cycle([tuple(triple) for triple in matrices])
    copies = copies_transposed("cpu", room.dtype) and copy_pays(side, side, side)

    def multiply() -> None:
        left, right, out = next(turn)
        torch.mm(left, right, out=out)  # the gradient of the input, in a layer
        if as_layer:
            left, right, out = next(turn)
            torch.mm(left, right.t(), out=out)  # the output: input times transposed weight
            left, right, out = next(turn)
            torch.mm(left if copies else left.t(), right, out=out)  # the gradient of the weight

    return multiply


def _call_s(evict_cache: Callable[[], None], clock: Callable[[], float]) -> float:
    """Seconds of an operation on a few numbers: the mean of a call with a warm cache and of one with a cold cache."""
    import torch

    tiny = torch.ones(8, requires_grad=True)
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(60):
        if cold := index >= 40:
            evict_cache()
        start = clock()
        ((tiny + tiny).view(2, 4) * 2).sum().backward()  # type: ignore[no-untyped-call]
        times[cold].append(clock() - start)
    return sum(sorted(series)[len(series) // 4] for series in times) / 2 / _CALLS


def _socket_rate() -> float:
    """Bytes/s over loopback TCP, sender and receiver in one process, as gloo has them in each rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    chunk, buffer = bytes(1 << 20), bytearray(1 << 20)

    def send() -> None:
        for _ in range(_SOCKET_BYTES // len(chunk)):
            sender.sendall(chunk)

    with sender, receiver:
        thread = threading.Thread(target=send)
        start, left = time.perf_counter(), _SOCKET_BYTES
        thread.start()
        while left:
            left -= receiver.recv_into(buffer)
        thread.join()
        return _SOCKET_BYTES / (time.perf_counter() - start)
