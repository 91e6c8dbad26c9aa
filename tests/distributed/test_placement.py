"""Which rank, how many threads, which cores: a table of cases, and properties of the core sets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import UserError
from aliquot.distributed.numa_binding import bind_memory, core_sets, has_memory_policy, set_preferred_node
from aliquot.distributed.topology import check_gpus, place_rank, threads_per_rank
from aliquot.machine.cpu import CpuFacts


def cpu(cores: int, quota: float | None = None) -> CpuFacts:
    """A CPU with two threads a core: core i is logical CPUs i and i + cores."""
    return CpuFacts("model", tuple((core, core + cores) for core in range(cores)), quota, 1, ())


def rank(number: int, local_ranks: int, **variables: str) -> dict[str, str]:
    """What torchrun tells a rank of one node."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(local_ranks),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "run",
    } | variables


OURS = {"ALIQUOT_LOG_DIRECTORY": "/logs"}
CORES, QUOTA = "physical cores / ranks", "cgroup CPU quota / ranks"
SETTING, VARIABLE = "launch.threads_per_rank", "OMP_NUM_THREADS"


def test_a_rank_that_was_bound_uses_all_it_may() -> None:
    """As srun does with ranks of one host: each sees other cores."""
    four = CpuFacts("model", tuple((core, core + 8) for core in range(4, 8)), None, 1, ())
    topology, told = place_rank(LaunchSection(), rank(1, 2), four, "cpu", has_own_cores=True)
    assert (topology.threads, topology.cores) == (4, (4, 5, 6, 7)) and "2 ranks x 4 threads, cores 4-7" in told


@pytest.mark.parametrize(
    ("setting", "environ", "facts", "threads", "cores", "source"),
    [
        (None, {}, cpu(4), 4, (), CORES),
        (None, rank(0, 2), cpu(2), 1, (0,), CORES),
        (None, rank(1, 2), cpu(9), 4, (4, 5, 6, 7, 8), CORES),
        (None, rank(2, 3), cpu(2), 1, (), CORES),
        (None, rank(0, 2), cpu(8, quota=8), 4, (0, 1, 2, 3), CORES),
        (None, rank(0, 2), cpu(64, quota=8.5), 4, (), QUOTA),
        (None, {}, cpu(8, quota=0.5), 1, (), QUOTA),
        (3, rank(1, 2, OMP_NUM_THREADS="2"), cpu(8), 3, (4, 5, 6, 7), SETTING),
        (8, rank(1, 2), cpu(8), 8, (), SETTING),
        (None, {"OMP_NUM_THREADS": "1"}, cpu(4), 1, (), VARIABLE),
        (None, rank(0, 1, OMP_NUM_THREADS="1"), cpu(4), 1, (), VARIABLE),
        # torchrun's own 1 looks like a user's; any other number is a user's; under our own launcher so is a 1.
        (None, rank(0, 2, OMP_NUM_THREADS="1"), cpu(4), 2, (0, 1), CORES),
        (None, rank(0, 2, OMP_NUM_THREADS="2,1"), cpu(4), 2, (0, 1), VARIABLE),
        (None, rank(0, 2, OMP_NUM_THREADS="1", **OURS), cpu(4), 1, (0, 1), VARIABLE),
        (None, rank(0, 2, MKL_NUM_THREADS="1"), cpu(4), 1, (0, 1), "MKL_NUM_THREADS"),
        (None, rank(0, 2, OMP_NUM_THREADS="2", MKL_NUM_THREADS="1"), cpu(4), 2, (0, 1), VARIABLE),
        # The kernel does not make as many threads.
        (None, {"OMP_NUM_THREADS": "100000"}, cpu(4), 8, (), f"{VARIABLE} (100000, more than the CPUs here)"),
        (100_000, rank(0, 2), cpu(4), 8, (), f"{SETTING} (100000, more than the CPUs here)"),
    ],
)
def test_threads_and_cores(
    setting: int | None, environ: dict[str, str], facts: CpuFacts, threads: int, cores: tuple[int, ...], source: str
) -> None:
    topology, said = place_rank(LaunchSection(threads_per_rank=setting), environ, facts, "cpu")
    assert (topology.threads, topology.cores) == (threads, cores)
    assert said.endswith(f", from {source}")
    assert ("not pinned" in said) == (cores == ())


def test_what_is_said() -> None:
    said = place_rank(LaunchSection(), rank(1, 2), cpu(2), "cpu")[1]
    assert said == "2 ranks x 1 thread, cores 0 | 1, from physical cores / ranks"
    said = place_rank(LaunchSection(), {}, cpu(4), "cpu")[1]
    assert said == "1 rank x 4 threads, not pinned, from physical cores / ranks"


def test_rank_of_several_nodes() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun = environ | {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"}
    for variables in (environ, torchrun):  # another launcher does not tell the node
        topology, text = place_rank(LaunchSection(), variables, cpu(2), "cpu")
        assert (topology.rank, topology.world_size, topology.local_rank, topology.local_world_size) == (5, 6, 1, 2)
        assert (topology.node_rank, topology.nodes) == (2, 3)
        assert text.startswith("2 ranks x 1 thread on each of 3 nodes, cores 0 | 1")


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
        {"RANK": "one"},
        {"OMP_NUM_THREADS": "0"},
        {"OMP_NUM_THREADS": "many"},
    ],
)
def test_senseless_environment_is_a_user_error(environ: dict[str, str]) -> None:
    with pytest.raises(UserError):
        place_rank(LaunchSection(), environ, cpu(2), "cpu")


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
    chosen = [core for own in sets for core in own]
    assert len(sets) == local_ranks
    assert len(set(chosen)) == len(chosen) <= len(facts.cores)
    assert set(chosen) <= {cpu for core in facts.cores for cpu in core}
    assert not any(len(set(core) & set(chosen)) > 1 for core in facts.cores)  # siblings never compete
    assert all(len(own) >= threads for own in sets) if chosen else all(own == () for own in sets)
    if chosen:
        assert max(map(len, sets)) - min(map(len, sets)) <= 1


def test_no_rank_straddles_nodes_of_equal_size() -> None:
    facts = numa((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    for own in core_sets(facts, 4, 2):
        assert {core // 5 for core in own} in ({0}, {1})


def numa(*nodes: tuple[int, ...], quota: float | None = None) -> CpuFacts:
    """NUMA nodes of these cores, one thread each."""
    owners = tuple(number for number, cores in enumerate(nodes) for _ in cores)
    return CpuFacts("model", tuple((core,) for cores in nodes for core in cores), quota, len(nodes), (), owners)


def test_ranks_of_unequal_nodes() -> None:
    facts = numa((0, 1, 2, 3, 4, 5), (6, 7))
    assert core_sets(facts, 4, 2) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert core_sets(facts, 2, 2) == [(0, 1, 2, 3, 4, 5), (6, 7)]
    assert threads_per_rank(LaunchSection(), {}, facts, 2) == (2, CORES)  # the slowest rank sets the pace


def test_without_cores_of_their_own_ranks_keep_to_a_node() -> None:
    nodes = (0, 1, 2, 3), (4, 5, 6, 7)
    for facts, threads in ((numa(*nodes, quota=4), 2), (numa(*nodes), 8)):
        assert core_sets(facts, 2, threads) == list(nodes)
    assert core_sets(numa(*nodes), 1, 8) == [()]


def test_what_people_export_for_torchrun_is_not_taken_for_a_rank() -> None:
    topology, _ = place_rank(LaunchSection(), {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, cpu(2), "cpu")
    assert (topology.rank, topology.world_size, topology.local_world_size) == (0, 1, 1)


def test_memory_is_preferred_from_the_own_node(tmp_path: Path) -> None:
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
        assert not bind_memory((1, 2), tmp_path)  # what is chosen already stands
    finally:
        set_preferred_node(None)
    assert "default" in Path("/proc/self/numa_maps").read_text().splitlines()[0] and not has_memory_policy()
    assert not bind_memory((0,), tmp_path / "one node")


def test_pinning_reaches_threads_that_run_already() -> None:
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


def test_more_ranks_than_gpus_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_gpus(1)
    with pytest.raises(UserError, match=r"2 ranks on this machine, which has 1 GPU: .* set launch.ranks=1, or launch"):
        check_gpus(2)
