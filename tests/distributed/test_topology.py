"""The topology of a run: rank, threads and device of a process, from a table of environments.

Automatic numbers of ranks, and NUMA binding: sets of cores per rank, memory of the local node, pinned threads.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from aliquot.config.schema import LaunchSection, RunConfig
from aliquot.core.errors import UserError
from aliquot.distributed.auto_ranks import cpu_ranks, crowding_warning, max_cpu_ranks, resolve_auto_ranks
from aliquot.distributed.numa_binding import bind_memory, core_sets, has_memory_policy, set_preferred_node
from aliquot.distributed.topology import check_gpus, choose_device, choose_gpu, place_rank, threads_per_rank
from aliquot.machine.cpu import CpuFacts
from tests.runs import command, write_config


def cpu(*nodes: int, quota: float | None = None, threads: int = 2) -> CpuFacts:
    """Return a CPU with so many cores per NUMA node. Of n cores, core i has logical CPUs i and, as a thread, i + n."""
    count = sum(nodes)
    cores = tuple(tuple(range(core, threads * count, count)) for core in range(count))
    owners = tuple(node for node, size in enumerate(nodes) for _ in range(size))
    return CpuFacts("model", cores, quota, len(nodes), (), owners)


def rank(number: int, local_ranks: int, **variables: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of one node."""
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


def test_bound_rank_uses_all_allowed_cores() -> None:
    """srun binds every rank of a host to cores of its own."""
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
    assert (f", from {source}" in said) == (source != CORES)
    assert ("not pinned" in said) == (cores == ())


def test_placement_line() -> None:
    said = place_rank(LaunchSection(), rank(1, 2), cpu(2), "cpu")[1]
    assert said == "2 ranks x 1 thread, cores 0 | 1"
    said = place_rank(LaunchSection(), {}, cpu(4), "cpu")[1]
    assert said == "1 rank x 4 threads, not pinned"


def test_topology_of_several_nodes() -> None:
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
def test_contradictory_environment_is_an_error(environ: dict[str, str]) -> None:
    with pytest.raises(UserError):
        place_rank(LaunchSection(), environ, cpu(2), "cpu")


def test_world_size_without_rank_is_no_rank() -> None:
    topology, _ = place_rank(LaunchSection(), {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, cpu(2), "cpu")
    assert (topology.rank, topology.world_size, topology.local_world_size) == (0, 1, 1)


def test_more_ranks_than_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_gpu(rank, 2) for rank in range(2)] == [0, 1]
    with pytest.raises(UserError, match=r"4 ranks on this machine, which has 2 GPUs: .* set launch.ranks=2, or launch"):
        choose_gpu(0, 4)


@pytest.mark.parametrize(("capability", "device"), [((7, 5), None), ((8, 0), "cuda"), ((12, 0), "cuda")])
def test_gpus_before_ampere_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], device: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert choose_device("cpu") == "cpu"
    for setting in ("auto", "cuda"):
        if device is None:
            with pytest.raises(UserError, match=r"the GPU Tesla T4 is too old: .* 8\.0 .*launch\.device=cpu"):
                choose_device(setting)
        else:
            assert choose_device(setting) == device


def test_rank_takes_the_only_gpu_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `srun --gpus-per-task=1` shows each rank another GPU; on a machine with one GPU, all ranks see the same."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [choose_gpu(rank, 4) for rank in range(4)] == [0, 0, 0, 0]
    check_gpus(["GPU-a", "GPU-b", "GPU-c"])
    check_gpus([None, None])
    with pytest.raises(UserError, match="ranks 1 and 2 have the same GPU, and every rank needs its own"):
        check_gpus(["GPU-a", "GPU-b", "GPU-b"])


GIB = 1 << 30


def config(engine: str = "auto", **train: Any) -> RunConfig:
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "shard": {"engine": engine}, "train": train}
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize(
    ("facts", "gib", "settings", "nodes", "ranks"),
    [
        (cpu(1), 64, config(global_batch_size=64), 1, 1),
        (cpu(2), 64, config(global_batch_size=64), 1, 2),
        (cpu(4), 64, config(global_batch_size=64), 1, 4),
        (cpu(16), 64, config(global_batch_size=64), 1, 4),
        (cpu(24, 24), 384, config(global_batch_size=96), 1, 12),
        (cpu(24, 24), 384, config("host", global_batch_size=96), 1, 12),
        # Not more processes than memory holds, not more ranks than there are micro-batches.
        (cpu(24, 24), 16, config(global_batch_size=96), 1, 8),
        (cpu(4), 1, config(global_batch_size=64), 1, 1),
        (cpu(24, 24), 384, config(global_batch_size=4), 1, 4),
        (cpu(24, 24), 384, config(global_batch_size=32, per_device_train_batch_size=8), 1, 4),
        (cpu(24, 24), 384, config(global_batch_size=32, gradient_accumulation_steps=8), 1, 4),
        (cpu(24, 24), 384, config(global_batch_size=8), 2, 4),
        (cpu(2), 64, config(global_batch_size=1), 1, 1),
        # An uneven last round costs more than threads do.
        (cpu(24), 384, config(global_batch_size=8), 1, 4),
        # A quota is shared by all NUMA nodes.
        (cpu(24, 24, quota=8), 384, config(global_batch_size=64), 1, 8),
        (cpu(8, quota=0.5), 384, config(global_batch_size=64), 1, 1),
        # More ranks would train something else, or hold layers of their own.
        (cpu(24, 24), 384, config(), 1, 2),
        (cpu(8), 384, config(gradient_accumulation_steps=4), 1, 1),
        (cpu(24, 24), 384, config("fsdp", global_batch_size=64), 1, 2),
    ],
)
def test_ranks(facts: CpuFacts, gib: int, settings: RunConfig, nodes: int, ranks: int) -> None:
    found, reason = cpu_ranks(settings, nodes, facts, gib * GIB)
    assert found == ranks, reason


@example(nodes=[1, 1, 8], batch=1, gib=1, quota=9.0)
@given(
    nodes=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    batch=st.integers(1, 300),
    gib=st.integers(1, 400),
    quota=st.none() | st.floats(0.1, 100),
)
def test_cpu_ranks_never_span_nodes_or_share_cores(nodes: list[int], batch: int, gib: int, quota: float | None) -> None:
    facts = cpu(*nodes, quota=quota)
    ranks, _ = cpu_ranks(config(global_batch_size=batch), 1, facts, gib * GIB)
    threads, _ = threads_per_rank(LaunchSection(), {}, facts, ranks)
    assert 1 <= ranks <= max(len(nodes), max_cpu_ranks(facts, gib * GIB)[0])
    assert ranks * threads <= facts.usable_cores
    node_of = {number: node for core, node in zip(facts.cores, facts.node_of_core, strict=True) for number in core}
    sets = core_sets(facts, ranks, threads)
    if ranks >= len(nodes) and ranks > 1:
        assert all(len({node_of[number] for number in own}) <= 1 for own in sets)
        assert all(len(own) >= threads for own in sets) or not any(sets)
    if ranks > 1 and len(nodes) > 1 and ranks >= len(nodes):
        assert {node_of[own[0]] for own in sets} == set(range(len(nodes)))  # no node is idle


def test_configured_number_of_ranks_is_kept() -> None:
    assert resolve_auto_ranks(LaunchSection(ranks=7), config()) == (LaunchSection(ranks=7), None)
    launch, reason = resolve_auto_ranks(LaunchSection(device="cpu"), config())
    assert isinstance(launch.ranks, int) and reason


def test_crowding_warning_counts_ranks_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a person asks for are started all the same."""
    monkeypatch.setattr("aliquot.distributed.auto_ranks.read_cpu", lambda: cpu(2))
    monkeypatch.setattr("aliquot.distributed.auto_ranks.memory_limit", lambda: 24 * GIB)
    settings = config(global_batch_size=64)
    for launch in (LaunchSection(), LaunchSection(ranks=4, device="cpu")):
        assert crowding_warning(launch, settings) is None
    assert crowding_warning(LaunchSection(ranks=64, device="cpu"), settings) == (
        "launch.ranks is 64, but this machine has 2 cores and 24 GiB of memory: ranks on one core take turns, and"
        " these ranks take about 128 GiB. launch.ranks: auto would start 2 here"
    )


def test_crowding_warning_precedes_ranks(tmp_path: Path) -> None:
    """No rank starts here, because the other node never comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nodes = ["launch.nodes=2", "launch.node_rank=0", "launch.join_timeout_s=0.1", f"launch.master_port={port}"]
    ranks = 4 * len(os.sched_getaffinity(0))
    result = command("train", write_config(tmp_path), *nodes, f"launch.ranks={ranks}")
    first, *_, last = result.stderr.splitlines()
    assert first.startswith(f"aliquot: launch.ranks is {ranks}, but this machine has "), result.stderr
    assert last.endswith("[rendezvous]")


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
    facts = cpu(5, 5, threads=1)
    for cpus in core_sets(facts, 4, 2):
        assert {core // 5 for core in cpus} in ({0}, {1})


def test_core_sets_follow_sizes_of_numa_nodes() -> None:
    facts = cpu(6, 2, threads=1)
    assert core_sets(facts, 4, 2) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert core_sets(facts, 2, 2) == [(0, 1, 2, 3, 4, 5), (6, 7)]
    assert threads_per_rank(LaunchSection(), {}, facts, 2) == (
        2,
        "physical cores / ranks",
    )  # the slowest rank sets the pace


def test_unpinned_ranks_stay_on_a_numa_node() -> None:
    for quota, threads in ((4, 2), (None, 8)):
        assert core_sets(cpu(4, 4, quota=quota, threads=1), 2, threads) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert core_sets(cpu(4, 4, threads=1), 1, 8) == [()]


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
