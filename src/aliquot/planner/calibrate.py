"""Measure this machine for plans: all cores busy at once, as in training.

Thoroughly: as many processes as there are cores measure side by side, one thread each; one process with a thread a core
then tells what threads are worth: much in a large product, nothing in a small tensor. Quickly: threads of this process
are the ranks, for the layout at hand alone.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliquot.core.errors import PlanError
from aliquot.distributed.topology import RankLayout
from aliquot.machine.allocator import tune_glibc
from aliquot.machine.cpu import read_cpu
from aliquot.planner.measure_rates import QUICK, THOROUGH, Tables, measure_rates, medians
from aliquot.planner.planned_machine import Machine
from aliquot.planner.profiles import check_room, keep_quick, keep_thorough, known

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray
    from multiprocessing.synchronize import Barrier


def calibrate() -> Path:
    """Measure and keep the profile; where it is. About half a minute. Raises OSError where it cannot be kept."""
    cpu = read_cpu()
    check_room()  # not after half a minute
    cores = cpu.usable_cores
    single = _together(cores, threads=1)
    whole = _together(1, threads=cores) if cores > 1 else single
    return keep_thorough(cpu, single, whole)


def make_known(machine: Machine, layout: RankLayout) -> None:
    """Measure this machine quickly, for the ranks of one node of `layout`, unless that was done within the hour."""
    if machine.cpu is None or known(machine, layout):
        return
    import torch

    count, threads = layout.ranks_per_node, layout.threads_per_rank
    of_core = min(1.0, machine.cpu.usable_cores / (count * threads))
    own = torch.get_num_threads()
    begin, done = threading.Barrier(count), threading.Barrier(count)
    told = [0.0] * count

    def rank(number: int) -> Tables:
        torch.set_num_threads(threads)  # of this Python thread

        def agree(value: float) -> float:
            told[number] = value
            begin.wait()
            largest = max(told)
            done.wait()  # nobody writes before all have read
            return largest

        return measure_rates(agree, QUICK, of_core)

    try:
        with ThreadPoolExecutor(count) as pool:
            found = list(pool.map(rank, range(count)))
    finally:
        torch.set_num_threads(own)
    with suppress(OSError):  # then the plan estimates
        keep_quick(machine.cpu, count, threads, medians(found))


def _together(count: int, threads: int) -> dict[str, Any]:
    """The median of what `count` processes measure at once."""
    context = multiprocessing.get_context("spawn")
    barrier, told, results = context.Barrier(count), context.Array("d", count), context.SimpleQueue()
    workers = [
        context.Process(target=_measure, args=(number, barrier, told, results, threads)) for number in range(count)
    ]
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
    result: dict[str, Any] = medians(found)
    return result


def _measure(number: int, barrier: Barrier, told: SynchronizedArray[float], results: Any, threads: int) -> None:
    """In a process of its own."""
    import torch

    tune_glibc()
    torch.set_num_threads(threads)

    def agree(value: float) -> float:
        told[number] = value
        barrier.wait()
        largest: float = max(told[:])
        barrier.wait()  # nobody writes before all have read
        return largest

    results.put(measure_rates(agree, THOROUGH))
