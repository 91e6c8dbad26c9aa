"""Other settings for the same training: the nearest settings that fit, and the fastest.

The global batch stays. A candidate may change the engine, the micro-batch, activation checkpointing, optimizer states,
the place of a GPU's states, ranks per node, and the number of nodes if the run does not fit. Each candidate is planned
like a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aliquot.config.schema import LaunchSection, RunConfig
from aliquot.core.errors import UserError
from aliquot.data.workload import BatchSize, Workload, batch_size
from aliquot.distributed.topology import RankLayout
from aliquot.planner import fit
from aliquot.planner.fit import has_room
from aliquot.planner.plan import Plan
from aliquot.planner.planner import Planner

# Options or keys that set nodes and ranks instead of `launch.nodes` and `launch.ranks`: `--nodes`, `cluster.nodes`.
Names = Mapping[str, str]
NO_NAMES: Names = {}

_MOST_RANKS = 16
_REMEDIES = 3
_SAME_TIME = 0.03  # relative difference of times that a plan can hardly tell apart


@dataclass(frozen=True)
class Candidate:
    """A plan, and the changes that lead to it: `section.key` -> value."""

    plan: Plan
    changes: dict[str, object]
    layout: RankLayout
    names: Names = field(default_factory=dict)

    @property
    def arguments(self) -> str:
        """Arguments to paste after the config on the command line."""
        return as_arguments(self.changes, self.names) or "(as it is)"


def as_arguments(changes: Mapping[str, object], names: Names) -> str:
    """Return the changes as `section.key=value`, or as `--option value` for keys that `names` renames to options."""
    renamed = [(names.get(key, key), value) for key, value in changes.items()]
    return " ".join(f"{name} {value}" if name.startswith("--") else f"{name}={value}" for name, value in renamed)


def candidates(
    planner: Planner,
    config: RunConfig,
    layout: RankLayout,
    workload: Workload,
    node_counts: Sequence[int] | None = None,
    names: Names = NO_NAMES,
) -> Iterator[Candidate]:
    """Yield all candidates that can run, whether or not they fit, the present settings first.

    Args:
        node_counts: numbers of nodes to try; None: the present number, twice and half of it, and one.
    """
    total = batch_size(config.train, layout.world_size).total
    seen = set()
    ranks_follow_batch = (
        config.launch.ranks == "auto" and layout.device == "cpu" and names.get("launch.ranks") != "--ranks-per-node"
    )
    automatic_ranks: dict[tuple[object, ...], int] = {}

    def ranks_of(changes: Mapping[str, object], nodes: int) -> int:
        """Return the ranks that `launch.ranks: auto` means with these changes."""
        pasted = with_settings(config, {key: None if value == "null" else value for key, value in changes.items()})
        sizes = pasted.train.global_batch_size, pasted.train.per_device_train_batch_size
        key = (nodes, pasted.shard.engine, *sizes, pasted.train.gradient_accumulation_steps)
        if key not in automatic_ranks:
            automatic_ranks[key] = planner.machine.layout(pasted, nodes).ranks_per_node
        return automatic_ranks[key]

    near = dict.fromkeys((layout.nodes, 2 * layout.nodes, max(1, layout.nodes // 2), 1))
    for nodes in node_counts or near:
        for ranks in _rank_counts(planner, layout):
            threads = max(1, planner.machine.cores // ranks) if layout.device == "cpu" else layout.threads_per_rank
            if ranks == layout.ranks_per_node:
                threads = layout.threads_per_rank
            changed_layout = replace(layout, nodes=nodes, ranks_per_node=ranks, threads_per_rank=threads)
            for changed, settings in _settings(planner, config, changed_layout, total):
                changes = settings | _layout_changes(layout, changed_layout, config.launch, names)
                if ranks_follow_batch and ranks_of(settings, nodes) != ranks:
                    changes["launch.ranks"] = ranks
                if (key := tuple(changes.items())) not in seen:
                    seen.add(key)
                    try:
                        plan = planner.plan(changed, changed_layout, workload, approximate=True)
                    except UserError:  # settings that exclude each other
                        continue
                    yield Candidate(plan, changes, changed_layout, names)


def remedies(
    planner: Planner,
    config: RunConfig,
    layout: RankLayout,
    workload: Workload,
    done: int = 0,
    names: Names = NO_NAMES,
) -> str:
    """Return a sentence with the nearest settings that fit, each with its price in time.

    Args:
        done: steps of the checkpoint that the run resumes from.
    """
    present = planner.plan(config, layout, workload)
    all_candidates = candidates(planner, config, layout, workload, None, names)
    fitting = [candidate for candidate in all_candidates if _fits(candidate, planner)]
    if not fitting and layout.device == "cpu" and config.shard.offload != "disk":
        on_disk = _candidates_on_disk(planner, config, layout, workload, names)
        fitting = [candidate for candidate in on_disk if _fits(candidate, planner)]
    # Few changes first, then the least time. One remedy for each set of keys.
    fitting.sort(key=lambda candidate: (_distance(candidate.changes), candidate.plan.step_s * candidate.plan.nodes))
    remedy_by_keys: dict[tuple[str, ...], Candidate] = {}
    scratch_sizes: list[int] = []  # of candidates that the disk has no room for
    for candidate in fitting:
        keys = tuple(candidate.changes)
        if keys in remedy_by_keys:
            continue
        if planner.machine.is_local and candidate.plan.on_disk and not has_room(config, candidate.plan, done):
            scratch_sizes.append(candidate.plan.scratch_bytes_per_node)
        else:
            remedy_by_keys[keys] = candidate
    if remedy_by_keys:
        nearest = list(remedy_by_keys.values())[:_REMEDIES]
        prices = [f"{candidate.arguments} ({_price(candidate.plan, present)})" for candidate in nearest]
        return "What fits: " + "; ".join(prices)
    more = "more memory" if not present.fits else "a larger /dev/shm"
    if scratch_sizes:
        more += f", {min(scratch_sizes) / 1e9:,.1f} GB of a disk for shard.offload=disk (shard.offload_directory)"
    return f"Nothing that was tried fits: {more}, or a smaller model"


def fastest(
    planner: Planner,
    config: RunConfig,
    layout: RankLayout,
    workload: Workload,
    count: int = 6,
    names: Names = NO_NAMES,
) -> list[Candidate]:
    """Return the fastest candidates that fit on as many nodes, and on the fewest nodes of an elastic run.

    Of candidates with the same time, the one with the fewest changes stands for all.
    """
    nearest: dict[int, Candidate] = {}
    for candidate in candidates(planner, config, layout, workload, [layout.nodes], names):
        time_class = round(math.log(candidate.plan.step_s) / _SAME_TIME)
        rival = nearest.get(time_class)
        is_nearer = rival is None or _distance(candidate.changes) < _distance(rival.changes)
        if is_nearer and _fits(candidate, planner) and _fits_on_fewest(candidate, planner, config, workload):
            nearest[time_class] = candidate
    return [nearest[time_class] for time_class in sorted(nearest)][:count]


def with_settings(config: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """Apply `section.key` -> value. A global batch size clears the accumulation steps, which would contradict it."""
    sections: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    if "train.global_batch_size" in settings:
        sections["train"]["gradient_accumulation_steps"] = None
    changed = {name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    return config.model_copy(update=changed)


def _fits(candidate: Candidate, planner: Planner) -> bool:
    """Whether memory and /dev/shm suffice."""
    return not fit.problems(candidate.plan, planner.machine)


def _fits_on_fewest(candidate: Candidate, planner: Planner, config: RunConfig, workload: Workload) -> bool:
    settings = {
        key: value
        for key, value in candidate.changes.items()
        if not key.startswith("launch.") and value != "null"  # the two sizes of a batch fix the third
    }
    try:
        smallest = planner.plan_on_fewest_nodes(with_settings(config, settings), candidate.layout, workload)
    except UserError:
        return False
    return smallest is None or not fit.problems(smallest, planner.machine)


def _candidates_on_disk(
    planner: Planner, config: RunConfig, layout: RankLayout, workload: Workload, names: Names
) -> Iterator[Candidate]:
    """Yield candidates with states on disk: the last resort, because they are slower than all others."""
    on_disk = with_settings(config, {"shard.offload": "disk", "shard.engine": "host"})
    engine = {} if config.shard.engine in ("auto", "host") else {"shard.engine": "host"}
    for candidate in candidates(planner, on_disk, layout, workload, None, names):
        if candidate.changes.get("shard.engine", "host") == "host":
            yield replace(candidate, changes={"shard.offload": "disk", **engine, **candidate.changes})


def _settings(
    planner: Planner, config: RunConfig, layout: RankLayout, total: int
) -> Iterator[tuple[RunConfig, dict[str, object]]]:
    """Yield configs with a global batch of `total`, and the changes that lead from `config` to each."""
    train, present_engine = config.train, planner.engine(config, layout)
    share = -(-total // layout.world_size)
    present_size = batch_size(train, layout.world_size)
    micros = dict.fromkeys((min(present_size.micro, share), *(size for size in (1, 2, 4, 8, 16, 32) if size <= share)))
    engines = dict.fromkeys((present_engine, *(("fsdp",) if layout.device == "cuda" else ("host", "fsdp"))))
    checkpointings = dict.fromkeys((train.gradient_checkpointing, "none", "selective", "full"))
    for engine, micro, checkpointing in ((e, m, c) for e in engines for m in micros for c in checkpointings):
        for states, reduce_dtype, offload in _state_settings(config, layout, engine):
            settings: dict[str, object] = {
                "shard.engine": engine,
                "shard.reduce_dtype": reduce_dtype,
                "shard.offload": offload,
                "train.gradient_checkpointing": checkpointing,
                "train.optimizer_states": states,
                "train.global_batch_size": total,
                "train.per_device_train_batch_size": micro,
            }
            changes = {key: value for key, value in settings.items() if _value(config, key) != value}
            if config.shard.engine == "auto" and engine == present_engine:
                del changes["shard.engine"]
            if present_size == BatchSize(total, micro):
                changes.pop("train.global_batch_size", None)
                changes.pop("train.per_device_train_batch_size", None)
            elif train.gradient_accumulation_steps is not None:
                changes["train.gradient_accumulation_steps"] = "null"  # the other two sizes fix it
            if "train.global_batch_size" in changes and train.global_batch_tokens is not None:
                changes["train.global_batch_tokens"] = "null"
            yield with_settings(config, settings), changes


def _state_settings(config: RunConfig, layout: RankLayout, engine: str) -> list[tuple[str, str, str]]:
    """(optimizer states, dtype of gradients between hosts, offload) to try with an engine."""
    states, reduce_dtype, offload = config.train.optimizer_states, config.shard.reduce_dtype, config.shard.offload
    if engine != "host":
        places = (offload, "none", "cpu") if layout.device == "cuda" and engine == "fsdp" else (offload,)
        kinds = dict.fromkeys((states, "fp32"))
        return [(kind, reduce_dtype, place) for place in dict.fromkeys(places) for kind in kinds]
    pairs = [(states, reduce_dtype), ("fp32", reduce_dtype)]
    if layout.nodes > 1:
        pairs.append(("fp32", "bf16"))
    pairs += [("bf16", reduce_dtype), ("int8", reduce_dtype)]
    return [(kind, dtype, offload) for kind, dtype in dict.fromkeys(pairs)]


def _value(config: RunConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _rank_counts(planner: Planner, layout: RankLayout) -> list[int]:
    if layout.device == "cuda":  # fewer GPUs have less memory and less speed
        gpus = planner.machine.gpus
        more = {count for count in (2, 4, 8, gpus) if layout.ranks_per_node < count <= gpus}
        return [layout.ranks_per_node, *sorted(more)]
    cores = planner.machine.cores
    powers = [count for count in (1, 2, 4, 8, 16) if count <= min(cores, _MOST_RANKS)]
    return list(dict.fromkeys((layout.ranks_per_node, *powers)))


def _layout_changes(present: RankLayout, changed: RankLayout, launch: LaunchSection, names: Names) -> dict[str, object]:
    changes: dict[str, object] = {}
    if present.nodes != changed.nodes:
        changes["launch.nodes"] = changed.nodes
        is_elastic = launch.is_elastic and names.get("launch.nodes") != "--nodes"
        if is_elastic and present.nodes == launch.fewest_nodes and changed.nodes < launch.most_nodes:
            changes["launch.nodes"] = f"{changed.nodes}:{launch.most_nodes}"  # only the fewest nodes change
    if present.ranks_per_node != changed.ranks_per_node:
        changes["launch.ranks"] = changed.ranks_per_node
    return changes


# How much a change alters apart from speed: another notation of the same batch nothing, compressed states the numerics,
# nodes the cost.
_CHANGE_WEIGHTS = {
    "train.global_batch_size": 0,
    "train.global_batch_tokens": 0,
    "train.gradient_accumulation_steps": 0,
    "train.optimizer_states": 3,
    "launch.nodes": 2,
}


def _distance(changes: Mapping[str, object]) -> int:
    return sum(_CHANGE_WEIGHTS.get(key, 1) for key in changes)


def _price(plan: Plan, present: Plan) -> str:
    ratio = plan.step_s / present.step_s
    nodes = f", {plan.nodes} nodes" if plan.nodes != present.nodes else ""
    return f"{100 * (ratio - 1):+.0f} % time{nodes}"
