"""aliquot plan: the memory, time and cost of a run, before it starts."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from aliquot.cli.options import Debug, Overrides
from aliquot.cli.terminal import one_line_errors, progress
from aliquot.config.key_locations import locate_errors

if TYPE_CHECKING:
    from aliquot.config.key_locations import KeyPath, Location
    from aliquot.config.schema import RunConfig
    from aliquot.planner.plan import Plan
    from aliquot.planner.planned_machine import Machine
    from aliquot.planner.settings_search import Candidate

_MAX_SIZE = 1e9  # GiB or Gbit/s; much larger numbers become infinite in bytes


@dataclass(frozen=True)
class _Result:
    plan: Plan
    plan_on_fewest_nodes: Plan | None  # of an elastic run
    machine: Machine
    source: str  # where the numbers about the data come from
    problems: list[str]
    advice: str | None
    alternatives: list[Candidate]

    def as_json(self) -> dict[str, Any]:
        alternatives = [{"set": candidate.arguments, **candidate.plan.as_json()} for candidate in self.alternatives]
        verdict = {"fits": not self.problems, "problems": self.problems}  # `plan.fits` is about memory alone
        return {**self.plan.as_json(), **verdict, "advice": self.advice, "alternatives": alternatives}


def command(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML run configuration.")] = None,
    overrides: Overrides = None,
    instance: Annotated[
        str | None, typer.Option(help="An EC2 type instead of this machine, for example c7i.8xlarge.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="GiB of memory of another machine; with --cores.")
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Physical cores of another machine; with --memory.")] = None,
    isa: Annotated[
        Literal["amx", "avx512_bf16", "avx512", "avx2", "sve_bf16", "neon"] | None,
        typer.Option(help="Instruction set of another machine. Default: avx512_bf16."),
    ] = None,
    network: Annotated[
        float | None, typer.Option(min=0.001, help="Gbit/s between machines. Default: the EC2 type's, or 10.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of machines. Default: launch.nodes; with --instance, cluster.nodes unless launch.nodes is"
            " set.",
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks of each machine. Default: launch.ranks; with --instance, cluster.ranks_per_node unless"
            " launch.ranks is set.",
        ),
    ] = None,
    document_tokens: Annotated[
        int | None, typer.Option(min=2, help="Mean length of a document. Default: data.sequence_length.")
    ] = None,
    optimize: Annotated[
        Literal["time", "cost"] | None,
        typer.Option(
            help="time: list faster settings on the same nodes. With --tokens on EC2 types: sort the offers by time, or"
            " by cost (default)."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Number of tokens to train on, like 1B or 20M. With --cores and --memory: how long the run takes on"
            " those machines. Otherwise: find EC2 types and numbers of nodes, with time and cost."
        ),
    ] = None,
    global_batch: Annotated[
        str | None,
        typer.Option(
            help="Sequences of a step in the offers of --tokens, like 64 or 32-256. Default: the config's, on the nodes"
            " of its section cluster or on this machine."
        ),
    ] = None,
    spot_price: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1,
            help="Price of a spot node in the offers of --tokens, as a fraction of on-demand. Default: the prices that"
            " `aliquot instances --refresh` has stored, or else 0.4, assumed.",
        ),
    ] = None,
    spot_losses: Annotated[
        float,
        typer.Option(min=0, max=1000, help="Percent of spot nodes that AWS takes back per month; assumed."),
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Write an SVG of memory by phase, or of the offers of --tokens.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine thoroughly, for later plans.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete config, with the file and line of each value.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show whether a run fits, and its memory, time and cost.

    The command loads no weights. Exit code 0: the run fits; 1: it does not.
    """
    from aliquot.planner.planned_model import collecting_no_garbage

    locations: dict[KeyPath, Location] = {}
    with one_line_errors(debug), locate_errors(locations), collecting_no_garbage():
        from aliquot.cli.plan_offers import parse_batches, parse_tokens, print_offers
        from aliquot.config.data_section import NO_TOKENIZER
        from aliquot.config.read_config import dump_with_locations, read_with_locations
        from aliquot.core.errors import PlanError, UsageError, writing

        for option, value in (("--memory", memory), ("--network", network)):
            if value is not None and not value <= _MAX_SIZE:  # NaN fails this comparison, too
                raise UsageError(f"{option} {value:g}: give a number up to {_MAX_SIZE:g}")
        if calibrate:
            _calibrate()
            if config is None:
                raise typer.Exit(0)
        if config is None:
            raise PlanError("nothing to plan: give the YAML of a run, or --calibrate")
        settings, written = read_with_locations(config, overrides or [])
        locations.update(written)
        if print_config:
            print(dump_with_locations(settings, locations), end="")
            return
        number = None if tokens is None else parse_tokens(tokens)
        if number is not None and memory is None and cores is None:
            if isa is not None or network is not None:
                raise UsageError("--tokens searches EC2 types: for other machines give --cores and --memory, too")
            from aliquot.planner.offers import NODES, RANKS, OfferRequest, Spot

            request = OfferRequest(
                number, optimize or "cost", Spot(spot_price, spot_losses / 100),
                parse_batches(global_batch) if global_batch is not None else [],
                [nodes] if nodes else NODES, [ranks_per_node] if ranks_per_node else RANKS, instance,
            )  # fmt: skip
            print_offers(settings, request, document_tokens, picture, as_json, [str(config), *(overrides or [])])
            return
        if global_batch is not None:
            raise UsageError("--global-batch is for a search of EC2 types: write train.global_batch_size=N")
        if optimize == "cost":
            raise UsageError("--optimize cost needs EC2 types and a number of tokens, for example --tokens 1B")
        if settings.model.config is not None and not (settings.data.tokenizer or settings.data.tokenizer_vocab_size):
            print(f"warning: this run needs more than its plan: {NO_TOKENIZER}", file=sys.stderr)
        from aliquot.planner.planned_machine import machine_from_options

        read_machine = partial(machine_from_options, instance, memory, cores, isa, network)
        result = _make_plan(
            settings,
            read_machine,
            nodes,
            ranks_per_node,
            document_tokens,
            number,
            finds_alternatives=optimize is not None,
        )
        if as_json:
            print(json.dumps(result.as_json(), indent=1))
        else:
            _print(result)
        if settings.cluster is not None and result.machine.is_local:
            option = f"--instance {settings.cluster.instance_types[0]}"
            print(f"note: a plan for this machine; {option} plans for the nodes of section cluster", file=sys.stderr)
        if picture is not None:
            from aliquot.planner.pictures import memory_svg

            with writing(picture):
                picture.write_text(memory_svg(result.plan))
            print(f"picture         {picture}", file=sys.stderr)
        gc.freeze()  # no garbage collection at exit, which would take 0.2 s
    raise typer.Exit(1 if result.problems else 0)


def _calibrate() -> None:
    from aliquot.planner.machine_profile import calibrate

    with progress() as update:
        update("measuring this machine, half a minute")
        summary = calibrate()
    print(f"measured this machine: {summary}", file=sys.stderr)


def _make_plan(
    config: RunConfig,
    read_machine: Callable[[], Machine],
    nodes: int | None,
    ranks_per_node: int | None,
    document_tokens: int | None,
    tokens: int | None,
    finds_alternatives: bool,
) -> _Result:
    """Plan `config`, with advice if the run does not fit.

    `nodes`, `ranks_per_node`, `document_tokens` and `tokens` (to train on) are as in the config if they are None.
    """
    from aliquot.data.workload import Workload, batch_size
    from aliquot.planner import fit_check
    from aliquot.planner.advice import with_advice
    from aliquot.planner.automatic_settings import with_fixed_choices, with_settings
    from aliquot.planner.machine_profile import ensure_measured
    from aliquot.planner.planned_machine import limit_to_pod, measure_disks
    from aliquot.planner.planned_model import PlannedModel, with_model_limits
    from aliquot.planner.planner import Planner
    from aliquot.planner.settings_search import Search

    with progress() as update:
        update("reading the machine")
        machine = read_machine()
        names = _names(config, machine, nodes, ranks_per_node)
        if machine.instance is not None and config.cluster is not None:
            config = _with_cluster_layout(config)
        machine = measure_disks(limit_to_pod(machine, config), config)
        layout = machine.layout(config, nodes, ranks_per_node)
        update("analysing the model")
        config = with_model_limits(config)
        workload = Workload.assumed(config, document_tokens)
        planner = Planner(PlannedModel(config), machine)
        update("measuring this machine")
        ensure_measured(machine, layout)
        update("planning the run")
        while True:
            requested = config
            if tokens is not None:
                sequences = batch_size(config.train, layout.world_size).total
                requested = with_settings(config, {"train.max_steps": -(-tokens // round(sequences * workload.tokens))})
            plan = planner.plan(requested, layout, workload)
            search = Search(planner, with_fixed_choices(requested, plan), layout, workload, names)
            if not (fit_check.cannot_fit(plan) and search.fits_with_fewer_ranks()):
                break
            layout = machine.layout(config, nodes, layout.ranks_per_node // 2)  # `aliquot train` does the same
        plan = with_advice(plan, search, requested)
        problems = fit_check.problems(plan, machine)
        fewest = planner.plan_on_fewest_nodes(search.config, layout, workload) if nodes is None else None
        failing = search
        if fewest is not None and not problems:
            problems = [
                f"with launch.nodes {fewest.nodes} left, {text}" for text in fit_check.problems(fewest, machine)
            ]
            failing = replace(search, layout=replace(layout, nodes=fewest.nodes))
        update("searching other settings")
        advice = failing.remedies() if problems else None
        if machine.is_local:
            problems += fit_check.full_disks(search.config, plan)
        better = search.fastest() if finds_alternatives else []
    return _Result(plan, fewest, machine, workload.source, problems, advice, better)


def _print(result: _Result) -> None:
    from rich.console import Console

    from aliquot.planner import report

    plan, machine = result.plan, result.machine
    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal  # a program that reads the output needs unwrapped lines
    console.print(report.summary(plan, result.problems, machine.name, result.source))
    if result.plan_on_fewest_nodes is not None:
        console.print(report.Lines([report.fewest(result.plan_on_fewest_nodes)]))
    if result.advice is not None:
        console.print(result.advice, markup=False)
    if result.alternatives:
        console.print(report.alternatives(result.alternatives, plan))


def _with_cluster_layout(config: RunConfig) -> RunConfig:
    """Take nodes, ranks and the model from the section `cluster` unless the section `launch` sets them."""
    from aliquot.cluster.job import placed

    moved = placed(config)
    update = {name: getattr(config.launch, name) for name in _set_in_launch(config)}
    return moved.model_copy(update={"launch": moved.launch.model_copy(update=update)})


def _set_in_launch(config: RunConfig) -> set[str]:
    """Return which of the keys `nodes` and `ranks` the section `launch` sets."""
    names = {"nodes", "ranks"} & config.launch.model_fields_set
    return {name for name in names if getattr(config.launch, name) != "auto"}


def _names(config: RunConfig, machine: Machine, nodes: int | None, ranks_per_node: int | None) -> dict[str, str]:
    """Map launch.nodes and launch.ranks to the option or cluster key that replaces them here, if any; for advice."""
    names = {}
    if machine.instance is not None and config.cluster is not None:
        cluster_keys = {"nodes": "cluster.nodes", "ranks": "cluster.ranks_per_node"}
        names = {f"launch.{name}": cluster_keys[name] for name in cluster_keys.keys() - _set_in_launch(config)}
    if nodes is not None:
        names["launch.nodes"] = "--nodes"
    if ranks_per_node is not None:
        names["launch.ranks"] = "--ranks-per-node"
    return names
