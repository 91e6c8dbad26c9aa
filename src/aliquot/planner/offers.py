"""Offers of EC2 instances to train on a number of tokens: instance type, number of nodes, duration and price.

All offers are the same training, with the global batch of the config on its nodes. Each offer is planned like a run
with its type, nodes and ranks, and with the engine, offload, replicas, micro-batch, activation checkpointing and
checkpoint interval that are best there. Nodes are on-demand or spot. A run pays for its nodes from their start, loses
nodes, waits for new nodes and repeats steps.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from operator import ge
from pathlib import Path
from typing import Any, Literal

from aliquot.catalogue.instances import SPOT_GRACE_S, SPOT_NOTICE_S, InstanceType, catalogue, instance, instances
from aliquot.config.schema import RunConfig
from aliquot.config.section import refuse
from aliquot.core.errors import PlanError, UserError
from aliquot.data.workload import Workload, batch_size
from aliquot.distributed.topology import RankLayout
from aliquot.planner.automatic_settings import setting, with_settings
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine, limit_to_pod
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from aliquot.planner.scaling import FAILED_A_MONTH, MONTH_S, NEW_NODE_S, best_interval_s

Goal = Literal["time", "cost"]
Capacity = Literal["on-demand", "spot"]

NODES = (1, 2, 4, 8, 16)
RANKS = (1, 2, 4, 8)
_MICRO_BATCHES = (1, 4, 16, 64)
_TYPES_SEARCHED = 12  # with all settings; the others are far worse with a single setting
_GRACE_ROOM = 1.1  # the plan of the printed command may have slower steps, because offers are extrapolated
_COMPILING_S = 120.0  # of the first step with compiled layers, at most; assumed


@dataclass(frozen=True)
class Spot:
    """Facts about spot nodes that the shipped catalogue lacks; AWS' Spot Instance Advisor shows both for each type."""

    price: float | None  # fraction of the price on demand; None: the catalogue's prices
    lost_a_month: float  # fraction of the nodes that AWS interrupts per month


@dataclass(frozen=True)
class OfferRequest:
    """The training for which to find machines."""

    tokens: int  # real tokens to train on
    goal: Goal  # to minimise
    spot: Spot
    batches: Sequence[int] = ()  # global batches to try, in sequences; none: `config_batch`
    nodes: Sequence[int] = NODES
    ranks: Sequence[int] = RANKS
    instance: str | None = None  # None: all types


@dataclass(frozen=True)
class Offer:
    """A way to train on EC2: nodes and settings, with time and price."""

    plan: Plan
    capacity: Capacity
    global_batch: int
    every: int  # steps between checkpoints
    restarts: float  # expected number of restarts
    start_s: float  # seconds until all nodes train: nodes, images, weights, compilation
    total_s: float  # expected seconds of the run, with start and restarts
    usd: float
    on_cluster: bool  # the config has a section `cluster` that chooses the machines
    settings: Mapping[str, object]  # `section.key` -> value; None clears a key

    def command(self, run: Sequence[str], options: Sequence[str]) -> str:
        """Return a command to paste: for a config with a section `cluster` its manifests, otherwise the plan.

        Args:
            run: the config file and overrides.
            options: options of `aliquot plan` to repeat.
        """
        if self.on_cluster:
            return f"aliquot cluster render {shlex.join([*run, *self.arguments.split()])}"
        return f"aliquot plan {shlex.join([*run, *self.arguments.split(), *options])}"

    @property
    def bought(self) -> str:
        """Text for people: how the nodes are bought, and whether AWS rarely has any."""
        return f"{self.capacity}{', rarely free' if instance(str(self.plan.instance)).is_scarce else ''}"

    @property
    def arguments(self) -> str:
        """The offer as arguments that follow the config on the command line."""
        nodes, ranks = self.plan.nodes, self.plan.ranks_per_node
        where = (
            f"cluster.instance_types=[{self.plan.instance}] cluster.capacity=[{self.capacity}] cluster.nodes={nodes}"
            f" cluster.ranks_per_node={ranks}"
            if self.on_cluster
            else f"--instance {self.plan.instance} launch.nodes={nodes} launch.ranks={ranks}"
        )
        return " ".join([where, *(f"{k}={'null' if value is None else value}" for k, value in self.settings.items())])

    def as_json(self) -> dict[str, Any]:
        values = {key: value for key, value in asdict(self).items() if key not in ("plan", "settings")}
        values |= {"checkpointing": self.plan.gradient_checkpointing, "set": self.arguments}
        keys = (
            "instance", "nodes", "ranks_per_node", "engine", "steps", "micro_batch", "step_s", "tokens_per_s",
            "usd_per_hour",
        )  # fmt: skip
        return {key: getattr(self.plan, key) for key in keys} | values

    def goal_value(self, goal: Goal) -> float:
        return self.total_s if goal == "time" else self.usd


def offers(
    config: RunConfig,
    workload: Workload,
    request: OfferRequest,
    progress: Callable[[str], None] = lambda words: None,
    types_searched: int = _TYPES_SEARCHED,
) -> list[Offer]:
    """Return the best offer of each type, number of nodes and capacity type, the cheapest or the fastest first.

    Args:
        progress: called with a description at the beginning of each stage.
        types_searched: number of types that are planned with all settings.

    Raises:
        UserError: nothing fits, or the request contradicts the config.
    """
    goal, batches = request.goal, request.batches or [config_batch(config, request.instance)]
    request = replace(request, batches=batches)
    progress("analysing the model")
    search = _Search(config, PlannedModel(config), workload, request)
    device = config.launch.device
    types = _undominated_types(device) if request.instance is None else [_type(request.instance, device)]
    # First plan every type with one setting. A type that is far worse with this setting does not win with another.
    first = {}
    for number, ec2 in enumerate(types):
        progress(f"{ec2.name}, {number + 1} of {len(types)} types")
        first[ec2.name] = search.first_value(ec2)
    types.sort(key=lambda ec2: first[ec2.name])
    best: dict[tuple[str | None, int, str], Offer] = {}
    for ec2 in types[:types_searched]:
        progress(f"{ec2.name} with all settings")
        for offer in search.offers(ec2, request.nodes, request.ranks, batches):
            key = (offer.plan.instance, offer.plan.nodes, offer.capacity)
            if key not in best or offer.goal_value(goal) < best[key].goal_value(goal):
                best[key] = offer
    if not best:
        raise PlanError(
            f"nothing in the catalogue fits this run with {batches[-1]} sequences a step (--global-batch): try"
            " train.optimizer_states: int8, an adapter (LoRA), or shard.offload: disk"
        )
    second: Goal = "cost" if goal == "time" else "time"
    return sorted(best.values(), key=lambda offer: (offer.goal_value(goal), offer.goal_value(second)))


def config_batch(config: RunConfig, instance_name: str | None) -> int:
    """Return the sequences of an optimizer step on the nodes that the config names, or else on this machine."""
    if config.train.global_batch_size is not None:
        return config.train.global_batch_size
    cluster = config.cluster
    name = instance_name if cluster is None else cluster.instance_types[0]
    machine = Machine.local() if name is None else limit_to_pod(Machine.from_instance(name), config)
    nodes, ranks = (None, None) if cluster is None else (cluster.most_nodes, cluster.ranks_per_node)
    on_any = with_settings(config, {"launch.device": "auto"})
    layout = machine.layout(on_any, nodes, ranks if isinstance(ranks, int) else None)
    return batch_size(config.train, layout.world_size).total


def undominated(types: Sequence[InstanceType]) -> list[InstanceType]:
    """Drop each type that has no more of any resource than another type, and costs no less."""
    groups: dict[object, list[tuple[tuple[float, ...], InstanceType]]] = {}
    for ec2 in types:
        group = (Machine.from_instance(ec2.name).isa, ec2.gpu_name)
        groups.setdefault(group, []).append((_resources(ec2), ec2))

    def is_beaten(worth: tuple[float, ...], ec2: InstanceType, rivals: Sequence[tuple[Any, InstanceType]]) -> bool:
        return any(
            rival.name != ec2.name and all(map(ge, more, worth)) and (more != worth or rival.name < ec2.name)
            for more, rival in rivals
        )

    return [ec2 for alike in groups.values() for worth, ec2 in alike if not is_beaten(worth, ec2, alike)]


def _undominated_types(device: str) -> list[InstanceType]:
    kinds = {"cpu": [False], "cuda": [True], "auto": [False, True]}[device]
    priced = [ec2 for ec2 in instances() if ec2.usd_per_hour is not None and bool(ec2.gpus) in kinds]
    return undominated([ec2 for ec2 in priced if not ec2.shares_cpus and ec2.gpu_concern is None])


def _type(name: str, device: str) -> InstanceType:
    """Return the type. Raises UserError for an unknown type, without a price, or without the device."""
    ec2 = instance(name)
    refuse(
        (ec2.usd_per_hour is None, f"{name} has no price in {catalogue().source}: plan without --tokens"),
        (
            device != "auto" and bool(ec2.gpus) != (device == "cuda"),
            f"{name} has {'' if ec2.gpus else 'no '}GPUs, but launch.device is {device}",
        ),
        error=PlanError,
    )
    return ec2


def _resources(ec2: InstanceType) -> tuple[float, ...]:
    """Return the negative price and the resources of a type: numbers of which a larger one is better."""
    return (
        -(ec2.usd_per_hour or math.inf),
        ec2.physical_cores,
        ec2.clock_mhz,
        ec2.allocatable_memory_bytes,
        ec2.network_bytes_per_s or 0,
        ec2.gpus,
        ec2.gpu_memory_bytes or 0,
    )


@dataclass(frozen=True)
class _Search:
    config: RunConfig
    model: PlannedModel
    workload: Workload
    request: OfferRequest

    def first_value(self, ec2: InstanceType) -> float:
        """Estimate the time or cost of a type from few plans; inf if none fits.

        The plans use one or two ranks per node. The fewest nodes that fit give the cost, the most nodes that fit give
        the time.
        """
        goal = self.request.goal
        for count in sorted(self.request.nodes, reverse=goal == "time"):
            offers = self.offers(ec2, [count], (1, 2), self.request.batches[-1:], is_first=True)
            if values := [offer.goal_value(goal) for offer in offers]:
                return min(values)
        return math.inf

    def offers(
        self,
        ec2: InstanceType,
        nodes: Sequence[int],
        ranks: Sequence[int],
        batches: Sequence[int],
        is_first: bool = False,
    ) -> Iterator[Offer]:
        """Yield the offers that fit; with `is_first` only those with micro-batches of one sequence.

        Engine, replicas and activation checkpointing are `auto`, as in a run that does not set them.
        """
        machine = limit_to_pod(Machine.from_instance(ec2.name), self.config)
        planner, shard = Planner(self.model, machine), self.config.shard
        ranks_per_node = [machine.gpus] if machine.gpus else [count for count in ranks if count <= machine.cores]
        is_free = shard.engine != "deepspeed" and shard.offload != "disk"
        automatic: dict[str, object] = {"shard.engine": "auto", "shard.replicate": "auto"} if is_free else {}
        offloads = ("none", "cpu")[: 2 if machine.gpus else 1] if is_free else (shard.offload,)
        for count, rank_count, total, offload in product(nodes, ranks_per_node, batches, offloads):
            layout = machine.layout(self.config, count, rank_count)
            without_efa = count > 1 and machine.gpus and not ec2.efa_interfaces  # `cluster check` warns of these
            if total < layout.world_size or (without_efa and self.config.cluster is not None):
                continue
            share = 1 if is_first or planner.shape.depends_on_micro_batches else total // layout.world_size
            for micro in dict.fromkeys(min(size, share) for size in _MICRO_BATCHES):
                settings: dict[str, object] = {
                    "train.global_batch_size": total,
                    "train.per_device_train_batch_size": micro,
                    "train.gradient_checkpointing": "auto",
                    "train.max_steps": -(-self.request.tokens // round(total * self.workload.tokens)),
                    "checkpoint.every": 0,  # the best interval follows from this plan
                    "shard.offload": offload,
                }
                try:
                    config = with_settings(self.config, settings | automatic)
                    plan = planner.plan(config, layout, self.workload, approximate=True)
                except UserError:  # settings that exclude each other
                    continue
                if plan.fits:
                    for capacity in ("on-demand", "spot") if ec2.on_spot else ("on-demand",):
                        yield from self._priced_offers(planner, config, layout, plan, capacity)

    def _priced_offers(
        self, planner: Planner, config: RunConfig, layout: RankLayout, plan: Plan, capacity: Capacity
    ) -> Iterator[Offer]:
        """Yield the offer with the best checkpoint interval, unless lost nodes would stop most progress.

        Args:
            plan: of `config`, before the interval is chosen.
        """
        on_demand, spot = capacity == "on-demand", self.request.spot
        lost_a_month = FAILED_A_MONTH if on_demand else spot.lost_a_month
        losses_a_second = lost_a_month * plan.nodes / MONTH_S
        every, grace_s = _best_interval(plan, losses_a_second), config.checkpoint.grace_s
        if config.cluster is not None:  # whose nodes wait until a step is saved, if they can
            grace_s = (
                max(grace_s, math.ceil(_GRACE_ROOM * (plan.step_s + plan.save_s)))
                if on_demand
                else min(grace_s, SPOT_GRACE_S)
            )
        config = with_settings(config, {"checkpoint.every": every, "checkpoint.grace_s": grace_s})
        plan = planner.plan(config, layout, self.workload, approximate=True)
        lost_time = losses_a_second * _restart_s(config, plan, notice=not on_demand)
        if not plan.fits or lost_time >= 0.5 or plan.usd_per_hour is None:
            return
        start_s = _start_s(config, plan)
        total_s = (start_s + plan.total_s) / (1 - lost_time)
        spot_usd = instance(str(plan.instance)).spot_price(spot.price) or 0.0
        hourly = (plan.usd_per_hour if on_demand else plan.nodes * spot_usd) + plan.fees_usd_per_hour
        yield Offer(
            plan, capacity, int(config.train.global_batch_size or 0), every, losses_a_second * total_s, start_s,
            total_s, hourly * total_s / 3600, config.cluster is not None, self._changes(config, plan),
        )  # fmt: skip

    def _changes(self, config: RunConfig, plan: Plan) -> dict[str, object]:
        """Return the settings of an offer, without those that the config already has or that its `auto` chooses."""
        always = {
            "train.global_batch_size": config.train.global_batch_size,
            "train.per_device_train_batch_size": plan.micro_batch,
            "train.gradient_accumulation_steps": None,
            "train.gradient_checkpointing": plan.gradient_checkpointing,
            "train.max_steps": plan.steps,
            "checkpoint.every": config.checkpoint.every,
        }
        chosen = {
            "train.global_batch_tokens": None,  # the global batch is in sequences
            "shard.engine": plan.engine,
            "shard.offload": config.shard.offload,
            "shard.replicate": plan.replicate,
            "checkpoint.grace_s": config.checkpoint.grace_s,
        }
        changed = (key for key, value in chosen.items() if setting(self.config, key) not in ("auto", value))
        return always | {key: chosen[key] for key in changed}


def _best_interval(plan: Plan, losses_a_second: float) -> int:
    """Return the steps between checkpoints that lose the least time. A run saves at least once before its end."""
    seconds = best_interval_s(plan.save_s, losses_a_second)
    return max(1, min(round(seconds / plan.step_s), plan.steps // 2))


def _start_s(config: RunConfig, plan: Plan) -> float:
    """Return the seconds that all nodes cost before they train: start, image, weights and compilation.

    On a cluster, the weights of a model of the hub are first stored on the file system.
    """
    is_stored = config.cluster is None or Path(config.model.path or "/").is_absolute()
    reading_s = plan.disk_read_bytes / plan.storage_bytes_per_s * (1 if is_stored else 2)
    return NEW_NODE_S + reading_s + (_COMPILING_S if plan.compile == "layers" else 0.0)


def _restart_s(config: RunConfig, plan: Plan, notice: bool) -> float:
    """Return the seconds that a lost node costs: waiting for a new node, reading the checkpoint, repeating steps."""
    # A save after an interruption notice begins at the end of the current step.
    saves_in_time = notice and plan.step_s + plan.save_s <= min(SPOT_NOTICE_S, config.checkpoint.grace_s)
    lost_s = 0.0 if saves_in_time else (config.checkpoint.save_steps or plan.steps) * plan.step_s / 2
    return NEW_NODE_S + plan.checkpoint_bytes / plan.storage_bytes_per_s + lost_s
