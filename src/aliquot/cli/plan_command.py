"""aliquot plan: what a run needs, how long it takes and what it costs, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from aliquot.cli.one_line_errors import one_line_errors
from aliquot.config.key_locations import locate_errors

if TYPE_CHECKING:
    from aliquot.config.key_locations import KeyPath, Location
    from aliquot.config.schema import RunConfig

_MOST = 1e9  # GiB or Gbit/s; far above, sizes in bytes become infinite


def command(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML run configuration.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Replace single keys of it.")
    ] = None,
    instance: Annotated[str | None, typer.Option(help="An EC2 type, for example c7i.8xlarge.")] = None,
    memory: Annotated[float | None, typer.Option(min=0.1, help="GiB of a machine that is not this one.")] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Physical cores of it.")] = None,
    network: Annotated[float | None, typer.Option(min=0.001, help="Gbit/s between machines.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines; default: launch.nodes.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Default: launch.ranks.")] = None,
    document_tokens: Annotated[
        int | None, typer.Option(min=2, help="Mean length of a document. Default: as long as a sequence.")
    ] = None,
    optimize: Annotated[
        Literal["time", "cost"] | None,
        typer.Option(help="What is to be least, with --tokens. Without: time, of other settings on the same nodes."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Like 1B: which EC2 types, how many, how long, how much for so many, over the whole catalogue."
        ),
    ] = None,
    global_batch: Annotated[
        str | None, typer.Option(help="With --tokens: sequences of a step, like 64 or 32-256. Default: the config's.")
    ] = None,
    spot_price: Annotated[
        float, typer.Option(min=0.01, max=1, help="With --tokens: a spot node's price, of that on demand; assumed.")
    ] = 0.4,
    spot_losses: Annotated[
        float, typer.Option(min=0, max=1000, help="With --tokens: spot nodes lost a month, in percent; assumed.")
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Write memory over the phases as SVG; with --tokens time against money.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine thoroughly, for later plans.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete config, with where each value was written.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Say whether a run fits, where each byte goes, how long it takes and what it costs; loads no weights.

    Exit code 0: it fits; 1: it does not.
    """
    import gc
    import json
    import sys
    from dataclasses import replace

    from aliquot.planner.planned_model import collecting_no_garbage

    places: dict[KeyPath, Location] = {}
    with one_line_errors(debug), locate_errors(places), collecting_no_garbage():
        from rich.console import Console

        from aliquot.cli.plan_offers import print_offers
        from aliquot.cli.progress import progress
        from aliquot.config.read_config import dump_with_locations, read_with_locations
        from aliquot.core.errors import PlanError, UsageError, writing
        from aliquot.data.workload import Workload
        from aliquot.planner import fit, report, search
        from aliquot.planner.advice import with_advice
        from aliquot.planner.fit import full_disks
        from aliquot.planner.machine_profile import ensure_measured
        from aliquot.planner.pictures import memory_svg
        from aliquot.planner.planned_machine import limit_to_pod, machine_from_options, measure_disks
        from aliquot.planner.planned_model import PlannedModel
        from aliquot.planner.planner import Planner

        for option, value in (("--memory", memory), ("--network", network)):
            if value is not None and not value <= _MOST:  # nan is not, either
                raise UsageError(f"{option} {value:g}: give a number up to {_MOST:g}")
        if calibrate:
            from aliquot.planner.machine_profile import calibrate as measure

            with progress() as doing:
                doing("measuring this machine, half a minute")
                measured = measure()
            print(f"measured this machine: {measured}", file=sys.stderr)
            if config is None:
                raise typer.Exit(0)
        if config is None:
            raise PlanError("give a run configuration to plan, or --calibrate")
        settings, written = read_with_locations(config, overrides or [])
        places.update(written)
        if print_config:
            print(dump_with_locations(settings, places), end="")
            return
        if tokens is not None:
            if memory is not None or cores is not None or network is not None:
                raise UsageError("--tokens is about EC2 types: not with --memory, --cores or --network")
            goal = optimize or "cost"
            print_offers(
                settings, tokens, goal, document_tokens, global_batch, nodes, ranks_per_node, instance, spot_price,
                spot_losses, picture, as_json,
            )  # fmt: skip
            return
        if optimize == "cost":
            raise UsageError("--optimize cost: say for how many tokens, for example --tokens 1B")
        names = _names(settings, instance is not None, nodes, ranks_per_node)
        if instance is not None and settings.cluster is not None:
            settings = _placed(settings)
        with progress() as doing:
            doing("what this machine has")
            machine = measure_disks(
                limit_to_pod(machine_from_options(instance, memory, cores, network), settings), settings
            )
            workload = Workload.assumed(settings, document_tokens)
            layout = machine.layout(settings, nodes, ranks_per_node)
            doing("what the model needs")
            planner = Planner(PlannedModel(settings), machine)
            doing("what this machine reaches")
            ensure_measured(machine, layout)
            doing("what the run needs")
            plan = with_advice(planner.plan(settings, layout, workload), planner, settings, layout, workload, names)
            problems = fit.problems(plan, machine)
            least = planner.plan_on_fewest_nodes(settings, layout, workload) if nodes is None else None
            short = layout
            if least is not None and not problems:
                problems = [f"with launch.nodes {least.nodes} left, {each}" for each in fit.problems(least, machine)]
                short = replace(layout, nodes=least.nodes)
            doing("what else there is")
            advice = search.remedies(planner, settings, short, workload, names=names) if problems else None
            if machine.is_local:
                problems += full_disks(settings, plan)
            better = search.fastest(planner, settings, layout, workload, names=names) if optimize is not None else []
        if as_json:
            alternatives = [{"set": each.arguments, **each.plan.as_json()} for each in better]
            # The plan's own `fits` is about memory alone.
            told = {"fits": not problems, "problems": problems, "advice": advice, "alternatives": alternatives}
            print(json.dumps({**plan.as_json(), **told}, indent=1))
        else:
            console = Console(highlight=False)
            console.soft_wrap = not console.is_terminal  # where lines are read by others than people
            console.print(report.summary(plan, problems, machine.name, workload.source))
            if least is not None:
                console.print(report.Lines([report.fewest(least)]))
            if (idle := report.idle_gpus(plan, machine.gpus, names)) is not None:
                console.print(report.Lines([idle]))
            if advice is not None:
                console.print(advice, markup=False)
            if better:
                console.print(report.alternatives(better, plan))
        if picture is not None:
            with writing(picture):
                picture.write_text(memory_svg(plan))
            print(f"picture         {picture}", file=sys.stderr)
        gc.freeze()  # nothing more comes: else the first collection looks through all that was imported, 0.2 s
    raise typer.Exit(1 if problems else 0)


def _placed(config: RunConfig) -> RunConfig:
    """With the cluster's nodes and ranks, but for what the section `launch` says itself."""
    from aliquot.cluster.job import placed

    found = placed(config).launch
    update = {name: getattr(config.launch, name) for name in _said(config)}
    return config.model_copy(update={"launch": found.model_copy(update=update)})


def _said(config: RunConfig) -> set[str]:
    """Of nodes and ranks, what the section `launch` says."""
    given = {"nodes", "ranks"} & config.launch.model_fields_set
    return {name for name in given if getattr(config.launch, name) != "auto"}


def _names(config: RunConfig, of_instances: bool, nodes: int | None, ranks_per_node: int | None) -> dict[str, str]:
    """What counts in place of launch.nodes and launch.ranks: options, or what `_placed` takes from the cluster."""
    names = {}
    if of_instances and config.cluster is not None:
        of_cluster = {"nodes": "cluster.nodes", "ranks": "cluster.ranks_per_node"}
        names = {f"launch.{name}": of_cluster[name] for name in of_cluster.keys() - _said(config)}
    if nodes is not None:
        names["launch.nodes"] = "--nodes"
    if ranks_per_node is not None:
        names["launch.ranks"] = "--ranks-per-node"
    return names
