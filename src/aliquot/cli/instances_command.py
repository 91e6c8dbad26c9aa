"""aliquot instances: EC2 types with what matters for training, from the shipped catalogue or from AWS."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from aliquot.catalogue.instances import dollars
from aliquot.cli.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from aliquot.catalogue.instances import InstanceType
    from aliquot.planner.plan import Plan

_GIB = 1 << 30
_SHARING = "share their CPUs (t3, -flex), and for days have a part of the planned speed alone"
_LEAST = ("USD/h GiB", "for a pod", "vCPU", "EFA", "AMX", "Gbit/s")  # to be left out on a narrow terminal


def command(
    name: Annotated[str | None, typer.Argument(metavar="[PATTERN]", help="Like c7i.* or '*7i*'; several by comma.")] = (
        None
    ),
    amx: Annotated[bool, typer.Option("--amx", help="Only with Intel AMX.")] = False,
    efa: Annotated[bool, typer.Option("--efa", help="Only with EFA.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Only with GPUs.")] = False,
    arch: Annotated[Literal["amd64", "arm64"] | None, typer.Option(help="Processor architecture.")] = None,
    min_vcpus: Annotated[int, typer.Option(min=0)] = 0,
    max_vcpus: Annotated[int | None, typer.Option(min=1)] = None,
    min_memory: Annotated[float, typer.Option(min=0, help="GiB that a pod can have.")] = 0.0,
    max_price: Annotated[float | None, typer.Option(min=0, help="USD per hour, on demand.")] = None,
    sort: Annotated[
        Literal["price", "price-per-gib", "memory", "vcpus", "name"] | None,
        typer.Option(help="Default: price, by the hour; with --fits what training costs."),
    ] = None,
    fits: Annotated[
        Path | None,
        typer.Option("--fits", metavar="CONFIG", help="Only those on which this run fits, the cheapest tokens first."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="With --fits; default: cluster.nodes.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask AWS for the types of your region (boto3).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all columns as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """List EC2 types: vCPU, the memory that a pod can really have, EFA, AMX, network, price."""
    with one_line_errors(debug):
        from aliquot.catalogue.aws_instances import live_instances
        from aliquot.catalogue.instances import PRICES_DATE, PRICES_REGION, instances
        from aliquot.core.errors import InstanceError

        types = [
            each for each in (live_instances() if live else instances())
            if _named(each, name)
            and (each.amx or not amx)
            and (each.efa_interfaces > 0 or not efa)
            and (each.gpus > 0 or not gpu)
            and arch in (None, each.arch)
            and min_vcpus <= each.vcpus <= (max_vcpus or each.vcpus)
            and each.allocatable_memory_bytes >= min_memory * _GIB
            and (max_price is None or (each.usd_per_hour is not None and each.usd_per_hour <= max_price))
        ]  # fmt: skip
        types.sort(key=lambda each: _order(each, sort or "price"))
        sharing = [each for each in types if each.shares_cpus] if fits is not None else []
        types = [each for each in types if each not in sharing]
        if sharing and not types:
            raise InstanceError(f"all EC2 types that meet the rest {_SHARING}; without --fits they are listed")
        plans = _fitting(types, fits, nodes) if fits is not None else None
        if plans is not None:
            types = [each for each in types if each.name in plans]
            if sort is None:
                types.sort(key=lambda each: _or_last(_usd_a_billion(plans[each.name])))
        if not types:
            raise InstanceError("no EC2 type meets all of this")
        if as_json:
            print(json.dumps([asdict(each) | _training(each, plans) for each in types], indent=1))
            return
        from aliquot.cli.fitting_table import show_table

        show_table(_columns(types, plans), _LEAST, ("type",))
        source = "types from AWS, this region" if live else f"catalogue of {PRICES_DATE}"
        print(f"{len(types)} types; {source}; prices on demand, {PRICES_REGION}, {PRICES_DATE}")
        if fits is not None and plans:
            off_by = max(plan.off_by for plan in plans.values())
            count = max(plan.nodes for plan in plans.values())
            hourly = (
                "USD/h is of one node, tokens/s and USD/1B tokens" if count > 1 else "USD/h, tokens/s and USD/1B tokens"
            )
            print(f"{hourly} are of {f'{count:,} nodes' if count > 1 else 'one node'} (--nodes)")
            print(f"tokens/s are estimates: a factor of {off_by:g} either way")
            if sharing:
                print(f"left out: {len(sharing)} types, which {_SHARING}")
            print(f"with the settings of {fits}; with the best ones: aliquot plan {fits} --tokens 1B --optimize cost")


def _named(each: InstanceType, patterns: str | None) -> bool:
    from fnmatch import fnmatchcase

    return patterns is None or any(fnmatchcase(each.name, one.strip()) for one in patterns.split(","))


def _order(each: InstanceType, sort: str) -> tuple[float, str]:
    price = _or_last(each.usd_per_hour)
    value = {
        "price": price,
        "price-per-gib": price / each.allocatable_memory_bytes,
        "memory": -each.allocatable_memory_bytes,
        "vcpus": -each.vcpus,
        "name": 0.0,
    }[sort]
    return value, each.name


def _or_last(price: float | None) -> float:
    return price if price is not None else float("inf")


def _usd_a_billion(plan: Plan) -> float | None:
    """To train on 1e9 tokens, all nodes together, on demand; None: no price is known."""
    return None if plan.usd_per_hour is None else plan.usd_per_hour / 3600 * 1e9 / plan.tokens_per_s


def _training(each: InstanceType, plans: Mapping[str, Plan] | None) -> dict[str, object]:
    """What --json tells beside the type itself."""
    if plans is None:
        return {}
    plan = plans[each.name]
    return {"nodes": plan.nodes, "tokens_per_s": plan.tokens_per_s, "usd_per_billion_tokens": _usd_a_billion(plan)}


def _fitting(types: Sequence[InstanceType], file: Path, nodes: int | None) -> dict[str, Plan]:
    """Those of `types` on which the run of `file` fits, and how.

    Raises UserError where no type is to blame: for what is wrong with the config, or where each of them has an error.
    """
    from aliquot.cli.plan_on_instances import planner_of
    from aliquot.cli.progress import progress
    from aliquot.cluster.job import placed
    from aliquot.config.read_config import read_config
    from aliquot.core.errors import DeepspeedConfigError, DeviceError, EngineError, InstanceError

    config = read_config(file)
    count = nodes or (config.cluster.most_nodes if config.cluster is not None else config.launch.most_nodes)
    settings = placed(config) if config.cluster is not None else config
    # Of nodes that come and go the fewest must hold the run, too.
    left = settings.launch.fewest_nodes if settings.launch.is_elastic and nodes is None else count
    refused, found = [], {}
    with progress() as doing:
        doing("what the model needs")
        plan_on = planner_of(settings)
        for number, each in enumerate(types, 1):
            doing(f"planning on {number} of {len(types)} types")
            try:
                plan = plan_on(each.name, count)
                fewest = plan_on(each.name, left) if left < count else plan
            # No GPU or only GPUs, not in the catalogue (--live), ranks that the batch of a DeepSpeed JSON is not for.
            except (DeviceError, EngineError, InstanceError, DeepspeedConfigError) as error:
                refused.append(error)
                continue
            if plan.fits and fewest.fits:
                found[each.name] = plan
    if refused and len(refused) == len(types):
        raise refused[0]
    return found


def _columns(types: Sequence[InstanceType], plans: Mapping[str, Plan] | None) -> dict[str, list[str]]:
    heads = ["type", "vCPU", "cores", "GiB", "for a pod", "Gbit/s", "EFA", "AMX", "GPU", "USD/h", "USD/h GiB"]
    heads += ["tokens/s", "USD/1B tokens"] if plans is not None else []
    rows = []
    for each in types:
        price = each.usd_per_hour
        network = each.network_bytes_per_s
        rows.append(
            [
                each.name,
                str(each.vcpus),
                str(each.physical_cores),
                f"{each.memory_bytes / _GIB:,.0f}",
                f"{each.allocatable_memory_bytes / _GIB:,.1f}",
                "?" if network is None else _gbit(network),
                str(each.efa_interfaces or ""),
                "yes" if each.amx else "",
                f"{each.gpus} {each.gpu_name}" if each.gpus else "",
                "?" if price is None else f"{price:,.3f}",
                "?" if price is None else f"{price / (each.allocatable_memory_bytes / _GIB):.4f}",
                *([] if plans is None else _of_training(plans[each.name])),
            ]
        )
    return {head: [row[at] for row in rows] for at, head in enumerate(heads)}


def _gbit(bytes_per_s: float) -> str:
    gbit = bytes_per_s * 8 / 1e9
    return f"{gbit:.3g}" if gbit < 999.5 else f"{gbit:,.0f}"


def _of_training(plan: Plan) -> list[str]:
    usd = _usd_a_billion(plan)
    return [f"{plan.tokens_per_s:,.0f}", "?" if usd is None else dollars(usd)]
