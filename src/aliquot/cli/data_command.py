"""aliquot data: examples and statistics of the training data."""

from __future__ import annotations

from typing import Annotated

import typer

from aliquot.cli.options import ConfigCommand, ConfigFile, Debug, Overrides
from aliquot.cli.terminal import one_line_errors
from aliquot.core.errors import printable

app = typer.Typer(help="Examples and statistics of the training data.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def data() -> None:
    """Examples and statistics of the training data."""


@app.command("show", cls=ConfigCommand)
def show(
    config: ConfigFile,
    overrides: Overrides = None,
    example: Annotated[int, typer.Option(min=1, help="Number of the first example to show, counted from 1.")] = 1,
    debug: Debug = False,
) -> None:
    """Show two examples of each source, with their learned parts marked, and statistics of all documents.

    Tokenises documents that are not in the cache yet, as `aliquot train` does; loads no weights.
    """
    with one_line_errors(debug):
        from aliquot.config.read_config import read_config
        from aliquot.data.data_order import TrainStore
        from aliquot.data.data_summary import day_line, examples, header, warnings
        from aliquot.data.vocabulary import adopt_tokenizer
        from aliquot.distributed.auto_ranks import resolve_auto_ranks
        from aliquot.models.source import DESCRIPTION_FILES, resolve
        from aliquot.observe.console import Display
        from aliquot.observe.run_directory import RunDirectory
        from aliquot.run.resolved_run import lay_out, model_source, prepare_data

        settings = read_config(config, overrides or [])
        display = Display("auto", enabled=True)
        settings = settings.with_positions(resolve(settings.model, DESCRIPTION_FILES).positions)
        source = model_source(settings, DESCRIPTION_FILES)
        prepared = prepare_data(settings, source, RunDirectory(settings.run.directory).day(), display.progress)
        display.finish()
        tokenizer = adopt_tokenizer(settings, source, prepared.load_tokenizer())
        launch, _ = resolve_auto_ranks(settings.launch, settings)
        assert launch.ranks != "auto"
        batches, held_out = lay_out(settings, source, prepared, launch.most_nodes * launch.ranks)
        steps = batches.total_steps(settings.train.max_steps)
        evaluated = [TrainStore(data.store, f"{name} (evaluation)".strip()) for name, data in held_out.items()]
        for source_tokens in [*batches.sources, *evaluated]:
            for line in examples(source_tokens, tokenizer, text=True, first=example):
                print(printable(line))
        lines = [day_line(prepared.day)] if prepared.day else []
        for line in [
            *lines,
            *header(batches, steps, held_out),
            *warnings(batches, steps, settings.train.max_steps is not None),
        ]:
            print(printable(line))
