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
        from aliquot.data.batches import Batches
        from aliquot.data.data_order import TrainStore
        from aliquot.data.data_summary import day_line, examples, header, warnings
        from aliquot.data.eval_batches import EvalBatches
        from aliquot.data.prepare import TokenizerChanges, prepare
        from aliquot.data.workload import batch_size
        from aliquot.models.source import DESCRIPTION_FILES, resolve
        from aliquot.observe.console import Display
        from aliquot.observe.run_directory import RunDirectory

        settings = read_config(config, overrides or [])
        display = Display("auto", enabled=True)
        source = resolve(settings.model, DESCRIPTION_FILES)
        settings = settings.with_positions(source.positions)
        source.check_length(settings.data.sequence_length, settings.train.answers)
        fields = source.config.to_dict()
        rows = source.largest_vocabulary
        adapter = None if settings.adapter is None else settings.adapter.directory
        day = settings.data.chat_template_date or RunDirectory(settings.run.directory).day()
        section = settings.data.model_copy(update={"chat_template_date": day})
        changes = TokenizerChanges(settings.model.add_tokens, settings.model.add_special_tokens, adapter)
        prepared = prepare(section, source.directory, rows, display.progress, fields, changes)
        display.finish()
        train, tokenizer = settings.train, prepared.load_tokenizer()
        epochs = None if train.max_steps else train.num_train_epochs
        ranks = settings.launch.most_nodes * (1 if settings.launch.ranks == "auto" else settings.launch.ranks)
        size = batch_size(train, ranks)
        batches = Batches.of(prepared, settings.data, settings.run.seed, size, epochs)
        held_out = EvalBatches.of(prepared, settings.data, size)
        steps = batches.total_steps(train.max_steps)
        evaluated = [TrainStore(data.store, f"{name} (evaluation)".strip()) for name, data in held_out.items()]
        for source_tokens in [*batches.sources, *evaluated]:
            for line in examples(source_tokens, tokenizer, text=True, first=example):
                print(printable(line))
        lines = [day_line(prepared.day)] if prepared.day else []
        for line in [*lines, *header(batches, steps, held_out), *warnings(batches, steps, train.max_steps is not None)]:
            print(printable(line))
