"""NUMA binding: sets of cores per rank, memory of the local node, pinned threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.schema import LaunchSection
from aliquot.distributed.numa_binding import bind_memory, core_sets, has_memory_policy, set_preferred_node
from aliquot.distributed.topology import threads_per_rank
from aliquot.machine.cpu import CpuFacts


@given(
    cores=st.lists(st.integers(1, 2), min_size=1, max_size=40),
    local_ranks=st.integers(1, 12),
    threads=st.integers(1, 12),
    quota=st.none() | st.floats(0.1, 50),
)
def test_core_sets_are_disjoint_and_allowed(
    cores: list[int], local_ranks: int, threads: int, quota: float | None
) -> None:
    logical = iter(range(1000))
    facts = CpuFacts("model", tuple(tuple(next(logical) for _ in range(width)) for width in cores), quota, 1, ())
    sets = core_sets(facts, local_ranks, threads)
    chosen = [core for cpus in sets for core in cpus]
    assert len(sets) == local_ranks
    assert len(set(chosen)) == len(chosen) <= len(facts.cores)
    assert set(chosen) <= {cpu for core in facts.cores for cpu in core}
    assert not any(len(set(core) & set(chosen)) > 1 for core in facts.cores)  # siblings never compete
    assert all(len(cpus) >= threads for cpus in sets) if chosen else all(cpus == () for cpus in sets)
    if chosen:
        assert max(map(len, sets)) - min(map(len, sets)) <= 1


def test_no_rank_spans_numa_nodes() -> None:
    facts = numa((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    for cpus in core_sets(facts, 4, 2):
        assert {core // 5 for core in cpus} in ({0}, {1})


def numa(*nodes: tuple[int, ...], quota: float | None = None) -> CpuFacts:
    """Return a CPU with these cores per NUMA node, one thread per core."""
    owners = tuple(number for number, cores in enumerate(nodes) for _ in cores)
    return CpuFacts("model", tuple((core,) for cores in nodes for core in cores), quota, len(nodes), (), owners)


def test_core_sets_follow_sizes_of_numa_nodes() -> None:
    facts = numa((0, 1, 2, 3, 4, 5), (6, 7))
    assert core_sets(facts, 4, 2) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert core_sets(facts, 2, 2) == [(0, 1, 2, 3, 4, 5), (6, 7)]
    assert threads_per_rank(LaunchSection(), {}, facts, 2) == (
        2,
        "physical cores / ranks",
    )  # the slowest rank sets the pace


def test_unpinned_ranks_stay_on_a_numa_node() -> None:
    nodes = (0, 1, 2, 3), (4, 5, 6, 7)
    for facts, threads in ((numa(*nodes, quota=4), 2), (numa(*nodes), 8)):
        assert core_sets(facts, 2, threads) == list(nodes)
    assert core_sets(numa(*nodes), 1, 8) == [()]


def test_memory_policy_prefers_local_node(tmp_path: Path) -> None:
    for node, cpus in enumerate(("0-3", "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    if not set_preferred_node(None):
        pytest.skip("this kernel does not permit set_mempolicy")
    try:
        assert not bind_memory((3, 4), tmp_path) and not has_memory_policy()  # on both nodes
        assert bind_memory((1, 2), tmp_path) and has_memory_policy()
        assert "prefer:0" in Path("/proc/self/numa_maps").read_text().splitlines()[0]
        assert not bind_memory((1, 2), tmp_path)  # an existing policy is kept
    finally:
        set_preferred_node(None)
    assert "default" in Path("/proc/self/numa_maps").read_text().splitlines()[0] and not has_memory_policy()
    assert not bind_memory((0,), tmp_path / "one node")


def test_pin_process_includes_running_threads() -> None:
    import threading

    from aliquot.distributed.numa_binding import pin_process

    allowed = os.sched_getaffinity(0)
    release = threading.Event()
    early = threading.Thread(target=release.wait)
    early.start()
    try:
        pin_process((min(allowed),))
        assert early.native_id is not None
        assert os.sched_getaffinity(early.native_id) == os.sched_getaffinity(0) == {min(allowed)}
    finally:
        pin_process(tuple(allowed))
        release.set()
