"""From the launch settings, the environment and the CPU: which rank this is, how many threads it has, which cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from aliquot.config.schema import LaunchSection
from aliquot.errors import UserError
from aliquot.machine.cpu import CpuFacts, format_cpu_list
from aliquot.machine.rank_errors import LOG_DIRECTORY
from aliquot.machine.topology import Topology


def place(
    launch: LaunchSection, environ: Mapping[str, str], cpu: CpuFacts, device: Literal["cpu", "cuda"]
) -> tuple[Topology, str]:
    """The topology of this process, and one line that says what was chosen for all ranks of this machine.

    `cpu` must be read before any pinning. Without RANK in `environ` the process is alone: rank 0 of 1.
    """
    rank, world_size = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    local_rank, local_ranks = _number(environ, "LOCAL_RANK", 0), _number(environ, "LOCAL_WORLD_SIZE", world_size)
    if rank >= world_size or local_rank >= local_ranks:
        raise UserError(
            f"the environment says rank {rank} of {world_size}, local rank {local_rank} of {local_ranks}: not possible"
        )
    threads, reason = threads_per_rank(launch, environ, cpu, local_ranks)
    cores = core_sets(cpu, local_ranks, threads)
    topology = Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_ranks,
        node_rank=_number(environ, "GROUP_RANK", rank // local_ranks),
        nodes=_number(environ, "GROUP_WORLD_SIZE", world_size // local_ranks),
        device=device,
        threads=threads,
        cores=cores[local_rank],
    )
    where = f", cores {' | '.join(format_cpu_list(own) for own in cores)}" if cores[0] else ", not pinned"
    machines = f" on each of {topology.nodes} nodes" if topology.nodes > 1 else ""
    return topology, f"{_count(local_ranks, 'rank')} x {_count(threads, 'thread')}{machines}{where}, from {reason}"


def threads_per_rank(
    launch: LaunchSection, environ: Mapping[str, str], cpu: CpuFacts, local_ranks: int
) -> tuple[int, str]:
    """Intra-op threads of each local rank, and where the number comes from."""
    if launch.threads_per_rank is not None:
        return launch.threads_per_rank, "launch.threads_per_rank"
    if "OMP_NUM_THREADS" in environ and not _set_by_torchrun(environ, local_ranks):
        # OpenMP allows a list, one number a nesting level: the first is ours.
        text = environ["OMP_NUM_THREADS"].split(",")[0].strip()
        if not text.isdecimal() or int(text) == 0:
            raise UserError(f"the environment variable OMP_NUM_THREADS is {text!r}, a positive number is needed")
        return int(text), "OMP_NUM_THREADS"
    source = "cgroup CPU quota" if cpu.throttled else "physical cores"
    return max(1, cpu.usable_cores // local_ranks), f"{source} / ranks"


def core_sets(cpu: CpuFacts, local_ranks: int, threads: int) -> list[tuple[int, ...]]:
    """Disjoint sets of logical CPUs, one a local rank and one CPU a physical core; all empty: do not pin.

    A rank alone needs no fence; more ranks or threads than cores must share them; and under a quota the cores are
    also other containers', which would all crowd onto the first ones.
    """
    count = len(cpu.cores)
    if local_ranks == 1 or count < local_ranks or threads > count // local_ranks or cpu.throttled:
        return [()] * local_ranks
    # Edges at i * count // ranks: with ranks a multiple of equal NUMA nodes no rank straddles two.
    edges = [i * count // local_ranks for i in range(local_ranks + 1)]
    return [tuple(core[0] for core in cpu.cores[edges[i] : edges[i + 1]]) for i in range(local_ranks)]


def _set_by_torchrun(environ: Mapping[str, str], local_ranks: int) -> bool:
    """Torchrun sets OMP_NUM_THREADS=1 for several ranks, which looks the same as a user's 1. Our launcher does not."""
    return (
        local_ranks > 1
        and "TORCHELASTIC_RUN_ID" in environ
        and LOG_DIRECTORY not in environ
        and environ["OMP_NUM_THREADS"] == "1"
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"the environment variable {name} is {text!r}, a number is needed")
    return int(text)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
