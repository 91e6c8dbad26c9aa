"""The topology of a run: rank, threads and device of a process, from a table of environments."""

from __future__ import annotations

import pytest
import torch

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import UserError
from aliquot.distributed.topology import check_gpus, choose_gpu, place_rank
from aliquot.machine.cpu import CpuFacts


def cpu(cores: int, quota: float | None = None) -> CpuFacts:
    """Return a CPU with two threads per core: core i has logical CPUs i and i + cores."""
    return CpuFacts("model", tuple((core, core + cores) for core in range(cores)), quota, 1, ())


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
    assert said.endswith(f", from {source}")
    assert ("not pinned" in said) == (cores == ())


def test_placement_line() -> None:
    said = place_rank(LaunchSection(), rank(1, 2), cpu(2), "cpu")[1]
    assert said == "2 ranks x 1 thread, cores 0 | 1, from physical cores / ranks"
    said = place_rank(LaunchSection(), {}, cpu(4), "cpu")[1]
    assert said == "1 rank x 4 threads, not pinned, from physical cores / ranks"


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


def test_rank_takes_the_only_gpu_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `srun --gpus-per-task=1` shows each rank another GPU; on a machine with one GPU, all ranks see the same."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [choose_gpu(rank, 4) for rank in range(4)] == [0, 0, 0, 0]
    check_gpus(["GPU-a", "GPU-b", "GPU-c"])
    check_gpus([None, None])
    with pytest.raises(UserError, match="ranks 1 and 2 have the same GPU, and every rank needs its own"):
        check_gpus(["GPU-a", "GPU-b", "GPU-b"])
