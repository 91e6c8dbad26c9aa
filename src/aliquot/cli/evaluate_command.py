"""aliquot evaluate: the loss of a model on a text."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from aliquot.cli.options import BaseModel, Debug
from aliquot.cli.terminal import one_line_errors, run_rank
from aliquot.core.number_format import count_of


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A directory: model, adapter, export, checkpoint; or a hub id.")
    ],
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="A text file like data.path, or the YAML of a run that sets evaluation data."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value ...]", help="Settings: data.document=line train.precision=fp32 ..."),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of a sequence (data.sequence_length). Default: 1024, or the model's limit if it is lower.",
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Local ranks (launch.ranks). Default: auto.")] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object; with several evaluation sets, an object for each set."),
    ] = False,
    base: BaseModel = None,
    debug: Debug = False,
) -> None:
    """Print loss, perplexity and bits per byte of a model on a text, computed by all ranks; write nothing.

    Like `aliquot train`, the command starts local ranks, or is a rank of torchrun or a TrainJob.
    """
    from aliquot.config.evaluation_config import read_evaluation_config
    from aliquot.distributed import launcher
    from aliquot.distributed.auto_ranks import crowding_warning, resolve_auto_ranks
    from aliquot.machine.allocator import restart_with_allocator

    with one_line_errors(debug):
        options = {"data.sequence_length": sequence_length, "launch.ranks": ranks}
        from_options = [f"{key}={value}" for key, value in options.items() if value is not None]
        quiet = ["observe.console=quiet"] if as_json else []
        settings = read_evaluation_config(model, data, [*(overrides or []), *from_options, *quiet], base)
        placed, reason = resolve_auto_ranks(launcher.apply_environment(settings.launch, os.environ), settings)
        if launcher.launch_mode(placed, os.environ) == "launcher":
            if reason is None and (warning := crowding_warning(placed, settings)) is not None:
                print(f"aliquot: {warning}", file=sys.stderr, flush=True)
            arguments, grace_s = ["-m", "aliquot", *sys.argv[1:]], settings.checkpoint.grace_s
            with tempfile.TemporaryDirectory(prefix="aliquot-evaluate-") as logs:
                code = launcher.start_ranks(placed, arguments, Path(logs), grace_s, reason is not None)
            raise typer.Exit(code)

    restart_with_allocator()
    from aliquot.run.evaluate import evaluate_model

    results = run_rank(lambda: evaluate_model(settings), debug)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        from aliquot.observe.metrics import finite

        values = {name: finite(vars(result)) for name, result in results.items()}
        print(json.dumps(values[""] if set(values) == {""} else values))
        return
    for name, result in results.items():
        prefix = f"{name}: " if name else ""
        bits = f", {result.bits_per_byte:.4f} bits per byte" if result.bits_per_byte is not None else ""
        print(f"{prefix}loss {result.loss:.4f}, perplexity {result.perplexity:.3f}{bits}")
        tokens, documents = count_of(result.predicted_tokens, "token"), count_of(result.documents, "document")
        print(f"over {tokens} of {documents}, {result.sequence_length} at once")
