"""aliquot evaluate: how well a model predicts a text."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from aliquot.cli.one_line_errors import one_line_errors, one_line_interrupt


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A directory: model, adapter, export, checkpoint; or a hub id.")
    ],
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="Text as data.path, or a run's YAML: what it evaluates on.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value ...]", help="How: data.document=line train.precision=fp32 ..."),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="data.sequence_length: tokens that are seen at once; default 1024, or all that the model can."
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="launch.ranks: local ranks; default auto.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, of several sets one in it for each, and nothing else.")
    ] = False,
    base: Annotated[str | None, typer.Option(help="Of an adapter: where its model lies now, if it has moved.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Loss, perplexity and bits per byte of a model on a text, by all ranks; nothing is written.

    It is launched as `aliquot train` is: local ranks that it starts itself, torchrun, or a TrainJob.
    """
    from aliquot.config.evaluation_config import read_evaluation_config
    from aliquot.distributed import launcher
    from aliquot.distributed.auto_ranks import crowding_warning, resolve_auto_ranks
    from aliquot.machine.allocator import restart_with_allocator

    with one_line_errors(debug):
        options = {"data.sequence_length": sequence_length, "launch.ranks": ranks}
        given = [f"{key}={value}" for key, value in options.items() if value is not None]
        quiet = ["observe.console=quiet"] if as_json else []
        settings = read_evaluation_config(model, data, [*(overrides or []), *given, *quiet], base)
        placed, reason = resolve_auto_ranks(launcher.apply_environment(settings.launch, os.environ), settings)
        if launcher.launch_mode(placed, os.environ) == "launcher":
            if reason is None and (warning := crowding_warning(placed, settings)) is not None:
                print(f"aliquot: {warning}", file=sys.stderr, flush=True)
            arguments, grace_s = ["-m", "aliquot", *sys.argv[1:]], settings.checkpoint.grace_s
            with tempfile.TemporaryDirectory(prefix="aliquot-evaluate-") as logs:
                code = launcher.start_ranks(placed, arguments, Path(logs), grace_s, reason is not None)
            raise typer.Exit(code)

    restart_with_allocator()
    from aliquot.distributed.rank_errors import report_error
    from aliquot.run.evaluate import evaluate_model

    with one_line_interrupt():
        try:
            found = evaluate_model(settings)
        # The boundary of a rank: whatever ended it is reported once, in the way that suits who started it.
        except Exception as error:
            raise typer.Exit(report_error(error, debug=debug)) from None
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        told = {name: _finite(asdict(each)) for name, each in found.items()}
        print(json.dumps(told[""] if set(told) == {""} else told))
        return
    for name, each in found.items():
        of = f"{name}: " if name else ""
        bits = f", {each.bits_per_byte:.4f} bits per byte" if each.bits_per_byte is not None else ""
        print(f"{of}loss {each.loss:.4f}, perplexity {each.perplexity:.3f}{bits}")
        print(f"over {each.predicted_tokens:,} tokens of {each.documents:,} documents, {each.sequence_length} at once")


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value if value is None or math.isfinite(value) else None for key, value in values.items()}
