"""aliquot export: write a Hugging Face model directory from a checkpoint."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

from aliquot.cli.options import BaseModel, Debug
from aliquot.cli.terminal import one_line_errors
from aliquot.core.errors import UsageError


def command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, its URL, or a run directory: its best checkpoint, if it keeps one, or the newest.",
        ),
    ],
    out_dir: Annotated[
        Path, typer.Argument(metavar="OUT_DIR", help="The directory to write, which must be new or empty.")
    ],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Dtype of the weights. Default: the run's model.dtype, or train.precision."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into its base model.")] = False,
    base: BaseModel = None,
    verify: Annotated[bool, typer.Option("--verify", help="Verify every byte of the checkpoint first.")] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="REPO",
            help="Also upload the export, with a model card, to this repository of the Hugging Face hub. The token is"
            " HF_TOKEN or that of `hf auth login`.",
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="If REPO is new, make it private.")] = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory.

    Of a run directory, it writes the checkpoint that the run itself exports: the best if the run keeps it, or the
    newest. The checkpoint of an adapter becomes a peft adapter. The command compares the exported weights with the
    checksums of the checkpoint.
    """
    with one_line_errors(debug), ExitStack() as stack:
        from aliquot.checkpoint.remote_checkpoint import fetched_weights
        from aliquot.core.decode import read_json
        from aliquot.models.export import export_checkpoint, trained_dtype
        from aliquot.models.model_files import older_transformers
        from aliquot.stores.store import is_url
        from aliquot.tensor_io.manifest import read_state
        from aliquot.tensor_io.manifest import verify as verify_all

        if private and push_to_hub is None:
            raise UsageError("--private is about the repository of --push-to-hub, which is missing")
        if not is_url(checkpoint):
            checkpoint = str(_checkpoint(Path(checkpoint)))
        upload = None
        if push_to_hub is not None:
            from aliquot.run.hub_upload import HubUpload, write_model_card

            upload = HubUpload(push_to_hub, private)
        is_remote = is_url(checkpoint)
        directory = stack.enter_context(fetched_weights(checkpoint, out_dir, verify)) if is_remote else Path(checkpoint)
        if verify:
            verify_all(directory)
        stored_dtype = dtype or trained_dtype(directory)
        export_checkpoint(directory, out_dir, stored_dtype, merge=merge, base=base)
        if merge and (trained_on := read_state(directory)["config"]["adapter"].get("base", "bf16")) != "bf16":
            print(
                f"aliquot: the adapter was trained on a base in {trained_on}, and is merged into the original weights,"
                f" so its loss changes: `aliquot evaluate {out_dir} DATA` shows the new loss",
                file=sys.stderr,
            )
        config = out_dir / "config.json"  # an adapter has none
        model_type = str(read_json(config).get("model_type")) if config.is_file() else ""
        if (warning := older_transformers(model_type)) is not None:
            print(f"aliquot: {warning}", file=sys.stderr)
        if upload is not None:
            write_model_card(out_dir, directory, upload.name)
            print(f"uploaded {out_dir}: {upload.send(out_dir)}")
    print(f"exported {checkpoint} to {out_dir} ({str(stored_dtype).removeprefix('torch.')})")


def _checkpoint(directory: Path) -> Path:
    """Return `directory`, or of the run in `directory` the checkpoint that the run itself exports: the best, or newest.

    Raises UsageError if `directory` is missing or an export; the error names the checkpoints to give.
    """
    from aliquot.checkpoint.directories import directories, newest
    from aliquot.checkpoint.retention import BEST

    if not directory.is_dir():
        names = ", ".join(path.name for path in directories(directory.parent))
        raise UsageError(f"no such directory{names and f'; there are {names}'}", directory)
    if checkpoints := directories(directory.parent / "checkpoints"):
        choice = " or ".join(map(str, checkpoints))
        raise UsageError(f"this is an export, not a checkpoint: give {choice}", directory)
    if not directories(directory / "checkpoints"):
        return directory
    if (best := directory / "checkpoints" / BEST).is_dir():
        return best.resolve()
    if (checkpoint := newest(directory / "checkpoints")) is None:
        raise UsageError("this run has no complete checkpoint", directory)
    return checkpoint
