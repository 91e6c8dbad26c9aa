"""Run all checks of a machine, file by file in the order of their definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aliquot.doctor import cpu_checks, memory_checks, network_checks, software_checks, storage_checks
from aliquot.doctor.finding import Finding, Subject

_FILES = (cpu_checks, memory_checks, storage_checks, network_checks, software_checks)
CHECKS: list[Callable[[Subject], Finding]] = [
    function for file in _FILES for name, function in vars(file).items() if name.startswith("check_")
]


def examine(subject: Subject) -> Iterator[Finding]:
    """Yield the finding of every check; the checks with two ranks come last. Raises UsageError for invalid --peers."""
    network_checks.parse_peers(subject)
    for check in CHECKS:
        yield check(subject)
    from aliquot.doctor import two_ranks  # imports torch, which takes seconds

    report = two_ranks.run_two_ranks(subject)
    yield two_ranks.judge_self_test(report)
    yield two_ranks.judge_matmul(report, subject)
