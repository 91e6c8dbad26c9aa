"""Offers of EC2 instances to train on a number of tokens: instance type, number of nodes, duration and price.

Each offer is planned like a run with its type, nodes, ranks, global batch, micro-batch, activation checkpointing and
checkpoint interval. Nodes are on-demand or spot. A run loses nodes, waits for new nodes and repeats steps.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from operator import ge
from typing import Any, Literal

from aliquot.catalogue.instances import InstanceType, catalogue, instance, instances
from aliquot.config.schema import RunConfig
from aliquot.core.errors import PlanError, UserError
from aliquot.data.workload import Workload, batch_size
from aliquot.distributed.topology import RankLayout
from aliquot.planner.automatic_settings import with_settings
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine, limit_to_pod
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from aliquot.planner.scaling import FAILED_A_MONTH, MONTH_S, NEW_NODE_S, best_interval_s

Goal = Literal["time", "cost"]
Capacity = Literal["on-demand", "spot"]

NODES = (1, 2, 4, 8, 16)
RANKS = (1, 2, 4, 8)
_MICRO_BATCHES = (1, 4, 16)
_TYPES_SEARCHED = 12  # with all settings; the others are far worse with a single setting
_NOTICE_S = 120.0  # from the notice of a spot interruption to the end of the node


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
    batches: Sequence[int] = ()  # global batches to try, in sequences; none: the config's own
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
    total_s: float  # expected seconds of the run, with restarts
    usd: float
    on_cluster: bool  # the config has a section `cluster` that chooses the machines
    in_tokens: bool  # the config gives the global batch in tokens; offers give it in sequences

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
    def arguments(self) -> str:
        """The offer as arguments that follow the config on the command line."""
        nodes, ranks = self.plan.nodes, self.plan.ranks_per_node
        where = (
            f"cluster.instance_types=[{self.plan.instance}] cluster.capacity=[{self.capacity}] cluster.nodes={nodes}"
            f" cluster.ranks_per_node={ranks}"
            if self.on_cluster
            else f"--instance {self.plan.instance} launch.nodes={nodes} launch.ranks={ranks}"
        )
        in_sequences = " train.global_batch_tokens=null" if self.in_tokens else ""
        return (
            f"{where} train.global_batch_size={self.global_batch}{in_sequences}"
            f" train.per_device_train_batch_size={self.plan.micro_batch} train.gradient_accumulation_steps=null"
            f" train.gradient_checkpointing={self.plan.gradient_checkpointing} train.max_steps={self.plan.steps}"
            f" checkpoint.every={self.every}"
        )

    def as_json(self) -> dict[str, Any]:
        values = {key: value for key, value in asdict(self).items() if key != "plan"}
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
    goal, batches = request.goal, request.batches
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
        for offer in search.offers(ec2, request.nodes, request.ranks, batches, _MICRO_BATCHES):
            key = (offer.plan.instance, offer.plan.nodes, offer.capacity)
            if key not in best or offer.goal_value(goal) < best[key].goal_value(goal):
                best[key] = offer
    if not best:
        run = f"this run with {batches[-1]} sequences a step (--global-batch)" if batches else "this run"
        raise PlanError(
            f"nothing in the catalogue fits {run}: try train.optimizer_states: int8, an adapter (LoRA), or"
            " shard.offload: disk"
        )
    second: Goal = "cost" if goal == "time" else "time"
    return sorted(best.values(), key=lambda offer: (offer.goal_value(goal), offer.goal_value(second)))


def undominated(types: Sequence[InstanceType]) -> list[InstanceType]:
    """Drop each type that has no more of any resource than another type, and costs no less."""
    groups: dict[object, list[tuple[tuple[float, ...], InstanceType]]] = {}
    for ec2 in types:
        group = (Machine.from_instance(ec2.name).isa, ec2.gpu_name)
        groups.setdefault(group, []).append((_resources(ec2), ec2))
    remaining = []
    for alike in groups.values():
        for worth, ec2 in alike:
            is_dominated = any(
                rival.name != ec2.name and all(map(ge, more, worth)) and (more != worth or rival.name < ec2.name)
                for more, rival in alike
            )
            if not is_dominated:
                remaining.append(ec2)
    return remaining


def _undominated_types(device: str) -> list[InstanceType]:
    kinds = {"cpu": [False], "cuda": [True], "auto": [False, True]}[device]
    priced = [ec2 for ec2 in instances() if ec2.usd_per_hour is not None and bool(ec2.gpus) in kinds]
    return undominated([ec2 for ec2 in priced if not ec2.shares_cpus and not ec2.has_old_gpu])


def _type(name: str, device: str) -> InstanceType:
    """Return the type. Raises UserError for an unknown type, without a price, or without the device."""
    ec2 = instance(name)
    if ec2.usd_per_hour is None:
        raise PlanError(f"{name} has no price in {catalogue().source}: plan without --tokens")
    if device != "auto" and bool(ec2.gpus) != (device == "cuda"):
        raise PlanError(f"{name} has {'' if ec2.gpus else 'no '}GPUs, but launch.device is {device}")
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
            offers = self.offers(ec2, [count], (1, 2), self.request.batches[-1:], (1,))
            value = min((offer.goal_value(goal) for offer in offers), default=math.inf)
            if value < math.inf:
                return value
        return math.inf

    def offers(
        self,
        ec2: InstanceType,
        nodes: Sequence[int],
        ranks: Sequence[int],
        batches: Sequence[int],
        micro_batches: Sequence[int],
    ) -> Iterator[Offer]:
        """Yield the offers that fit, with the least activation checkpointing that fits."""
        machine = limit_to_pod(Machine.from_instance(ec2.name), self.config)
        planner = Planner(self.model, machine)
        ranks_per_node = [machine.gpus] if machine.gpus else [count for count in ranks if count <= machine.cores]
        for count, rank_count in product(nodes, ranks_per_node):
            layout = machine.layout(self.config, count, rank_count)
            totals = batches or [batch_size(self.config.train, layout.world_size).total]
            for total, micro in product(totals, micro_batches):
                if total < layout.world_size or micro * layout.world_size > total:
                    continue
                settings: dict[str, object] = {
                    "train.global_batch_size": total,
                    "train.per_device_train_batch_size": micro,
                    "train.gradient_checkpointing": "auto",
                    "train.max_steps": -(-self.request.tokens // round(total * self.workload.tokens)),
                    "checkpoint.every": 0,  # the best interval follows from this plan
                }
                try:
                    config = with_settings(self.config, settings)
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
        every = _best_interval(plan, losses_a_second)
        config = with_settings(config, {"checkpoint.every": every})
        plan = planner.plan(config, layout, self.workload, approximate=True)
        lost_time = losses_a_second * _restart_s(config, plan, notice=not on_demand)
        if not plan.fits or lost_time >= 0.5 or plan.usd_per_hour is None:
            return
        total_s = plan.total_s / (1 - lost_time)
        spot_usd = instance(str(plan.instance)).spot_price(spot.price) or 0.0
        hourly = (plan.usd_per_hour if on_demand else plan.nodes * spot_usd) + plan.fees_usd_per_hour
        train = config.train
        yield Offer(
            plan, capacity, int(train.global_batch_size or 0), every, losses_a_second * total_s, total_s,
            hourly * total_s / 3600, config.cluster is not None, train.global_batch_tokens is not None,
        )  # fmt: skip


def _best_interval(plan: Plan, losses_a_second: float) -> int:
    """Return the steps between checkpoints that lose the least time. A run saves at least once before its end."""
    seconds = best_interval_s(plan.save_s, losses_a_second)
    return max(1, min(round(seconds / plan.step_s), plan.steps // 2))


def _restart_s(config: RunConfig, plan: Plan, notice: bool) -> float:
    """Return the seconds that a lost node costs: waiting for a new node, reading the checkpoint, repeating steps."""
    # A save after an interruption notice begins at the end of the current step.
    saves_in_time = notice and plan.step_s + plan.save_s <= min(_NOTICE_S, config.checkpoint.grace_s)
    lost_s = 0.0 if saves_in_time else (config.checkpoint.save_steps or plan.steps) * plan.step_s / 2
    return NEW_NODE_S + plan.checkpoint_bytes / plan.storage_bytes_per_s + lost_s
