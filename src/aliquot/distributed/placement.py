"""From the launch settings, the environment and the CPU: which rank this is, how many threads it has, which cores.

How many ranks a machine has is decided before they start: see auto_ranks.py. Once they run, the rules are the same
alone, under our launcher, under torchrun and in a TrainJob. A rank computes on physical cores only, one thread each,
and never on two NUMA nodes where there are at least as many ranks as nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import LaunchError
from aliquot.distributed.rank_errors import LOG_DIRECTORY
from aliquot.distributed.topology import Topology
from aliquot.machine.cpu import CpuFacts, format_cpu_list

_CORES = "physical cores"
_LARGEST_PORT = 65535


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
    cores = [_first_cpus(cpu, threads)] if bound else core_sets(cpu, local_ranks, threads)
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
    threads = min(map(len, _divided(cpu, local_ranks)))  # on the smallest NUMA node, to which its ranks are kept
    if cpu.throttled and cpu.usable_cores // local_ranks < threads:
        return max(1, cpu.usable_cores // local_ranks), "cgroup CPU quota / ranks"
    return threads, f"{_CORES} / ranks"


def _at_most_cpus(cpu: CpuFacts, threads: int, name: str) -> tuple[int, str]:
    """More threads than CPUs only wait for each other, and the kernel refuses to make very many."""
    cpus = sum(map(len, cpu.cores))
    return (threads, name) if threads <= cpus else (cpus, f"{name} ({threads}, more than the CPUs here)")


def core_sets(cpu: CpuFacts, local_ranks: int, threads: int) -> list[tuple[int, ...]]:
    """Sets of logical CPUs, one a local rank, as a rule disjoint and one CPU a physical core; all empty: do not pin.

    Ranks get no cores of their own where there is only one rank, where there are more ranks or threads than cores, and
    under a quota: other containers use the same cores, and all of them would crowd onto the first ones. On several
    NUMA nodes such ranks are still kept to all CPUs of one node each.
    """
    if local_ranks == 1:
        return [()]
    shares = _ranks_of_nodes(cpu, local_ranks)
    if not cpu.throttled and len(cpu.cores) >= local_ranks:
        own = _divided(cpu, local_ranks)
        if threads <= min(map(len, own)):
            return own
    if len(shares) == 1:
        return [()] * local_ranks
    whole = [tuple(sorted(number for core in cores for number in core)) for cores in cpu.cores_by_node]
    return [cpus for cpus, share in zip(whole, shares, strict=True) for _ in range(share)]


def _first_cpus(cpu: CpuFacts, threads: int) -> tuple[int, ...]:
    """One CPU of every physical core, for a rank that has cores of its own; empty: do not pin."""
    (own,) = _divided(cpu, 1)
    return own if threads <= len(own) and not cpu.throttled else ()


def _divided(cpu: CpuFacts, local_ranks: int) -> list[tuple[int, ...]]:
    """The first CPU of every physical core, divided among at most as many ranks as there are cores."""
    shares = _ranks_of_nodes(cpu, local_ranks)
    nodes = cpu.cores_by_node if len(shares) > 1 else [list(cpu.cores)]
    sets = []
    for cores, share in zip(nodes, shares, strict=True):
        edges = [i * len(cores) // share for i in range(share + 1)]
        sets += [tuple(core[0] for core in cores[edges[i] : edges[i + 1]]) for i in range(share)]
    return sets


def _ranks_of_nodes(cpu: CpuFacts, local_ranks: int) -> list[int]:
    """How many ranks each NUMA node has, by its cores and at least one; a single number: too few ranks to divide."""
    sizes = [len(cores) for cores in cpu.cores_by_node]
    if local_ranks < len(sizes):
        return [local_ranks]
    shares = [1] * len(sizes)
    for _ in range(local_ranks - len(sizes)):  # each further one to the node with the most cores for it
        shares[max(range(len(sizes)), key=lambda node: sizes[node] / (shares[node] + 1))] += 1
    return shares


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
