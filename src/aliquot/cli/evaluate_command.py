"""aliquot evaluate: the loss of a model on a text, or its results in benchmarks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from aliquot.cli.options import Debug
from aliquot.cli.terminal import one_line_errors, run_rank, start_local_ranks
from aliquot.core.errors import UsageError
from aliquot.core.number_format import count_of


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A directory: model, adapter, export, checkpoint; or a hub id.")
    ],
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="[DATA]",
            help="A text file like data.path, or the YAML of a run that sets evaluation data; not with --tasks.",
        ),
    ] = None,
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
    base: Annotated[
        str | None,
        typer.Option(
            help="The base model of an adapter, if it has moved; with train.objective dpo or kto, the model before"
            " training. Default: model.path of the YAML."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASK[,TASK ...]",
            help="Run benchmarks of lm-evaluation-harness in one process, by name or pattern:"
            " pip install 'aliquot[eval]'. The following options belong to --tasks.",
        ),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="A directory with your own tasks: YAML files, and the Python code they name.")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before a question. Default: as set.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N examples of each task.")] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Sequences at once, or auto: as many as fit. Default: 1.")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask questions in the model's chat template.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Print the loss of a model on a text, or its benchmark results.

    On a text, all ranks compute loss, perplexity and bits per byte, and write nothing. Like `aliquot train`, the
    command starts local ranks, or is a rank of torchrun or a TrainJob. With --tasks, print the results of benchmarks.
    """
    with one_line_errors(debug):
        if tasks is not None:
            if data is not None or overrides or sequence_length is not None or ranks is not None:
                raise UsageError("--tasks runs benchmarks: leave out DATA, overrides, --sequence-length and --ranks")
            from aliquot.run.benchmark_tasks import evaluate_tasks, results_table

            benchmarks = evaluate_tasks(
                model, tasks.split(","), base, include_path, batch_size or "1", apply_chat_template,
                num_fewshot=num_fewshot, limit=limit,
            )  # fmt: skip
            print(json.dumps(benchmarks) if as_json else results_table(benchmarks))
            return
        if data is None:
            raise UsageError("give DATA, a text file or the YAML of a run, or benchmarks with --tasks")
        if apply_chat_template or any(value is not None for value in (include_path, num_fewshot, limit, batch_size)):
            raise UsageError("--include-path, --num-fewshot, --limit, --batch-size, --apply-chat-template need --tasks")
    from aliquot.config.evaluation_config import read_evaluation_config
    from aliquot.machine.allocator import restart_with_allocator

    with one_line_errors(debug):
        options = {"data.sequence_length": sequence_length, "launch.ranks": ranks}
        from_options = [f"{key}={value}" for key, value in options.items() if value is not None]
        quiet = ["observe.console=quiet"] if as_json else []
        settings = read_evaluation_config(model, data, [*(overrides or []), *from_options, *quiet], base)
        start_local_ranks(settings)

    restart_with_allocator()
    from aliquot.run.evaluate import evaluate_model

    results = run_rank(lambda: evaluate_model(settings), debug)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        from aliquot.observe.metrics import finite

        flat = {name: {**vars(result), **result.preferences} for name, result in results.items()}
        values = {
            name: finite({key: fields[key] for key in fields if key != "preferences"}) for name, fields in flat.items()
        }
        print(json.dumps(values[""] if set(values) == {""} else values))
        return
    for name, result in results.items():
        prefix = f"{name}: " if name else ""
        bits = f", {result.bits_per_byte:.4f} bits per byte" if result.bits_per_byte is not None else ""
        perplexity = "" if result.perplexity is None else f", perplexity {result.perplexity:.3f}"
        preferences = "".join(f", {metric} {value:.4f}" for metric, value in result.preferences.items())
        print(f"{prefix}loss {result.loss:.4f}{perplexity}{bits}{preferences}")
        answers = "answer" if result.predicted_tokens == result.documents else "pair"  # rated answers, or two a pair
        kinds = (answers, "answer") if result.preferences else ("token", "document")
        predicted, documents = map(count_of, (result.predicted_tokens, result.documents), kinds)
        print(f"over {predicted} of {documents}, with contexts of up to {result.sequence_length:,} tokens")
