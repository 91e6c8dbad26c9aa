"""All checks, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aliquot.doctor import cpu, measure, memory, network, software, storage
from aliquot.doctor.finding import Finding, Subject

CHECKS: tuple[Callable[[Subject], Finding], ...] = (
    cpu.check_isa,
    cpu.check_amx,
    cpu.check_kernels,
    cpu.check_cores,
    cpu.check_smt,
    cpu.check_numa,
    cpu.check_threads,
    cpu.check_pinning,
    memory.check_memory,
    memory.check_huge_pages,
    memory.check_allocator,
    memory.check_shm,
    memory.check_open_files,
    memory.check_locked_memory,
    storage.check_storage,
    storage.check_storage_clock,
    network.check_interface,
    network.check_names,
    network.check_port,
    network.check_peers,
    network.check_efa,
    network.check_nccl,
    software.check_compiler,
    software.check_python_headers,
    software.check_versions,
    software.check_deepspeed,
)


def examine(subject: Subject) -> Iterator[Finding]:
    """A finding of each check, as it comes; the two that start ranks last."""
    for check in CHECKS:
        yield check(subject)
    told = measure.run_two_ranks(subject)
    yield measure.judge_self_test(told)
    yield measure.judge_matmul(told, subject)
