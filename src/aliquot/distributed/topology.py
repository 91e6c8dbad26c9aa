"""The topology of a run: its nodes, ranks and threads, and the rank, cores and device of this process.

auto_ranks.py chooses the number of ranks before they start. This module assigns threads and cores to running ranks, by
the same rules under aliquot's launcher, under torchrun and in a TrainJob. A rank uses one thread per physical core, and
stays on one NUMA node unless there are fewer ranks than NUMA nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import DeviceError, LaunchError
from aliquot.core.number_format import count_of
from aliquot.distributed.numa_binding import core_sets, cores_of_single_rank, cores_per_rank
from aliquot.distributed.rank_errors import LOG_DIRECTORY
from aliquot.machine.cpu import CpuFacts, format_cpu_list
from aliquot.machine.memory import AMPERE, too_little_lockable

_CORES = "physical cores"
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class RankLayout:
    """The numbers of nodes, ranks and threads of a run, for the planner, which assumes equal nodes and equal ranks."""

    nodes: int
    ranks_per_node: int
    threads_per_rank: int
    device: Literal["cpu", "cuda"]
    numa_nodes: int = 1  # per node

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Topology:
    """The rank, node, device, threads and cores of this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    device: Literal["cpu", "cuda"]
    threads: int  # in torch's intra-op pool
    cores: tuple[int, ...]  # logical CPUs that this rank is pinned to; empty: not pinned

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints, and writes files that exist once per run."""
        return self.rank == 0


def place_rank(
    launch: LaunchSection,
    environ: Mapping[str, str],
    cpu: CpuFacts,
    device: Literal["cpu", "cuda"],
    has_own_cores: bool = False,
) -> tuple[Topology, str]:
    """Return the topology of this process, and one line that describes the placement of all ranks of this machine.

    Without RANK in `environ` the process is rank 0 of 1. Raises LaunchError if the variables contradict each other.

    Args:
        cpu: facts that were read before aliquot pinned this process.
        has_own_cores: whether another program, such as srun, has already bound every rank to different cores.
    """
    # WORLD_SIZE without RANK, which users export for torchrun, is a number of ranks to start (launcher.py).
    alone = "RANK" not in environ
    rank, world_size = integer_variable(environ, "RANK", 0), 1 if alone else integer_variable(environ, "WORLD_SIZE", 1)
    local_rank = 0 if alone else integer_variable(environ, "LOCAL_RANK", 0)
    local_ranks = 1 if alone else integer_variable(environ, "LOCAL_WORLD_SIZE", world_size)
    if rank >= world_size or local_rank >= local_ranks:
        raise LaunchError(
            f"the environment says rank {rank} of {world_size}, local rank {local_rank} of {local_ranks}: ranks"
            " count from 0. Correct RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    threads, reason = threads_per_rank(launch, environ, cpu, 1 if has_own_cores else local_ranks)
    cores = [cores_of_single_rank(cpu, threads)] if has_own_cores else core_sets(cpu, local_ranks, threads)
    topology = Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_ranks,
        node_rank=integer_variable(environ, "GROUP_RANK", rank // local_ranks),
        nodes=integer_variable(environ, "GROUP_WORLD_SIZE", world_size // local_ranks),
        device=device,
        threads=threads,
        cores=cores[0 if has_own_cores else local_rank],
    )
    where = f", cores {' | '.join(format_cpu_list(cpus) for cpus in cores)}" if cores[0] else ", not pinned"
    machines = f" on each of {topology.nodes} nodes" if topology.nodes > 1 else ""
    processes = f"{count_of(local_ranks, 'rank')} x {count_of(threads, 'thread')}"
    cause = "" if reason == f"{_CORES} / ranks" else f", from {reason}"
    return topology, f"{processes}{machines}{where}{cause}"


def threads_per_rank(
    launch: LaunchSection, environ: Mapping[str, str], cpu: CpuFacts, local_ranks: int
) -> tuple[int, str]:
    """Return the number of intra-op threads of every local rank, and the reason for the number, for the console."""
    if launch.threads_per_rank is not None:
        return _at_most_cpus(cpu, launch.threads_per_rank, "launch.threads_per_rank")
    # OMP_NUM_THREADS takes precedence over MKL_NUM_THREADS.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if name not in environ or (name == "OMP_NUM_THREADS" and _set_by_torchrun(environ, local_ranks)):
            continue
        # OpenMP allows a list with one number per nesting level; torch uses the first level.
        text = environ[name].split(",")[0].strip()
        if not text.isdecimal() or int(text) == 0:
            raise LaunchError(f"the environment variable {name} is {text!r}: set it to a positive number")
        return _at_most_cpus(cpu, int(text), name)
    if len(cpu.cores) < local_ranks:
        return 1, f"{_CORES} / ranks"
    threads = min(map(len, cores_per_rank(cpu, local_ranks)))  # the rank with the fewest cores decides
    if cpu.is_throttled and cpu.usable_cores // local_ranks < threads:
        return max(1, cpu.usable_cores // local_ranks), "cgroup CPU quota / ranks"
    return threads, f"{_CORES} / ranks"


def _at_most_cpus(cpu: CpuFacts, threads: int, name: str) -> tuple[int, str]:
    """Limit the threads to the number of CPUs: more threads only wait for each other, and the kernel limits them."""
    cpus = sum(map(len, cpu.cores))
    return (threads, name) if threads <= cpus else (cpus, f"{name} ({threads}, more than the CPUs here)")


def _set_by_torchrun(environ: Mapping[str, str], local_ranks: int) -> bool:
    """Whether torchrun, and not the user, has set OMP_NUM_THREADS=1, which torchrun does for several ranks."""
    return (
        local_ranks > 1
        and "TORCHELASTIC_RUN_ID" in environ
        and LOG_DIRECTORY not in environ
        and environ["OMP_NUM_THREADS"] == "1"
    )


def integer_variable(environ: Mapping[str, str], name: str, default: int, smallest: int = 0) -> int:
    """Return the number in an environment variable. Raises LaunchError unless it is a number of at least `smallest`."""
    text = environ.get(name, str(default))
    if not text.isdecimal() or int(text) < smallest:
        raise LaunchError(f"the environment variable {name} is {text!r}: set it to a whole number, at least {smallest}")
    return int(text)


def port_variable(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the port in an environment variable. Raises LaunchError unless it is a port."""
    port = integer_variable(environ, name, default)
    if not 0 < port <= _LARGEST_PORT:
        raise LaunchError(f"the environment variable {name} is {port}: ports are 1 to {_LARGEST_PORT}")
    return port


def choose_device(setting: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Return the device for `launch.device`; auto takes a GPU if torch sees one. Raises DeviceError."""
    import torch

    if setting == "cpu" or not torch.cuda.is_available():
        if setting == "cuda":
            raise DeviceError("launch.device is cuda, but torch sees no GPU here: set launch.device=cpu")
        return "cpu"
    if torch.cuda.get_device_capability() < (AMPERE, 0):
        raise old_gpu(torch.cuda.get_device_name())
    return "cuda"


def old_gpu(name: str) -> DeviceError:
    """Return the error for a GPU without kernels for attention: flash attention needs Ampere."""
    return DeviceError(
        f"the GPU {name} is too old: aliquot needs compute capability {AMPERE}.0 (A10G, L4, A100 or newer). Set"
        " launch.device=cpu"
    )


def check_locked_memory(root: Path = Path("/")) -> None:
    """Raise LaunchError if NCCL could not register memory with this node's RDMA cards, and would fail or take TCP."""
    limit = too_little_lockable(root)
    if limit is not None:
        raise LaunchError(
            f"this process may lock {limit >> 20} MiB of memory, which is too little for EFA or InfiniBand: raise the"
            " limit of the container runtime (LimitMEMLOCK=infinity; render the node class again on EKS), or set"
            " NCCL_NET=Socket"
        )


def choose_gpu(local_rank: int, local_ranks: int) -> int:
    """Return the index of the GPU of a rank, among the GPUs that this process sees.

    A process that sees a single GPU takes this one: `srun --gpus-per-task=1` shows each rank another GPU. `check_gpus`
    refuses a GPU that several ranks have taken. Raises LaunchError if there are fewer GPUs than ranks.
    """
    import torch

    gpus = torch.cuda.device_count()
    if 1 < gpus < local_ranks:
        raise LaunchError(
            f"{local_ranks} ranks on this machine, which has {gpus} GPUs: every rank needs its own GPU;"
            f" set launch.ranks={gpus}, or launch.device=cpu"
        )
    return 0 if gpus == 1 else local_rank


def check_gpus(gpus: Sequence[str | None]) -> None:
    """Raise LaunchError if several ranks have taken the same GPU, which NCCL refuses. `gpus`: the UUIDs by rank."""
    for rank, gpu in enumerate(gpus):
        if gpu is not None and (first := gpus.index(gpu)) < rank:
            raise LaunchError(
                f"ranks {first} and {rank} have the same GPU, and every rank needs its own: start one rank for each GPU"
                " (launch.ranks; srun with --gpus-per-task=1), or set launch.device=cpu"
            )
