"""Measure this machine once: matrix products by size, memory, calls and sockets, all cores busy at once.

As many processes as there are physical cores measure side by side, one thread each, as ranks of one thread would; one
process with a thread a core then tells what threads are worth: much in a large product, nothing in a small tensor. The
profile is kept in the cache directory, under the machine's own name: processor, number of cores and version of torch.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliquot.errors import PlanError
from aliquot.launch.preload import tune
from aliquot.launch.rank_layout import RankLayout
from aliquot.machine.cpu import CpuFacts, read_cpu
from aliquot.plan.planned_machine import Machine
from aliquot.plan.rates import Rates, estimated, interpolated
from aliquot.textfile import publish_text

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

FORMAT = 2
# Products as training has them: tokens x width x width, and the small ones of attention, [batch, m, k, n].
_PRODUCTS = [(1, m, m, m) for m in (128, 256, 512, 1024, 2048)] + [(64, 256, 64, 64), (64, 64, 64, 64)]
_TENSOR_BYTES = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_EACH_S = 0.15


def calibrate() -> Path:
    """Measure and keep the profile; where it is. About half a minute."""
    cpu = read_cpu()
    cores = cpu.usable_cores
    single = _together(cores, threads=1)
    whole = _together(1, threads=cores) if cores > 1 else single
    profile = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": _identity(cpu),
        "core": single,
        "all_cores": whole,
        "cores": cores,
    }
    path = _path(cpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_text(path, json.dumps(profile, indent=1) + "\n")
    return path


def profile_of(machine: Machine, layout: RankLayout) -> Rates | None:
    """What was measured of this machine; None for another one, for GPUs, or where nothing was."""
    if machine.cpu is None or layout.device != "cpu" or not (path := _path(machine.cpu)).is_file():
        return None
    profile = json.loads(path.read_text())
    if profile.get("format") != FORMAT:
        return None
    return Measured.of(profile, machine, layout)


@dataclass(frozen=True)
class Measured:
    """Rates of one rank, between those of a rank with one thread and those of one with a thread a core."""

    source: str
    products: dict[int, list[tuple[float, float]]]  # itemsize -> (size of the product, FLOP/s)
    small: dict[int, float]  # itemsize -> FLOP/s of attention's batched products
    memory: dict[str, list[tuple[float, float]]]  # kind of operation -> (bytes of a tensor, bytes/s)
    call_s: float
    socket_bytes_per_s: float
    network: Rates  # what cannot be measured on one machine

    @classmethod
    def of(cls, profile: dict[str, Any], machine: Machine, layout: RankLayout) -> Measured:
        core, every, cores = profile["core"], profile["all_cores"], profile["cores"]
        threads = min(layout.threads_per_rank, cores / layout.ranks_per_node)  # more share cores
        share = max(0.0, threads - 1) / max(1, cores - 1)

        def table(*keys: str) -> list[tuple[float, float]]:
            one, whole = core[keys[0]][keys[1]], every[keys[0]][keys[1]]
            rates = [alone + (together - alone) * share for (_, alone), (_, together) in zip(one, whole, strict=True)]
            return [(size, rate * min(1.0, threads)) for (size, _), rate in zip(one, rates, strict=True)]

        products = {int(size): table("products", size) for size in core["products"]}
        return cls(
            source=f"measured on this machine on {profile['date']}",
            products={itemsize: rates[:-2] for itemsize, rates in products.items()},
            small={itemsize: rates[-2][1] for itemsize, rates in products.items()},
            memory={kind: table("memory", kind) for kind in core["memory"]},
            call_s=core["call_s"],
            socket_bytes_per_s=core["socket_bytes_per_s"],
            network=estimated(machine, layout),
        )

    def matmul_s(self, batch: int, m: int, k: int, n: int, itemsize: int) -> float:
        smallest = min(m, k, n)
        # A product is as fast as a cube of its geometric mean, unless one side is very short.
        size = min((m * k * n) ** (1 / 3), 4.0 * smallest)
        rate = self.small[itemsize] if batch > 1 and size < 128 else interpolated(self.products[itemsize], size)
        return 2.0 * batch * m * k * n / rate

    def memory_s(self, operation: str, tensor_bytes: int, moved_bytes: float) -> float:
        return moved_bytes / interpolated(self.memory[_kind(operation)], max(1, tensor_bytes))

    def overhead_s(self, calls: float) -> float:
        return calls * self.call_s

    def stage_s(self, moved_bytes: float) -> float:
        return moved_bytes / self.memory["copy"][-1][1]

    def wire_s(self, sent_bytes: float) -> float:
        return self.network.wire_s(sent_bytes)

    def local_s(self, sent_bytes: float) -> float:
        return sent_bytes / self.socket_bytes_per_s


def _kind(operation: str) -> str:
    if "softmax" in operation:
        return "softmax"
    if operation in ("silu", "silu_backward", "gelu", "gelu_backward", "exp", "sigmoid", "tanh", "pow", "rsqrt"):
        return "silu"
    if operation in ("mean", "sum", "amax"):
        return "sum"
    return "copy" if operation in ("copy_", "_to_copy", "clone", "cat", "zero_", "fill_") else "add"


def _identity(cpu: CpuFacts) -> str:
    return f"{cpu.model}, {cpu.usable_cores} cores, torch {version('torch')}"


def _path(cpu: CpuFacts) -> Path:
    root = Path(os.environ.get("ALIQUOT_CACHE") or Path.home() / ".cache" / "aliquot")
    name = hashlib.sha256(_identity(cpu).encode()).hexdigest()[:16]
    return root / "machines" / f"{name}.json"


def _together(count: int, threads: int) -> dict[str, Any]:
    """The median of what `count` processes measure at once."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count), context.SimpleQueue()
    workers = [context.Process(target=_measure, args=(barrier, results, threads)) for _ in range(count)]
    for worker in workers:
        worker.start()
    found: list[dict[str, Any]] = []
    while len(found) < count:
        if not results.empty():
            found.append(results.get())
        elif any(worker.exitcode for worker in workers):
            for worker in workers:
                worker.kill()
            raise PlanError("a process that measures this machine has died: out of memory?")
        else:
            time.sleep(0.05)
    for worker in workers:
        worker.join()
    medians: dict[str, Any] = _medians(found)
    return medians


def _medians(found: list[Any]) -> Any:
    """Of numbers that stand at the same place of equal structures."""
    first = found[0]
    if isinstance(first, dict):
        return {key: _medians([each[key] for each in found]) for key in first}
    if isinstance(first, list):
        return [_medians([each[at] for each in found]) for at in range(len(first))]
    return statistics.median(found)


def _measure(barrier: Barrier, results: Any, threads: int) -> None:
    """In a process of its own; every part begins together."""
    import torch
    import torch.nn.functional as F

    tune()
    torch.set_num_threads(threads)
    products: dict[str, list[list[float]]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        table = []
        for batch, m, k, n in _PRODUCTS:
            left, right = torch.randn(batch, m, k).to(dtype), torch.randn(batch, k, n).to(dtype)
            out = torch.empty(batch, m, n, dtype=dtype)
            if batch == 1:
                seconds = _seconds(barrier, partial(torch.mm, left[0], right[0], out=out[0]))
            else:
                seconds = _seconds(barrier, partial(torch.bmm, left, right, out=out))
            table.append([float(m), 2.0 * batch * m * k * n / seconds])
        products[str(dtype.itemsize)] = table
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
        for size in _TENSOR_BYTES:
            x = torch.randn(size // 1024, 512).to(torch.bfloat16)
            seconds = _seconds(barrier, partial(operation, x))
            memory[kind].append([float(size), moves * size / seconds])
    tiny = torch.ones(8, requires_grad=True)
    call_s = _seconds(barrier, lambda: tiny + tiny)
    results.put(
        {
            "products": products,
            "memory": memory,
            "call_s": call_s,
            "socket_bytes_per_s": _socket_rate(),
        }
    )


def _seconds(barrier: Barrier, work: Callable[[], Any]) -> float:
    """The time of one at its fastest quarter: what else the machine does now is not what it can do."""
    work()  # chooses kernels and touches pages
    barrier.wait()
    times: list[float] = []
    until = time.perf_counter() + _EACH_S
    while time.perf_counter() < until or len(times) < 3:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 4]


def _socket_rate(size_bytes: int = 64 << 20) -> float:
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
