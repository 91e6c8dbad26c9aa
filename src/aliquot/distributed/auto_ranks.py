"""`launch.ranks: auto`: choose the number of ranks of a machine.

On GPUs, one rank per GPU. On CPU, ranks never span NUMA nodes, and their number depends on the engine:

- Engine host (and auto, which prefers engine host if the model fits): many ranks with few threads. The ranks of a host
  share one copy of the weights, so another rank costs only a process and its activations. Few ranks with many threads
  would waste time, because the work between two matrix products runs on one core or waits for the slowest thread. The
  maximum per NUMA node is one rank per core up to four ranks, beyond that one rank per four cores. More ranks would
  need more sockets (between all pairs of ranks) and more activations. The memory limit must hold all ranks. Up to the
  maximum, the number with the shortest estimated step is chosen; among equal estimates, the largest number is chosen.
  The estimate is (micro-batches per rank) x (time of one micro-batch), of which a fifth is assumed to run on one core.
- Other engines: one rank per NUMA node, because every rank gathers or holds layers.
- Without `train.global_batch_size`: one rank per NUMA node, because the batch size is then *per rank*, and more ranks
  would enlarge the global batch.
"""

from __future__ import annotations

import math

from aliquot.config.schema import LaunchSection, RunConfig
from aliquot.core.number_format import count_of
from aliquot.distributed.topology import threads_per_rank
from aliquot.machine.cpu import CpuFacts, read_cpu
from aliquot.machine.memory import has_gpus, memory_limit

_MAX_SINGLE_CORE_RANKS = 4  # per NUMA node
_CORES_PER_RANK = 4
_SERIAL_PART = 0.2  # part of a micro-batch's time that runs on one core
_CROWDED = 2  # ranks per core; up to this number ranks hide each other's waits
_RANK_BYTES = 2 << 30  # Python, torch and transformers, the ring buffer of gradients, a small micro-batch


def resolve_auto_ranks(launch: LaunchSection, config: RunConfig) -> tuple[LaunchSection, str | None]:
    """Return `launch` with a number of ranks, and the reason for the number (None if the user has set the number)."""
    if launch.ranks != "auto":
        return launch, None
    gpus = visible_gpus(launch)
    ranks, reason = (gpus, "one a GPU") if gpus else cpu_ranks(config, launch.most_nodes, read_cpu(), memory_limit())
    return launch.model_copy(update={"ranks": ranks}), reason


def crowding_warning(launch: LaunchSection, config: RunConfig) -> str | None:
    """Return a warning if many more local ranks will start than this machine has cores, or None."""
    cpu, memory_bytes = read_cpu(), memory_limit()
    if launch.ranks == "auto" or launch.ranks <= _CROWDED * cpu.usable_cores or visible_gpus(launch):
        return None
    fitting, _ = cpu_ranks(config, launch.most_nodes, cpu, memory_bytes)
    cores = count_of(cpu.usable_cores, "core")
    return (
        f"launch.ranks is {launch.ranks}, but this machine has {cores} and {memory_bytes >> 30} GiB of memory: ranks"
        f" on one core take turns, and these ranks take about {launch.ranks * _RANK_BYTES >> 30} GiB."
        f" launch.ranks: auto would start {fitting} here"
    )


def visible_gpus(launch: LaunchSection) -> int:
    """Return the number of GPUs for ranks. Imports torch only if the machine has a GPU, because the import is slow."""
    if launch.device == "cpu" or not has_gpus():
        return 0
    import torch

    return torch.cuda.device_count()


def cpu_ranks(config: RunConfig, nodes: int, cpu: CpuFacts, limit_bytes: int) -> tuple[int, str]:
    """Return the number of ranks on each of `nodes` machines like this one, and the rule that decided."""
    train, fewest = config.train, _min_ranks(cpu)
    deepspeed = config.shard.engine == "auto" and config.shard.deepspeed_config is not None
    if deepspeed or config.shard.engine not in ("auto", "host"):
        return fewest, f"engine {'deepspeed' if deepspeed else config.shard.engine}: one a NUMA node"
    if train.global_batch_size is None:
        return fewest, "one a NUMA node: without train.global_batch_size more ranks would make a larger batch"
    sequences = train.global_batch_size / nodes
    least = train.gradient_accumulation_steps or train.micro_batch_size  # sequences per busy rank

    def relative_time(ranks: int) -> float:
        threads, _ = threads_per_rank(LaunchSection(), {}, cpu, ranks)
        return math.ceil(sequences / (least * ranks)) * (_SERIAL_PART + (1 - _SERIAL_PART) / threads)

    most, reason = max_cpu_ranks(cpu, limit_bytes)
    ranks = min(range(fewest, most + 1), key=lambda ranks: (round(relative_time(ranks), 9), -ranks))
    return ranks, reason if ranks == most else "micro-batches of a step / cores"


def max_cpu_ranks(cpu: CpuFacts, limit_bytes: int) -> tuple[int, str]:
    """Return the largest number of local ranks for engine host, and the rule that decided."""
    sizes = [len(cores) for cores in cpu.cores_by_node]
    if cpu.is_throttled:  # all nodes share one quota
        sizes = [max(1, size * cpu.usable_cores // len(cpu.cores)) for size in sizes]
    core_limit = sum(min(size, max(_MAX_SINGLE_CORE_RANKS, size // _CORES_PER_RANK)) for size in sizes)
    core_limit = min(core_limit, cpu.usable_cores)  # a quota may be less than one core per node
    memory_ranks = limit_bytes // _RANK_BYTES
    reason = "physical cores" if core_limit <= memory_ranks else f"memory, {_RANK_BYTES >> 30} GiB a rank"
    return max(_min_ranks(cpu), min(core_limit, memory_ranks)), reason


def _min_ranks(cpu: CpuFacts) -> int:
    """Return the smallest number of ranks with which no rank spans two NUMA nodes."""
    return min(len(cpu.cores_by_node), cpu.usable_cores)
