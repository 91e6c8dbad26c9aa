"""Search other settings for the same training: the settings with the fewest changes that fit, and the fastest.

The global batch stays the same. A candidate may change the engine, the micro-batch, activation checkpointing, optimizer
states, offload, ranks per node, and the number of nodes if the run does not fit. Each candidate is planned like a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

from aliquot.config.schema import RunConfig
from aliquot.core.errors import UserError
from aliquot.data.workload import BatchSize, Workload, batch_size
from aliquot.distributed.topology import RankLayout
from aliquot.planner import fit_check
from aliquot.planner.automatic_settings import setting, with_settings
from aliquot.planner.fit_check import disk_suffices
from aliquot.planner.plan import Plan
from aliquot.planner.planner import Planner

# Options or keys that set nodes and ranks instead of `launch.nodes` and `launch.ranks`: `--nodes`, `cluster.nodes`.
Names = Mapping[str, str]

_MOST_RANKS = 16
_REMEDIES = 3
_SAME_TIME = 0.03  # step times within this relative difference count as equal
# The distance that a changed key adds; other keys add 1. Another notation of the same batch adds nothing. Compressed
# states add more, because they change the numerics, and nodes because they change the cost.
_CHANGE_WEIGHTS = {
    "train.global_batch_size": 0,
    "train.global_batch_tokens": 0,
    "train.gradient_accumulation_steps": 0,
    "train.optimizer_states": 3,
    "launch.nodes": 2,
}


@dataclass(frozen=True)
class Candidate:
    """A plan, and the changes that lead to it: `section.key` -> value."""

    plan: Plan
    changes: dict[str, object]
    layout: RankLayout
    names: Names = field(default_factory=dict)

    @property
    def arguments(self) -> str:
        """The changes as arguments to paste after the config on the command line."""
        return as_arguments(self.changes, self.names) or "(as it is)"

    @property
    def distance(self) -> int:
        """How far the settings are from the present settings: the sum of the weights of all changes."""
        return sum(_CHANGE_WEIGHTS.get(key, 1) for key in self.changes)


@dataclass(frozen=True)
class Search:
    """The search for other settings of one run."""

    planner: Planner
    config: RunConfig
    layout: RankLayout
    workload: Workload
    names: Names = field(default_factory=dict)

    def remedies(self, done: int = 0) -> str:
        """Return a sentence with the nearest settings that fit, and how much longer a step takes with them.

        Args:
            done: steps of the checkpoint that the run resumes from.
        """
        present = self.planner.plan(self.config, self.layout, self.workload)
        fitting = [candidate for candidate in self.candidates() if self._fits(candidate)]
        if not fitting and self.layout.device == "cpu" and self.config.shard.offload != "disk":
            fitting = [candidate for candidate in self._candidates_on_disk() if self._fits(candidate)]
        # Few changes come first, then little node time per step. Each set of keys gives one remedy.
        fitting.sort(key=lambda candidate: (candidate.distance, candidate.plan.step_s * candidate.plan.nodes))
        remedy_by_keys: dict[tuple[str, ...], Candidate] = {}
        scratch_sizes: list[int] = []  # of candidates that do not fit on the disk
        for candidate in fitting:
            keys, plan = tuple(candidate.changes), candidate.plan
            if keys in remedy_by_keys:
                continue
            if self.planner.machine.is_local and plan.on_disk and not disk_suffices(self.config, plan, done):
                scratch_sizes.append(plan.scratch_bytes_per_node)
            else:
                remedy_by_keys[keys] = candidate
        if remedy_by_keys:
            nearest = list(remedy_by_keys.values())[:_REMEDIES]
            prices = [f"{candidate.arguments} ({_price(candidate.plan, present)})" for candidate in nearest]
            return "What fits: " + "; ".join(prices)
        more = "more memory" if not present.fits else "a larger /dev/shm"
        if scratch_sizes:
            more += f", {min(scratch_sizes) / 1e9:,.1f} GB of a disk for shard.offload=disk (shard.offload_directory)"
        return f"No tried setting fits: take {more}, or a smaller model"

    def fits_with_fewer_ranks(self) -> bool:
        """Whether only `launch.ranks: auto` has chosen too many ranks for the memory of a single node."""
        return (
            self._chooses_ranks
            and self.layout.nodes == 1
            and any(
                candidate.layout.ranks_per_node < self.layout.ranks_per_node and self._fits(candidate)
                for candidate in self.candidates([1])
                if candidate.changes.keys() <= {"launch.ranks"}
            )
        )

    def fastest(self, count: int = 6) -> list[Candidate]:
        """Return the fastest candidates that fit on the present number of nodes.

        They also fit on the minimum number of nodes of an elastic run. Of candidates with about the same step time,
        only the candidate with the fewest changes is returned.
        """
        nearest: dict[int, Candidate] = {}
        for candidate in self.candidates([self.layout.nodes]):
            time_class = round(math.log(candidate.plan.step_s) / _SAME_TIME)
            rival = nearest.get(time_class)
            is_nearer = rival is None or candidate.distance < rival.distance
            if is_nearer and self._fits(candidate) and self._fits_on_fewest_nodes(candidate):
                nearest[time_class] = candidate
        return [nearest[time_class] for time_class in sorted(nearest)][:count]

    def candidates(self, node_counts: Sequence[int] | None = None) -> Iterator[Candidate]:
        """Yield all candidates that can run, whether or not they fit, the present settings first.

        Args:
            node_counts: numbers of nodes to try; None: the present number, twice and half of it, and one.
        """
        layout, cores = self.layout, self.planner.machine.cores
        near = dict.fromkeys((layout.nodes, 2 * layout.nodes, max(1, layout.nodes // 2), 1))
        for nodes, ranks in product(node_counts or near, self._rank_counts()):
            keeps_threads = layout.device == "cuda" or ranks == layout.ranks_per_node
            threads = layout.threads_per_rank if keeps_threads else max(1, cores // ranks)
            changed_layout = replace(layout, nodes=nodes, ranks_per_node=ranks, threads_per_rank=threads)
            for changed, settings in self._settings(changed_layout):
                changes = settings | self._layout_changes(changed_layout)
                # On CPU, the ranks that `launch.ranks: auto` chooses follow the batch.
                if self._chooses_ranks and layout.device == "cpu" and self._automatic_ranks(settings, nodes) != ranks:
                    changes["launch.ranks"] = ranks
                with suppress(UserError):  # settings that exclude each other
                    plan = self.planner.plan(changed, changed_layout, self.workload, approximate=True)
                    yield Candidate(plan, changes, changed_layout, self.names)

    def _candidates_on_disk(self) -> Iterator[Candidate]:
        """Yield candidates with states on disk: the last resort, because they are slower than all others."""
        on_disk = with_settings(self.config, {"shard.offload": "disk", "shard.engine": "host"})
        engine = {} if self.config.shard.engine in ("auto", "host") else {"shard.engine": "host"}
        for candidate in replace(self, config=on_disk).candidates():
            if candidate.changes.get("shard.engine", "host") == "host":
                yield replace(candidate, changes={"shard.offload": "disk", **engine, **candidate.changes})

    def _fits(self, candidate: Candidate) -> bool:
        """Whether the candidate fits into memory and /dev/shm."""
        return not fit_check.problems(candidate.plan, self.planner.machine)

    def _fits_on_fewest_nodes(self, candidate: Candidate) -> bool:
        settings = {
            key: value
            for key, value in candidate.changes.items()
            if not key.startswith("launch.") and value != "null"  # "null" clears a size that follows from the others
        }
        try:
            changed = with_settings(self.config, settings)
            smallest = self.planner.plan_on_fewest_nodes(changed, candidate.layout, self.workload)
        except UserError:
            return False
        return smallest is None or not fit_check.problems(smallest, self.planner.machine)

    @property
    def _chooses_ranks(self) -> bool:
        return self.config.launch.ranks == "auto" and self.names.get("launch.ranks") != "--ranks-per-node"

    def _automatic_ranks(self, changes: Mapping[str, object], nodes: int) -> int:
        """Return the ranks per node that `launch.ranks: auto` chooses with these changes."""
        pasted = with_settings(self.config, {key: None if value == "null" else value for key, value in changes.items()})
        return self.planner.machine.layout(pasted, nodes).ranks_per_node

    def _settings(self, layout: RankLayout) -> Iterator[tuple[RunConfig, dict[str, object]]]:
        """Yield configs with the present global batch on `layout`, and the changes that lead to each."""
        config, train = self.config, self.config.train
        total = batch_size(train, self.layout.world_size).total
        present_engine = self.planner.engine(config, layout)
        share = -(-total // layout.world_size)
        micros = (batch_size(train, layout.world_size).micro, 1, 2, 4, 8, 16, 32)
        for engine, micro, checkpointing in product(
            dict.fromkeys((present_engine, "host", "fsdp")),
            dict.fromkeys((min(micros[0], share), *(size for size in micros[1:] if size <= share))),
            dict.fromkeys((train.gradient_checkpointing, "auto")),
        ):
            is_automatic = config.shard.engine == "auto" and engine == present_engine
            for states, reduce_dtype, offload in _state_settings(config, layout, engine):
                settings: dict[str, object] = {
                    "shard.engine": engine,
                    "shard.reduce_dtype": reduce_dtype,
                    "shard.offload": offload,
                    "train.gradient_checkpointing": checkpointing,
                    "train.optimizer_states": states,
                }
                changes = {key: value for key, value in settings.items() if setting(config, key) != value}
                if is_automatic:
                    changes.pop("shard.engine", None)
                batch = {"train.global_batch_size": total, "train.per_device_train_batch_size": micro}
                changes |= batch_changes(config, layout, BatchSize(total, micro))
                yield with_settings(config, settings | batch), changes

    def _rank_counts(self) -> list[int]:
        present, machine = self.layout.ranks_per_node, self.planner.machine
        if self.layout.device == "cuda":  # fewer GPUs have less memory and less speed
            return [present, *sorted({count for count in (2, 4, 8, machine.gpus) if present < count <= machine.gpus})]
        powers = (count for count in (1, 2, 4, 8, 16) if count <= min(machine.cores, _MOST_RANKS))
        return list(dict.fromkeys((present, *powers)))

    def _layout_changes(self, changed: RankLayout) -> dict[str, object]:
        present, launch = self.layout, self.config.launch
        is_elastic = launch.is_elastic and self.names.get("launch.nodes") != "--nodes"
        only_minimum = is_elastic and present.nodes == launch.fewest_nodes and changed.nodes < launch.most_nodes
        nodes = f"{changed.nodes}:{launch.most_nodes}" if only_minimum else changed.nodes
        rows = (
            ("launch.nodes", nodes, present.nodes != changed.nodes),
            ("launch.ranks", changed.ranks_per_node, present.ranks_per_node != changed.ranks_per_node),
        )
        return {key: value for key, value, is_changed in rows if is_changed}


def as_arguments(changes: Mapping[str, object], names: Names) -> str:
    """Return the changes as `section.key=value`, or as `--option value` for keys that `names` renames to options."""
    renamed = [(names.get(key, key), value) for key, value in changes.items()]
    return " ".join(f"{name} {value}" if name.startswith("--") else f"{name}={value}" for name, value in renamed)


def batch_changes(config: RunConfig, layout: RankLayout, size: BatchSize) -> dict[str, object]:
    """Return the changes of the section `train` that lead to a batch of `size`; "null" clears a key."""
    train, present = config.train, batch_size(config.train, layout.world_size)
    if present == size:
        return {}
    in_tokens = train.global_batch_tokens is not None
    is_other = train.global_batch_size != size.total and (not in_tokens or present.total != size.total)
    rows = (
        ("train.global_batch_size", size.total, is_other),
        ("train.global_batch_tokens", "null", is_other and in_tokens),
        ("train.per_device_train_batch_size", size.micro, train.per_device_train_batch_size != size.micro),
        # The other two sizes determine it.
        ("train.gradient_accumulation_steps", "null", train.gradient_accumulation_steps is not None),
    )
    return {key: value for key, value, is_changed in rows if is_changed}


def _state_settings(config: RunConfig, layout: RankLayout, engine: str) -> list[tuple[str, str, str]]:
    """Return each (optimizer states, dtype of gradients between hosts, offload) to try with an engine."""
    states, reduce_dtype, offload = config.train.optimizer_states, config.shard.reduce_dtype, config.shard.offload
    if engine != "host":
        places = (offload, "none", "cpu") if layout.device == "cuda" and engine == "fsdp" else (offload,)
        return [
            (kind, reduce_dtype, place)
            for place, kind in product(dict.fromkeys(places), dict.fromkeys((states, "fp32")))
        ]
    offload = "none" if offload == "cpu" else offload  # states are in host memory anyway
    pairs = [(states, reduce_dtype), ("fp32", reduce_dtype)]
    if layout.nodes > 1:
        pairs.append(("fp32", "bf16"))
    pairs += [("bf16", reduce_dtype), ("int8", reduce_dtype)]
    return [(kind, dtype, offload) for kind, dtype in dict.fromkeys(pairs)]


def _price(plan: Plan, present: Plan) -> str:
    ratio = plan.step_s / present.step_s
    nodes = f", {plan.nodes} nodes" if plan.nodes != present.nodes else ""
    return f"{100 * (ratio - 1):+.0f} % time{nodes}"
