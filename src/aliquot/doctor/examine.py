"""All checks of a machine, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aliquot.doctor import cpu_checks, memory_checks, network_checks, software_checks, storage_checks
from aliquot.doctor.finding import Finding, Subject

CHECKS: tuple[Callable[[Subject], Finding], ...] = (
    cpu_checks.check_isa,
    cpu_checks.check_amx,
    cpu_checks.check_kernels,
    cpu_checks.check_cores,
    cpu_checks.check_smt,
    cpu_checks.check_numa,
    cpu_checks.check_threads,
    cpu_checks.check_pinning,
    memory_checks.check_memory,
    memory_checks.check_huge_pages,
    memory_checks.check_allocator,
    memory_checks.check_shm,
    memory_checks.check_open_files,
    memory_checks.check_locked_memory,
    storage_checks.check_storage,
    storage_checks.check_storage_clock,
    network_checks.check_interface,
    network_checks.check_names,
    network_checks.check_port,
    network_checks.check_peers,
    network_checks.check_efa,
    network_checks.check_nccl,
    software_checks.check_compiler,
    software_checks.check_python_headers,
    software_checks.check_versions,
    software_checks.check_deepspeed,
)


def examine(subject: Subject) -> Iterator[Finding]:
    """Yield the finding of every check; the checks that start two ranks come last.

    Raises:
        UsageError: before the first check, if --peers has an invalid address.
    """
    network_checks.parse_peers(subject)
    for check in CHECKS:
        yield check(subject)
    from aliquot.doctor import two_ranks  # imports torch, which takes seconds

    report = two_ranks.run_two_ranks(subject)
    yield two_ranks.judge_self_test(report)
    yield two_ranks.judge_matmul(report, subject)
