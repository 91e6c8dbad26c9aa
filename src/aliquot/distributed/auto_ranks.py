"""`launch.ranks: auto`: how many ranks a machine gets when nobody says.

One rank a GPU. On CPU:

- Engine host, and auto, which takes it where it fits: ranks compute from one copy of the weights, so a further rank
  costs only its process and its activations, and many ranks of few threads waste less than a few of many threads:
  whatever lies between two matrix products runs on one core or waits for the slowest thread. At most: a rank a core up
  to four a NUMA node, then one for every four cores (each keeps a socket to each other, and activations of its own), as
  far as the memory limit holds their processes. Up to that, the number is taken with which a step's micro-batches
  should take the least time, the largest of equals: rounds of micro-batches x time of one, a fifth of it (an estimate)
  on one core.
- The other engines gather or hold layers in every rank: one rank a NUMA node.
- Without `train.global_batch_size` a batch is so much *a rank*, and more ranks would train something else: likewise.

No rank lies on two nodes.
"""

from __future__ import annotations

import math
from pathlib import Path

from aliquot.config.schema import LaunchSection, RunConfig
from aliquot.distributed.topology import threads_per_rank
from aliquot.machine.cpu import CpuFacts, read_cpu
from aliquot.machine.memory import memory_limit

_MOST_RANKS_OF_ONE_CORE = 4  # a NUMA node
_CORES_PER_RANK = 4
_ON_ONE_CORE = 0.2
_CROWDED = 2  # ranks a core; up to here ranks hide each other's waits
_RANK_BYTES = 2 << 30  # Python, torch and transformers, the gradients' ring, a small micro-batch


def with_automatic_ranks(launch: LaunchSection, config: RunConfig) -> tuple[LaunchSection, str | None]:
    """`launch` with a number for `ranks`, and why it is that one; None where it was a number already."""
    if launch.ranks != "auto":
        return launch, None
    if gpus := visible_gpus(launch):
        ranks, reason = gpus, "one a GPU"
    else:
        ranks, reason = cpu_ranks(config, launch.most_nodes, read_cpu(), memory_limit())
    return launch.model_copy(update={"ranks": ranks}), reason


def crowding_warning(launch: LaunchSection, config: RunConfig) -> str | None:
    """The line to print before many more local ranks start than this machine has cores; None for a usual number."""
    cpu, memory_bytes = read_cpu(), memory_limit()
    if launch.ranks == "auto" or launch.ranks <= _CROWDED * cpu.usable_cores or _has_gpus(launch):
        return None
    fitting, _ = cpu_ranks(config, launch.most_nodes, cpu, memory_bytes)
    cores = f"{cpu.usable_cores} core{'s' if cpu.usable_cores > 1 else ''}"
    return (
        f"launch.ranks is {launch.ranks}, but this machine has {cores} and {memory_bytes >> 30} GiB of memory: ranks"
        f" that share a core take turns, and so many ranks take about {launch.ranks * _RANK_BYTES >> 30} GiB."
        f" launch.ranks: auto would be {fitting} here"
    )


def _has_gpus(launch: LaunchSection) -> bool:
    return launch.device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))


def visible_gpus(launch: LaunchSection) -> int:
    """GPUs that ranks are to have. torch is slow to import: it is asked only where there is a GPU to ask about."""
    if not _has_gpus(launch):
        return 0
    import torch

    return torch.cuda.device_count()


def cpu_ranks(config: RunConfig, nodes: int, cpu: CpuFacts, limit_bytes: int) -> tuple[int, str]:
    """Local ranks of each of `nodes` machines like this one, and which rule decided."""
    train, fewest = config.train, _fewest(cpu)
    deepspeed = config.shard.engine == "auto" and config.shard.deepspeed_config is not None
    if deepspeed or config.shard.engine not in ("auto", "host"):
        return fewest, f"engine {'deepspeed' if deepspeed else config.shard.engine}: one a NUMA node"
    if train.global_batch_size is None:
        return fewest, "one a NUMA node: without train.global_batch_size more ranks would make a larger batch"
    sequences = train.global_batch_size / nodes
    least = train.gradient_accumulation_steps or train.per_device_train_batch_size  # sequences of a rank that works

    def relative_time(ranks: int) -> float:
        threads, _ = threads_per_rank(LaunchSection(), {}, cpu, ranks)
        return math.ceil(sequences / (least * ranks)) * (_ON_ONE_CORE + (1 - _ON_ONE_CORE) / threads)

    most, reason = most_cpu_ranks(cpu, limit_bytes)
    ranks = min(range(fewest, most + 1), key=lambda ranks: (round(relative_time(ranks), 9), -ranks))
    return ranks, reason if ranks == most else "micro-batches of a step / cores"


def most_cpu_ranks(cpu: CpuFacts, limit_bytes: int) -> tuple[int, str]:
    """Local ranks of engine host when there are micro-batches for all, and which rule decided."""
    sizes = [len(cores) for cores in cpu.cores_by_node]
    if cpu.is_throttled:  # the quota is for all of them together
        sizes = [max(1, size * cpu.usable_cores // len(cpu.cores)) for size in sizes]
    by_cores = sum(min(size, max(_MOST_RANKS_OF_ONE_CORE, size // _CORES_PER_RANK)) for size in sizes)
    by_cores = min(by_cores, cpu.usable_cores)  # a quota may be less than a core for each node
    by_memory = limit_bytes // _RANK_BYTES
    reason = "physical cores" if by_cores <= by_memory else f"memory, {_RANK_BYTES >> 30} GiB a rank"
    return max(_fewest(cpu), min(by_cores, by_memory)), reason


def _fewest(cpu: CpuFacts) -> int:
    """Ranks of which none lies on two NUMA nodes."""
    return min(len(cpu.cores_by_node), cpu.usable_cores)
