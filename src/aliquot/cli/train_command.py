"""aliquot train: train as a single process, launch local ranks, or run as one rank of a job."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from aliquot.cli.options import ConfigFile, Debug, Overrides
from aliquot.cli.terminal import one_line_errors, run_rank

if TYPE_CHECKING:
    from aliquot.config.key_locations import KeyPath, Location
    from aliquot.config.schema import LaunchSection, RunConfig


# Modules that the ranks of a node share if they are forked from a process that has imported them.
RANK_MODULES = ("aliquot.run.trainer", "aliquot.engines.fsdp.fsdp_engine", "aliquot.engines.host.host_engine")


def command(
    config: ConfigFile,
    overrides: Overrides = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only warnings and errors, like observe.console=quiet.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Start even if the run does not fit by the plan.")] = False,
    debug: Debug = False,
) -> None:
    """Train a model.

    The command trains in one process, starts N local ranks, or is a rank of torchrun or a TrainJob.
    """
    from aliquot.config.key_locations import locate_errors
    from aliquot.config.read_config import read_with_locations
    from aliquot.core.standard_streams import continue_without_console
    from aliquot.distributed import launcher
    from aliquot.distributed.auto_ranks import crowding_warning, resolve_auto_ranks
    from aliquot.machine.allocator import restart_with_allocator
    from aliquot.machine.memory import memory_limit
    from aliquot.observe.run_directory import RunDirectory
    from aliquot.planner.fit_check import check_start

    locations: dict[KeyPath, Location] = {}
    with one_line_errors(debug), locate_errors(locations):
        all_overrides = [*(overrides or []), *(["observe.console=quiet"] if quiet else [])]
        settings, written = read_with_locations(config, all_overrides)
        locations.update(written)
        directory = RunDirectory(settings.run.directory)
        continue_without_console(directory.logs / "console.log")
        placed, reason = resolve_auto_ranks(launcher.apply_environment(settings.launch, os.environ), settings)
        mode = launcher.launch_mode(placed, os.environ)
        if mode != "rank" and not force:
            check_start(settings, int(placed.ranks), memory_limit())
        if mode == "launcher":
            if not placed.is_elastic:
                directory.check(settings)  # before the launcher writes into the directory
            if reason is not None and settings.observe.console != "quiet":
                print(f"aliquot: launch.ranks: auto starts {placed.ranks} here, by {reason}", file=sys.stderr)
            elif (warning := crowding_warning(placed, settings)) is not None:
                print(f"aliquot: {warning}", file=sys.stderr, flush=True)
            arguments, automatic = ["-m", "aliquot", *sys.argv[1:]], reason is not None
            if placed.is_elastic:
                raise typer.Exit(_run_elastic(placed, settings, arguments, automatic))
            grace_s = settings.checkpoint.grace_s
            code = launcher.start_ranks(placed, arguments, directory.logs, grace_s, automatic, directory.path)
            raise typer.Exit(code)

    restart_with_allocator()
    from aliquot.run.trainer import train

    @locate_errors(locations)
    def rank() -> None:
        train(settings, force)

    run_rank(rank, debug)


def _run_elastic(launch: LaunchSection, settings: RunConfig, arguments: list[str], automatic: bool) -> int:
    """Run an elastic training, in rounds with the nodes that are present, and return the exit code."""
    import json
    from contextlib import closing, suppress

    from aliquot.checkpoint.directories import complete_directories, step_of
    from aliquot.core.errors import LaunchError, StorageError
    from aliquot.distributed.config_consistency import common_settings
    from aliquot.distributed.elastic import start_elastic_ranks
    from aliquot.distributed.launcher import prepare_log_directory
    from aliquot.distributed.leader_lease import is_finished
    from aliquot.distributed.local_group import RankProgram
    from aliquot.distributed.membership import ElasticRun
    from aliquot.observe.events import Events
    from aliquot.observe.metrics import last_point
    from aliquot.observe.run_directory import RunDirectory

    # The config schema cannot check this, because PET_NNODES may set the number of nodes.
    if settings.train.global_batch_size is None or settings.checkpoint.resume == "never":
        raise LaunchError(
            f"launch.nodes {launch.nodes}, an elastic run, needs train.global_batch_size, and checkpoint.resume: auto"
        )
    directory = RunDirectory(settings.run.directory)

    def progress() -> tuple[int, int]:
        saved = complete_directories(directory.checkpoints)
        return (step_of(saved[-1]) if saved else 0), last_point(directory.metrics, "step")[0]

    def report(text: str) -> None:
        print(f"aliquot: {text}", file=sys.stderr, flush=True)
        with suppress(StorageError):
            if (directory.path / "config.yaml").exists():  # without config.yaml, the directory is not yet a run
                with closing(Events(directory.events, True)) as events:
                    events.write("round", progress()[0], text=text)

    def is_complete() -> bool:
        return directory.export.exists() if settings.checkpoint.export else progress()[0] > 0

    run = ElasticRun(json.dumps(common_settings(settings), sort_keys=True, default=str), progress, report, is_complete)
    if not (is_complete() and is_finished(directory.path, run.finish_mark())):
        directory.check(settings)
    logs = prepare_log_directory(directory.logs)
    program = RankProgram(arguments, logs, settings.checkpoint.grace_s, RANK_MODULES)
    return start_elastic_ranks(launch, program, directory.path, automatic, run)
