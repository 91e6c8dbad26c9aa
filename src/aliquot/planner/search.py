"""Other ways to run the same training: the nearest that fit, and the fastest.

The wanted global batch stays; what may change is the engine, the micro-batch, activation checkpointing, optimizer
states, where those of GPUs lie, ranks per node, and nodes where the run does not fit on those asked for. Every
candidate is planned as a run would be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aliquot.config.schema import LaunchSection, RunConfig
from aliquot.core.errors import UserError
from aliquot.data.batch_size import BatchSize, batch_size
from aliquot.data.workload import Workload
from aliquot.distributed.topology import RankLayout
from aliquot.planner import fit
from aliquot.planner.fit import has_room
from aliquot.planner.plan import Plan
from aliquot.planner.planner import Planner

# What says nodes and ranks in place of `launch.nodes` and `launch.ranks`: an option, or the section of the cluster.
Names = Mapping[str, str]
NO_NAMES: Names = {}

_MOST_RANKS = 16
_REMEDIES = 3
_ALIKE = 0.03  # relative difference of times that are taken for the same


@dataclass(frozen=True)
class Candidate:
    """A plan and what must be set for it: `section.key` -> value; `options` of the command for nodes and ranks."""

    plan: Plan
    changes: dict[str, object]
    layout: RankLayout
    names: Names = field(default_factory=dict)

    @property
    def lines(self) -> str:
        """To paste after the config on the command line."""
        return in_a_line(self.changes, self.names) or "(as it is)"


def in_a_line(changes: Mapping[str, object], names: Names) -> str:
    named = [(names.get(key, key), value) for key, value in changes.items()]
    return " ".join(f"{name} {value}" if name.startswith("--") else f"{name}={value}" for name, value in named)


def candidates(
    planner: Planner,
    config: RunConfig,
    layout: RankLayout,
    workload: Workload,
    counts: Sequence[int] | None = None,
    names: Names = NO_NAMES,
) -> Iterator[Candidate]:
    """All that can run, whether it fits or not, the given settings first. `counts`: of nodes; None: those near by."""
    total = batch_size(config.train, layout.world_size).total
    seen = set()
    by_batch = (
        config.launch.ranks == "auto" and layout.device == "cpu" and names.get("launch.ranks") != "--ranks-per-node"
    )
    counted: dict[tuple[object, ...], int] = {}

    def automatic(changes: Mapping[str, object], nodes: int) -> int:
        pasted = with_settings(config, {key: None if value == "null" else value for key, value in changes.items()})
        sizes = pasted.train.global_batch_size, pasted.train.per_device_train_batch_size
        key = (nodes, pasted.shard.engine, *sizes, pasted.train.gradient_accumulation_steps)
        if key not in counted:
            counted[key] = planner.machine.layout(pasted, nodes).ranks_per_node
        return counted[key]

    for nodes in counts or dict.fromkeys((layout.nodes, 2 * layout.nodes, max(1, layout.nodes // 2), 1)):
        for ranks in _ranks(planner, layout):
            threads = max(1, planner.machine.cores // ranks) if layout.device == "cpu" else layout.threads_per_rank
            if ranks == layout.ranks_per_node:
                threads = layout.threads_per_rank
            spread = replace(layout, nodes=nodes, ranks_per_node=ranks, threads_per_rank=threads)
            for changed, changes in _settings(planner, config, spread, total):
                told = changes | _told(layout, spread, config.launch, names)
                if by_batch and automatic(changes, nodes) != ranks:  # else these settings would bring other ranks
                    told["launch.ranks"] = ranks
                if (key := tuple(told.items())) not in seen:
                    seen.add(key)
                    try:
                        yield Candidate(planner.plan(changed, spread, workload, approximate=True), told, spread, names)
                    except UserError:  # settings that exclude each other
                        continue


def remedies(
    planner: Planner,
    config: RunConfig,
    layout: RankLayout,
    workload: Workload,
    done: int = 0,
    names: Names = NO_NAMES,
) -> str:
    """The nearest settings that fit, each with its price in time, in one sentence. `done`: steps behind the checkpoint
    that the run goes on from."""
    now = planner.plan(config, layout, workload)
    every = candidates(planner, config, layout, workload, None, names)
    fitting = [each for each in every if _fits(each, planner)]
    if not fitting and layout.device == "cpu" and config.shard.offload != "disk":  # else it has been tried
        fitting = [each for each in _with_a_disk(planner, config, layout, workload, names) if _fits(each, planner)]
    # Few changes first, then those that cost least time; one remedy of each kind.
    fitting.sort(key=lambda each: (_distance(each.changes), each.plan.step_s * each.plan.nodes))
    kinds: dict[tuple[str, ...], Candidate] = {}
    too_large: list[int] = []  # for the disk
    for each in fitting:
        if tuple(each.changes) in kinds:
            continue
        if planner.machine.is_local and each.plan.on_disk and not has_room(config, each.plan, done):
            too_large.append(each.plan.scratch_bytes_per_node)
        else:
            kinds[tuple(each.changes)] = each
    if kinds:
        told = [f"{each.lines} ({_price(each.plan, now)})" for each in list(kinds.values())[:_REMEDIES]]
        return "What fits: " + "; ".join(told)
    more = "more memory" if not now.fits else "a larger /dev/shm"
    if too_large:
        more += f", {min(too_large) / 1e9:,.1f} GB of a disk for shard.offload=disk (shard.offload_directory)"
    return f"Nothing that was tried fits: {more}, or a smaller model"


def fastest(
    planner: Planner,
    config: RunConfig,
    layout: RankLayout,
    workload: Workload,
    count: int = 6,
    names: Names = NO_NAMES,
) -> list[Candidate]:
    """On as many nodes: those that fit, the fastest first; of those that a plan can hardly tell apart, the one that
    changes least. Where nodes come and go they fit on the fewest, too."""
    nearest: dict[int, Candidate] = {}
    for each in candidates(planner, config, layout, workload, [layout.nodes], names):
        alike = round(math.log(each.plan.step_s) / _ALIKE)
        nearer = alike not in nearest or _distance(each.changes) < _distance(nearest[alike].changes)
        if nearer and _fits(each, planner) and _fits_on_fewest(each, planner, config, workload):
            nearest[alike] = each
    return [nearest[alike] for alike in sorted(nearest)][:count]


def _fits(candidate: Candidate, planner: Planner) -> bool:
    """Memory and /dev/shm."""
    return not fit.problems(candidate.plan, planner.machine)


def _fits_on_fewest(candidate: Candidate, planner: Planner, config: RunConfig, workload: Workload) -> bool:
    """With the same settings, on the fewest nodes that may be left."""
    own = {key: value for key, value in candidate.changes.items() if not key.startswith("launch.")}
    settings = {key: value for key, value in own.items() if value != "null"}  # the batch's two sizes fix the third
    try:
        left = planner.plan_on_fewest_nodes(with_settings(config, settings), candidate.layout, workload)
    except UserError:
        return False
    return left is None or not fit.problems(left, planner.machine)


def _with_a_disk(
    planner: Planner, config: RunConfig, layout: RankLayout, workload: Workload, names: Names
) -> Iterator[Candidate]:
    """Slower than all else, and the last resort."""
    wanted = {"shard.offload": "disk", "shard.engine": "host"}
    for each in candidates(planner, with_settings(config, wanted), layout, workload, None, names):
        if each.changes.get("shard.engine", "host") == "host":
            of_host = {} if config.shard.engine in ("auto", "host") else {"shard.engine": "host"}
            yield replace(each, changes={"shard.offload": "disk", **of_host, **each.changes})


def _settings(
    planner: Planner, config: RunConfig, layout: RankLayout, total: int
) -> Iterator[tuple[RunConfig, dict[str, object]]]:
    """Settings to plan for a global batch of `total`, and what must be set to get them out of `config`."""
    train, now = config.train, planner.engine(config, layout)
    share = -(-total // layout.world_size)
    micros = [size for size in (1, 2, 4, 8, 16, 32) if size <= share]
    given = batch_size(train, layout.world_size)
    for engine in dict.fromkeys((now, *(("fsdp",) if layout.device == "cuda" else ("host", "fsdp")))):
        for micro in dict.fromkeys((min(given.micro, share), *micros)):
            for checkpointing in dict.fromkeys((train.gradient_checkpointing, "none", "selective", "full")):
                for kept, reduced, offload in _kept(config, layout, engine):
                    wanted: dict[str, object] = {
                        "shard.engine": engine,
                        "shard.reduce_dtype": reduced,
                        "shard.offload": offload,
                        "train.gradient_checkpointing": checkpointing,
                        "train.optimizer_states": kept,
                        "train.global_batch_size": total,
                        "train.per_device_train_batch_size": micro,
                    }
                    changes = {key: value for key, value in wanted.items() if _get(config, key) != value}
                    if config.shard.engine == "auto" and engine == now:
                        del changes["shard.engine"]
                    if given == BatchSize(total, micro):
                        changes.pop("train.global_batch_size", None)
                        changes.pop("train.per_device_train_batch_size", None)
                    elif train.gradient_accumulation_steps is not None:
                        changes["train.gradient_accumulation_steps"] = "null"  # the other two fix it
                    if "train.global_batch_size" in changes and train.global_batch_tokens is not None:
                        changes["train.global_batch_tokens"] = "null"
                    yield with_settings(config, wanted), changes


def _kept(config: RunConfig, layout: RankLayout, engine: str) -> list[tuple[str, str, str]]:
    """Of optimizer states, and of gradients between hosts: what they may be kept and sent as; and whether the machine's
    memory has the states of a GPU."""
    given, reduced, offload = config.train.optimizer_states, config.shard.reduce_dtype, config.shard.offload
    if engine != "host":
        places = (offload, "none", "cpu") if layout.device == "cuda" and engine == "fsdp" else (offload,)
        return [(kept, reduced, each) for each in dict.fromkeys(places) for kept in dict.fromkeys((given, "fp32"))]
    found = [(given, reduced), ("fp32", reduced)]
    if layout.nodes > 1:
        found.append(("fp32", "bf16"))
    found = list(dict.fromkeys([*found, ("bf16", reduced), ("int8", reduced)]))
    return [(kept, sent, offload) for kept, sent in found]


def with_settings(config: RunConfig, wanted: Mapping[str, object]) -> RunConfig:
    """`section.key` -> value; the batch's two sizes fix the third."""
    sections: dict[str, dict[str, object]] = {}
    for key, value in wanted.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    if "train.global_batch_size" in wanted:
        sections["train"]["gradient_accumulation_steps"] = None
    changed = {name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    return config.model_copy(update=changed)


def _get(config: RunConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _ranks(planner: Planner, layout: RankLayout) -> list[int]:
    if layout.device == "cuda":  # fewer GPUs have less memory and less speed
        more = (count for count in (2, 4, 8, planner.machine.gpus) if layout.ranks_per_node < count)
        return [layout.ranks_per_node, *sorted({count for count in more if count <= planner.machine.gpus})]
    cores = planner.machine.cores
    powers = [count for count in (1, 2, 4, 8, 16) if count <= min(cores, _MOST_RANKS)]
    return list(dict.fromkeys((layout.ranks_per_node, *powers)))


def _told(before: RankLayout, after: RankLayout, launch: LaunchSection, names: Names) -> dict[str, object]:
    told: dict[str, object] = {}
    if before.nodes != after.nodes:
        told["launch.nodes"] = after.nodes
        may_change = launch.is_elastic and names.get("launch.nodes") != "--nodes"
        if may_change and before.nodes == launch.fewest_nodes and after.nodes < launch.most_nodes:
            told["launch.nodes"] = f"{after.nodes}:{launch.most_nodes}"  # as many as may be left are what is changed
    if before.ranks_per_node != after.ranks_per_node:
        told["launch.ranks"] = after.ranks_per_node
    return told


# How much a change alters beside speed: what says the same batch nothing, frugal states the numbers, nodes cost money.
_WEIGHTS = {
    "train.global_batch_size": 0,
    "train.global_batch_tokens": 0,
    "train.gradient_accumulation_steps": 0,
    "train.optimizer_states": 3,
    "launch.nodes": 2,
}


def _distance(changes: dict[str, object]) -> int:
    return sum(_WEIGHTS.get(key, 1) for key in changes)


def _price(plan: Plan, now: Plan) -> str:
    ratio = plan.step_s / now.step_s
    nodes = f", {plan.nodes} nodes" if plan.nodes != now.nodes else ""
    return f"{100 * (ratio - 1):+.0f} % time{nodes}"
