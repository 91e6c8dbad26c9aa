"""CPU facts and limits of control groups, from machines laid out as files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.machine.cpu import format_cpu_list, parse_cpu_list, read_cpu
from aliquot.machine.memory import memory_limit
from tests.doctor.machines import lay_out


def two_nodes(root: Path) -> Path:
    """2 NUMA nodes x 2 cores x 2 threads; the numbers of node 1 lie between those of node 0."""
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: avx2 avx512f amx_bf16\n\n"
        "processor\t: 1\nmodel name\t: other",
        "sys/devices/system/node/node0/cpulist": "0,2,4,6",
        "sys/devices/system/node/node1/cpulist": "1,3,5,7",
    }
    for cpu in range(8):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{cpu % 4},{cpu % 4 + 4}"
    return lay_out(root, files)


def test_cores_are_physical_and_in_numa_order(tmp_path: Path) -> None:
    facts = read_cpu(two_nodes(tmp_path), allowed=range(8))
    assert facts.cores == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert (facts.model, facts.numa_nodes, facts.quota) == ("Some CPU @ 2 GHz", 2, None)
    assert facts.isa == ("amx_bf16", "avx512f", "avx2")
    assert facts.usable_cores == 4 and not facts.is_throttled


def test_only_allowed_cpus_count(tmp_path: Path) -> None:
    facts = read_cpu(two_nodes(tmp_path), allowed={2, 6, 4})
    assert facts.cores == ((4,), (2, 6)) or facts.cores == ((2, 6), (4,))
    assert facts.numa_nodes == 1


def test_bare_root_counts_every_cpu_as_a_core(tmp_path: Path) -> None:
    facts = read_cpu(tmp_path, allowed={0, 1})
    assert facts.cores == ((0,), (1,)) and facts.isa == () and facts.model


V1, V2 = "4:memory:/a/b\n3:cpu,cpuacct:/a/b", "0::/a/b"


@pytest.mark.parametrize(
    ("files", "quota", "limit"),
    [
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None, 8000),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5, 8000),
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/memory.max": "4096000",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "900000 100000",
            },
            2.0,
            4000,
        ),
        # A container sees its own group at the top, under a path that it cannot see.
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/memory.max": "4096000"}, None, 4000),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "4096000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            0.5,
            4000,
        ),
        ({}, None, 8000),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, files: dict[str, str], quota: float | None, limit: int) -> None:
    lay_out(tmp_path, {"proc/meminfo": "MemTotal:        8000 kB\nMemFree: 1 kB", **files})
    assert read_cpu(tmp_path, allowed={0}).quota == quota
    assert memory_limit(tmp_path) == limit * 1024


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == sorted(cpus)
