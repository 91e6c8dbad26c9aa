"""aliquot instances: list EC2 types with memory, network and price, from the catalogue or from AWS."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from aliquot.cli.options import Debug
from aliquot.cli.terminal import one_line_errors, print_notes, progress, show_table
from aliquot.core.number_format import dollars, short

if TYPE_CHECKING:
    from aliquot.catalogue.instances import InstanceType
    from aliquot.config.schema import RunConfig
    from aliquot.planner.plan import Plan

_GIB = 1 << 30
_SHARING = "share their CPUs (t3, -flex), and sustain only a part of the planned speed"
# Columns that a narrow terminal omits.
_OPTIONAL_COLUMNS = ("USD/h GiB", "USD/h spot", "for a pod", "vCPU", "EFA", "AMX", "Gbit/s")


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="Like c7i.* or '*7i*'; commas separate several.")
    ] = (None),
    amx: Annotated[bool, typer.Option("--amx", help="Only types with Intel AMX.")] = False,
    efa: Annotated[bool, typer.Option("--efa", help="Only types with EFA.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Only types with GPUs.")] = False,
    arch: Annotated[Literal["amd64", "arm64"] | None, typer.Option(help="Processor architecture.")] = None,
    min_vcpus: Annotated[int, typer.Option(min=0, help="Least number of vCPUs.")] = 0,
    max_vcpus: Annotated[int | None, typer.Option(min=1, help="Largest number of vCPUs.")] = None,
    min_memory: Annotated[float, typer.Option(min=0, help="Least memory for a pod, in GiB.")] = 0.0,
    max_price: Annotated[float | None, typer.Option(min=0, help="Highest price, in USD per hour on demand.")] = None,
    sort: Annotated[
        Literal["price", "price-per-gib", "memory", "vcpus", "name"] | None,
        typer.Option(help="Default: price per hour, or with --fits the price of a token."),
    ] = None,
    fits: Annotated[
        Path | None,
        typer.Option("--fits", metavar="CONFIG", help="Only types on which the run of CONFIG fits."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="With --fits: number of nodes. Default: cluster.nodes, or else launch.nodes."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask AWS (boto3) for the types of your region.")] = False,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh",
            help="First take types, on-demand and spot prices of your AWS region (boto3) into the cache. All commands"
            " then use them in place of the shipped catalogue.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all columns as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """List EC2 types, their memory for pods and their prices.

    Other columns show vCPUs, EFA, AMX and the network.
    """
    with one_line_errors(debug):
        from aliquot.catalogue.aws_answers import live_instances
        from aliquot.catalogue.instances import catalogue, instances
        from aliquot.core.errors import InstanceError

        if refresh:
            _refresh()
        known = live_instances() if live else instances()
        types = [
            item for item in known
            if (name is None or any(fnmatchcase(item.name, pattern.strip()) for pattern in name.split(",")))
            and (item.amx or not amx)
            and (item.efa_interfaces > 0 or not efa)
            and (item.gpus > 0 or not gpu)
            and arch in (None, item.arch)
            and min_vcpus <= item.vcpus <= (max_vcpus or item.vcpus)
            and item.allocatable_memory_bytes >= min_memory * _GIB
            and (max_price is None or (item.usd_per_hour is not None and item.usd_per_hour <= max_price))
        ]  # fmt: skip
        types.sort(key=lambda item: _sort_key(item, sort or "price"))
        sharing = [item for item in types if item.shares_cpus] if fits is not None else []
        types = [item for item in types if item not in sharing]
        if sharing and not types:
            raise InstanceError(f"all matching EC2 types {_SHARING}; without --fits they are listed")
        plans = _fitting(types, fits, nodes) if fits is not None else None
        if plans is not None:
            types = [item for item in types if item.name in plans]
            if sort is None:
                types.sort(key=lambda item: _infinite_if_unknown(plans[item.name].usd_per_billion_tokens))
        if not types:
            raise InstanceError("no EC2 type matches all options")
        if as_json:
            training = ("nodes", "tokens_per_s", "usd_per_billion_tokens") if plans is not None else ()
            rows = [asdict(item) | {key: getattr((plans or {})[item.name], key) for key in training} for item in types]
            print(json.dumps(rows, indent=1))
            return
        show_table(_columns(types, plans), _OPTIONAL_COLUMNS, ("type",))
        source = "types from AWS, this region" if live else f"catalogue of {catalogue().date}"
        print(f"{len(types)} types; {source}; prices on demand, {catalogue().source}")
        if fits is not None and plans:
            print_notes(*_plan_notes(list(plans.values()), fits, len(sharing)))


def _plan_notes(plans: Sequence[Plan], fits: Path, left_out: int) -> list[tuple[object, str]]:
    """Return what the columns of plans mean, for `print_notes`. `left_out`: the number of types that share CPUs."""
    off_by, count, fees = (
        max(getattr(plan, name) for plan in plans) for name in ("off_by", "nodes", "fees_usd_per_hour")
    )
    return [
        (count > 1, f"USD/h is of one node, tokens/s and USD/1B tokens are of {count:,} nodes (--nodes)"),
        (count == 1, "USD/h, tokens/s and USD/1B tokens are of one node (--nodes)"),
        (True, f"tokens/s are estimates: a factor of {off_by:.2g} either way"),
        (fees, f"USD/1B tokens: with {fees:.2f} USD/h for the cluster and FSx"),
        (left_out, f"left out: {left_out} types, which {_SHARING}"),
        (True, f"with the settings of {fits}; with the best ones: aliquot plan {fits} --tokens 1B --optimize cost"),
    ]


def _refresh() -> None:
    from aliquot.catalogue.aws_answers import refresh
    from aliquot.catalogue.instances import refreshed_path

    with progress() as update:
        refreshed = refresh(update)
    print(
        f"stored {len(refreshed.types)} types with prices of {refreshed.source} in {refreshed_path()}; without this"
        " file, aliquot uses the shipped catalogue",
        file=sys.stderr,
    )


def _sort_key(item: InstanceType, sort: str) -> tuple[float, str]:
    price = _infinite_if_unknown(item.usd_per_hour)
    value = {
        "price": price,
        "price-per-gib": price / item.allocatable_memory_bytes,
        "memory": -item.allocatable_memory_bytes,
        "vcpus": -item.vcpus,
        "name": 0.0,
    }[sort]
    return value, item.name


def _infinite_if_unknown(price: float | None) -> float:
    return price if price is not None else float("inf")


def _fitting(types: Sequence[InstanceType], file: Path, nodes: int | None) -> dict[str, Plan]:
    """Plan the run that `file` configures on each type, and return the plans of types on which the run fits.

    Raises UserError for an invalid config, or if no type can be planned.
    """
    from aliquot.cluster.job import placed
    from aliquot.config.read_config import read_config
    from aliquot.core.errors import DeepspeedConfigError, DeviceError, EngineError, InstanceError

    config = read_config(file)
    count = nodes or (config.cluster.most_nodes if config.cluster is not None else config.launch.most_nodes)
    settings = placed(config) if config.cluster is not None else config
    # An elastic run must also fit on its minimum number of nodes.
    fewest_nodes = settings.launch.fewest_nodes if settings.launch.is_elastic and nodes is None else count
    errors, plans = [], {}
    with progress() as update:
        update("analysing the model")
        plan_on = instance_planner(settings)
        for number, item in enumerate(types, 1):
            update(f"planning on {number} of {len(types)} types")
            try:
                plan = plan_on(item.name, count)
                fewest = plan_on(item.name, fewest_nodes) if fewest_nodes < count else plan
            # Skip a type that lacks the device or the engine of the run, a type outside the catalogue (--live), or a
            # type whose number of ranks contradicts the batch of a DeepSpeed JSON.
            except (DeviceError, EngineError, InstanceError, DeepspeedConfigError) as error:
                errors.append(error)
            else:
                if plan.fits and fewest.fits:
                    plans[item.name] = plan
    if errors and len(errors) == len(types):
        raise errors[0]
    return plans


def instance_planner(config: RunConfig) -> Callable[[str, int], Plan]:
    """Return a function that plans `config` on an EC2 type, and raises UserError if `config` cannot run there.

    Raises UserError if the model does not exist.
    """
    from aliquot.data.workload import Workload
    from aliquot.planner.planned_machine import Machine, limit_to_pod
    from aliquot.planner.planned_model import PlannedModel, with_model_limits
    from aliquot.planner.planner import Planner

    config = with_model_limits(config)
    model = PlannedModel(config)  # built once for all types

    def plan_on(instance: str, nodes: int) -> Plan:
        machine = limit_to_pod(Machine.from_instance(instance), config)
        return Planner(model, machine).plan(config, machine.layout(config, nodes), Workload.assumed(config))

    return plan_on


def _columns(types: Sequence[InstanceType], plans: Mapping[str, Plan] | None) -> dict[str, list[str]]:
    def pod_gib(item: InstanceType) -> float:
        return item.allocatable_memory_bytes / _GIB

    def usd(price: float | None) -> str:
        return "?" if price is None else f"{price:,.3f}"

    cells: dict[str, Callable[[InstanceType], str]] = {
        "type": lambda item: item.name,
        "vCPU": lambda item: str(item.vcpus),
        "cores": lambda item: str(item.physical_cores),
        "GiB": lambda item: f"{item.memory_bytes / _GIB:,.0f}",
        "for a pod": lambda item: f"{pod_gib(item):,.1f}",
        "Gbit/s": lambda item: "?" if item.network_bytes_per_s is None else short(item.network_bytes_per_s * 8 / 1e9),
        "EFA": lambda item: str(item.efa_interfaces or ""),
        "AMX": lambda item: "yes" if item.amx else "",
        "GPU": lambda item: f"{item.gpus} {item.gpu_name}{' (too old)' * item.has_old_gpu}" if item.gpus else "",
        "USD/h": lambda item: usd(item.usd_per_hour),
        "USD/h GiB": lambda item: "?" if item.usd_per_hour is None else f"{item.usd_per_hour / pod_gib(item):.4f}",
    }
    if any(item.spot_usd_per_hour is not None for item in types):
        cells["USD/h spot"] = lambda item: usd(item.spot_usd_per_hour)
    columns = {heading: list(map(cell, types)) for heading, cell in cells.items()}
    if plans is not None:
        costs = [plans[item.name].usd_per_billion_tokens for item in types]
        columns["tokens/s"] = [f"{plans[item.name].tokens_per_s:,.0f}" for item in types]
        columns["USD/1B tokens"] = ["?" if cost is None else dollars(cost) for cost in costs]
    return columns
