"""How the ranks of a run are spread over nodes, and which one this process is: its threads, its cores, its device.

How many ranks a machine has is decided before they start: see auto_ranks.py. Once they run, the rules are the same
alone, under our launcher, under torchrun and in a TrainJob. A rank computes on physical cores only, one thread each,
and never on two NUMA nodes where there are at least as many ranks as nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import DeviceError, LaunchError
from aliquot.distributed.numa_binding import core_sets, divided_cores, first_cpus
from aliquot.distributed.rank_errors import LOG_DIRECTORY
from aliquot.machine.cpu import CpuFacts, format_cpu_list

_CORES = "physical cores"
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class RankLayout:
    nodes: int
    ranks_per_node: int
    threads_per_rank: int
    device: Literal["cpu", "cuda"]
    numa_nodes: int = 1  # of a node

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Topology:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    device: Literal["cpu", "cuda"]
    threads: int  # of the intra-op pool
    cores: tuple[int, ...]  # this rank is pinned to these; empty: not pinned

    @property
    def is_first(self) -> bool:
        """Rank 0: the one that talks and writes what exists once."""
        return self.rank == 0


def place(
    launch: LaunchSection,
    environ: Mapping[str, str],
    cpu: CpuFacts,
    device: Literal["cpu", "cuda"],
    bound: bool = False,
) -> tuple[Topology, str]:
    """The topology of this process, and one line that says what was chosen for all ranks of this machine.

    `cpu` must be read before any pinning of ours; `bound`: its cores are this rank's alone. Without RANK in `environ`
    the process is alone: rank 0 of 1.
    """
    # WORLD_SIZE without RANK is what a person exports for torchrun: it says how many ranks to start (launcher.py).
    alone = "RANK" not in environ
    rank, world_size = number(environ, "RANK", 0), 1 if alone else number(environ, "WORLD_SIZE", 1)
    local_rank = 0 if alone else number(environ, "LOCAL_RANK", 0)
    local_ranks = 1 if alone else number(environ, "LOCAL_WORLD_SIZE", world_size)
    if rank >= world_size or local_rank >= local_ranks:
        raise LaunchError(
            f"the environment says rank {rank} of {world_size}, local rank {local_rank} of {local_ranks}: not possible"
        )
    sharing = 1 if bound else local_ranks  # the cores that this process may use
    threads, reason = threads_per_rank(launch, environ, cpu, sharing)
    cores = [first_cpus(cpu, threads)] if bound else core_sets(cpu, local_ranks, threads)
    topology = Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_ranks,
        node_rank=number(environ, "GROUP_RANK", rank // local_ranks),
        nodes=number(environ, "GROUP_WORLD_SIZE", world_size // local_ranks),
        device=device,
        threads=threads,
        cores=cores[0 if bound else local_rank],
    )
    where = f", cores {' | '.join(format_cpu_list(own) for own in cores)}" if cores[0] else ", not pinned"
    machines = f" on each of {topology.nodes} nodes" if topology.nodes > 1 else ""
    return topology, f"{_count(local_ranks, 'rank')} x {_count(threads, 'thread')}{machines}{where}, from {reason}"


def threads_per_rank(
    launch: LaunchSection, environ: Mapping[str, str], cpu: CpuFacts, local_ranks: int
) -> tuple[int, str]:
    """Intra-op threads of each local rank, and where the number comes from."""
    if launch.threads_per_rank is not None:
        return _at_most_cpus(cpu, launch.threads_per_rank, "launch.threads_per_rank")
    # The same order as OpenMP and MKL have among themselves: MKL looks at OMP_NUM_THREADS where it has none of its own.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if name not in environ or (name == "OMP_NUM_THREADS" and _set_by_torchrun(environ, local_ranks)):
            continue
        # OpenMP allows a list, one number a nesting level: the first is ours.
        text = environ[name].split(",")[0].strip()
        if not text.isdecimal() or int(text) == 0:
            raise LaunchError(f"the environment variable {name} is {text!r}, a positive number is needed")
        return _at_most_cpus(cpu, int(text), name)
    if len(cpu.cores) < local_ranks:
        return 1, f"{_CORES} / ranks"
    threads = min(map(len, divided_cores(cpu, local_ranks)))  # on the smallest NUMA node, to which its ranks are kept
    if cpu.is_throttled and cpu.usable_cores // local_ranks < threads:
        return max(1, cpu.usable_cores // local_ranks), "cgroup CPU quota / ranks"
    return threads, f"{_CORES} / ranks"


def _at_most_cpus(cpu: CpuFacts, threads: int, name: str) -> tuple[int, str]:
    """More threads than CPUs only wait for each other, and the kernel refuses to make very many."""
    cpus = sum(map(len, cpu.cores))
    return (threads, name) if threads <= cpus else (cpus, f"{name} ({threads}, more than the CPUs here)")


def _set_by_torchrun(environ: Mapping[str, str], local_ranks: int) -> bool:
    """Torchrun sets OMP_NUM_THREADS=1 for several ranks, which looks the same as a user's 1. Our launcher does not."""
    return (
        local_ranks > 1
        and "TORCHELASTIC_RUN_ID" in environ
        and LOG_DIRECTORY not in environ
        and environ["OMP_NUM_THREADS"] == "1"
    )


def number(environ: Mapping[str, str], name: str, default: int) -> int:
    """That of an environment variable. Raises UserError for anything else."""
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise LaunchError(f"the environment variable {name} is {text!r}, a number is needed")
    return int(text)


def check_port(name: str, port: int) -> None:
    """Of an environment variable. Raises UserError for what no port is called."""
    if not 0 < port <= _LARGEST_PORT:
        raise LaunchError(f"the environment variable {name} is {port}: ports are 1 to {_LARGEST_PORT}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The device of `launch.device`; auto takes a GPU where torch sees one. Raises UserError for a GPU that is not."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise DeviceError("launch.device is cuda, but torch sees no GPU here: set launch.device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return "cuda"


def check_gpus(local_ranks: int) -> None:
    """Raises UserError where several ranks would have to share a GPU, which nccl refuses."""
    import torch

    gpus = torch.cuda.device_count()
    if local_ranks > gpus:
        raise LaunchError(
            f"{local_ranks} ranks on this machine, which has {gpus} GPU{'' if gpus == 1 else 's'}: each needs its own;"
            f" set launch.ranks={gpus}, or launch.device=cpu"
        )
