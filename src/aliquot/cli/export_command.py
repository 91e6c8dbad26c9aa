"""aliquot export: a checkpoint becomes a Hugging Face model directory."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

from aliquot.cli.one_line_errors import one_line_errors
from aliquot.core.errors import UsageError


def command(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, runs/NAME/checkpoints/step-..., or its URL.")],
    out_dir: Annotated[Path, typer.Argument(help="Where to write; must not exist or be empty.")],
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Dtype of the weights.")] = (
        "bfloat16"
    ),
    merge: Annotated[bool, typer.Option("--merge", help="Of an adapter: into the model that it adapts.")] = False,
    base: Annotated[str | None, typer.Option(help="Where that model lies now, if not where it did.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="First check every byte of the checkpoint.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Write a checkpoint as Hugging Face safetensors with its config and tokenizer; of an adapter as one of peft.

    What is exported is compared with the checkpoint's checksums; --verify does so with all of it, moments included.
    """
    with one_line_errors(debug), ExitStack() as held:
        from aliquot.checkpoint.remote_download import fetched_weights
        from aliquot.models.export import export_checkpoint
        from aliquot.models.older_transformers import older_transformers
        from aliquot.stores.store import is_url
        from aliquot.tensor_io.jsonfile import read_json
        from aliquot.tensor_io.manifest import verify as verify_all

        directory = Path(checkpoint)
        if not is_url(checkpoint) and not directory.is_dir():
            others = ", ".join(sorted(each.name for each in directory.parent.glob("step-*")))
            raise UsageError(f"no such directory{others and f'; there are {others}'}", directory)
        if is_url(checkpoint):
            directory = held.enter_context(fetched_weights(checkpoint, out_dir, verify))
        if verify:
            verify_all(directory)
        export_checkpoint(directory, out_dir, dtype, merge=merge, base=base)
        config = out_dir / "config.json"  # which an adapter has not
        model_type = str(read_json(config).get("model_type")) if config.is_file() else ""
        if (told := older_transformers(model_type)) is not None:
            print(f"aliquot: {told}", file=sys.stderr)
    print(f"exported {checkpoint} to {out_dir} ({dtype})")
