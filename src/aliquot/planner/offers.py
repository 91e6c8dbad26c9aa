"""Which machines, how many, how long, how much: a number of tokens over the whole catalogue of EC2 types.

Every offer is planned as a run would be: type, nodes, ranks, global batch, micro-batch, activation checkpointing. It
is bought on demand or as spot, where nodes are lost on the way and their successors must be waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import ge
from typing import Any, Literal

from aliquot.catalogue.instances import PRICES_DATE, PRICES_REGION, InstanceType, instance, instances
from aliquot.config.schema import RunConfig
from aliquot.core.errors import PlanError, UserError
from aliquot.data.batch_size import batch_size
from aliquot.data.workload import Workload
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine, limit_to_pod
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from aliquot.planner.search import with_settings

NODES = (1, 2, 4, 8, 16)
RANKS = (1, 2, 4, 8)
_MICROS = (1, 4, 16)
_TYPES_SEARCHED = 12  # with all settings; the others are out of reach with the given ones
_NEW_NODE_S = 300.0  # until a successor of a lost node runs pods: EC2, the image of the node, that of the pod; assumed
_NOTICE_S = 120.0  # from the notice that a spot node goes until it is gone
_MONTH_S = 30 * 86400.0


@dataclass(frozen=True)
class Spot:
    """What the catalogue does not have; AWS' Spot Instance Advisor shows both for each type."""

    price: float  # of that on demand
    lost_a_month: float  # of the nodes


@dataclass(frozen=True)
class Offer:
    plan: Plan
    capacity: Literal["on-demand", "spot"]
    global_batch: int
    micro_batch: int
    checkpointing: str
    restarts: float  # expected
    total_s: float  # restarts included
    usd: float
    on_cluster: bool  # the config has a section for it, which says where it runs
    in_tokens: bool  # and a global batch in tokens, where this has one in sequences

    @property
    def lines(self) -> str:
        """To paste after the config of `aliquot plan`."""
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
            f" train.per_device_train_batch_size={self.micro_batch} train.gradient_accumulation_steps=null"
            f" train.gradient_checkpointing={self.checkpointing} train.max_steps={self.plan.steps}"
        )

    def as_json(self) -> dict[str, Any]:
        own = {key: value for key, value in asdict(self).items() if key != "plan"}
        keys = ("instance", "nodes", "ranks_per_node", "engine", "steps", "step_s", "tokens_per_s", "usd_per_hour")
        return {**{key: getattr(self.plan, key) for key in keys}, **own, "set": self.lines}


def offers(
    config: RunConfig,
    workload: Workload,
    tokens: int,
    goal: Literal["time", "cost"],
    spot: Spot,
    batches: Sequence[int],
    nodes: Sequence[int] = NODES,
    ranks: Sequence[int] = RANKS,
    only: str | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> list[Offer]:
    """The best of each type, number of nodes and way to buy them, the cheapest or fastest first.

    `tokens`: real ones, to train on; `batches`: global batches, in sequences, none: what `config` makes of the ranks;
    `only`: one type; `tell`: is told what is being done. Raises UserError where nothing fits.
    """
    tell("what the model needs")
    model = PlannedModel(config)
    types = _all_types(config.launch.device == "cuda") if only is None else [_type_of(only, config.launch.device)]
    search = _Search(config, model, workload, tokens, spot)
    # First every type in one way: what is far behind with that wins with nothing. Few nodes are cheap, many are fast.
    first = {}
    for number, each in enumerate(types):
        tell(f"{each.name}, {number + 1} of {len(types)} types")
        first[each.name] = search.first(each, sorted(nodes, reverse=goal == "time"), batches[-1:], goal)
    types.sort(key=lambda each: first[each.name])
    best: dict[tuple[str | None, int, str], Offer] = {}
    for each in types[:_TYPES_SEARCHED]:
        tell(f"{each.name} with all settings")
        for offer in search.of(each, nodes, ranks, batches, _MICROS):
            key = (offer.plan.instance, offer.plan.nodes, offer.capacity)
            if key not in best or _measure(offer, goal) < _measure(best[key], goal):
                best[key] = offer
    if not best:
        run = f"this run with {batches[-1]} sequences a step (--global-batch)" if batches else "this run"
        raise PlanError(f"nothing in the catalogue fits {run}: frugal states, LoRA, or shard.offload: disk")
    other: Literal["time", "cost"] = "cost" if goal == "time" else "time"
    return sorted(best.values(), key=lambda offer: (_measure(offer, goal), _measure(offer, other)))


def _all_types(gpus: bool) -> list[InstanceType]:
    priced = [each for each in instances() if each.usd_per_hour is not None and bool(each.gpus) == gpus]
    return undominated([each for each in priced if not each.shares_cpus])


def _type_of(name: str, device: str) -> InstanceType:
    """Raises UserError where there is none, or none to be offered."""
    found = instance(name)
    if found.usd_per_hour is None:
        raise PlanError(f"{name} has no price in {PRICES_REGION}, {PRICES_DATE}: plan without --tokens")
    if device != "auto" and bool(found.gpus) != (device == "cuda"):
        raise PlanError(f"{name} has {'' if found.gpus else 'no '}GPUs, but launch.device is {device}")
    return found


def undominated(types: Sequence[InstanceType]) -> list[InstanceType]:
    """Without those of which another has as much of everything for no more money."""
    kinds: dict[object, list[tuple[tuple[float, ...], InstanceType]]] = {}
    for each in types:
        kind = (Machine.from_instance(each.name).isa, each.gpu_name)
        kinds.setdefault(kind, []).append((_worth(each), each))
    kept = []
    for alike in kinds.values():
        for worth, each in alike:
            better = (
                other.name != each.name and all(map(ge, more, worth)) and (more != worth or other.name < each.name)
                for more, other in alike
            )
            if not any(better):
                kept.append(each)
    return kept


def _worth(each: InstanceType) -> tuple[float, ...]:
    """More is better, of each."""
    return (
        -(each.usd_per_hour or math.inf),
        each.physical_cores,
        each.clock_mhz,
        each.allocatable_memory_bytes,
        each.network_bytes_per_s or 0,
        each.gpus,
        each.gpu_memory_bytes or 0,
    )


@dataclass(frozen=True)
class _Search:
    config: RunConfig
    model: PlannedModel
    workload: Workload
    tokens: int
    spot: Spot

    def first(
        self, type_: InstanceType, nodes: Sequence[int], batches: Sequence[int], goal: Literal["time", "cost"]
    ) -> float:
        """Of the first number of nodes on which it fits with full checkpointing, by one rank and by two."""
        for count in nodes:
            tried = self.of(type_, [count], (1, 2), batches, (1,), ("full",))
            if (least := min((_measure(offer, goal) for offer in tried), default=math.inf)) < math.inf:
                return least
        return math.inf

    def of(
        self,
        type_: InstanceType,
        nodes: Sequence[int],
        ranks: Sequence[int],
        batches: Sequence[int],
        micros: Sequence[int],
        checkpointings: Sequence[str] = ("none", "full"),
    ) -> Iterator[Offer]:
        """Those that fit."""
        machine = limit_to_pod(Machine.from_instance(type_.name), self.config)
        planner = Planner(self.model, machine)
        a_node = [each for each in ranks if each <= machine.cores] if not machine.gpus else [machine.gpus]
        for count in nodes:
            for rank in a_node:
                layout = machine.layout(self.config, count, rank)
                totals = batches or [batch_size(self.config.train, layout.world_size).total]
                for total in (each for each in totals if each >= layout.world_size):
                    for micro in (each for each in micros if each * layout.world_size <= total):
                        for checkpointing in checkpointings:
                            wanted: dict[str, object] = {
                                "train.global_batch_size": total,
                                "train.per_device_train_batch_size": micro,
                                "train.gradient_checkpointing": checkpointing,
                                "train.max_steps": -(-self.tokens // round(total * self.workload.tokens)),
                            }
                            try:
                                settings = with_settings(self.config, wanted)
                                plan = planner.plan(settings, layout, self.workload, approximate=True)
                            except UserError:  # settings that exclude each other
                                continue
                            if plan.fits:
                                yield from self._bought(settings, plan, total, micro, checkpointing)

    def _bought(self, config: RunConfig, plan: Plan, total: int, micro: int, checkpointing: str) -> Iterator[Offer]:
        usd = plan.cost_usd
        assert usd is not None  # types have prices here, and the run its steps
        offer = Offer(
            plan, "on-demand", total, micro, checkpointing, 0.0, plan.total_s, usd, config.cluster is not None,
            config.train.global_batch_tokens is not None,
        )  # fmt: skip
        yield offer
        a_restart = _restart_s(config, plan)
        if not instance(str(plan.instance)).on_spot:
            return
        a_second = self.spot.lost_a_month * plan.nodes / _MONTH_S
        if a_second * a_restart < 0.5:  # else it hardly gets on
            total_s = plan.total_s / (1 - a_second * a_restart)
            usd = plan.usd_per_hour * total_s / 3600 * self.spot.price if plan.usd_per_hour is not None else usd
            yield replace(offer, capacity="spot", restarts=a_second * total_s, total_s=total_s, usd=usd)


def _restart_s(config: RunConfig, plan: Plan) -> float:
    """What one lost node costs: waiting for the next, reading the checkpoint, and what was not saved."""
    saved = plan.step_s + plan.save_s <= min(_NOTICE_S, config.checkpoint.grace_s)  # the step is finished first
    lost = 0.0 if saved else (config.checkpoint.every or plan.steps) * plan.step_s / 2
    return _NEW_NODE_S + plan.checkpoint_bytes / plan.storage_bytes_per_s + lost


def _measure(offer: Offer, goal: Literal["time", "cost"]) -> float:
    return offer.total_s if goal == "time" else offer.usd
