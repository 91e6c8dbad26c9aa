"""Upload an export to the Hugging Face hub, with a model card that states how the model was trained."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from aliquot.config.adapter_section import ADAPTER_CONFIG
from aliquot.config.schema import RunConfig
from aliquot.core.errors import StorageError, StorageFailureError, printable
from aliquot.core.small_files import limit_hub_time, looks_local
from aliquot.observe.metrics import last_point
from aliquot.tensor_io.manifest import read_state

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_LOSSES = {"loss": "training loss", "eval_loss": "evaluation loss"}  # in metrics.jsonl -> in the card
_CARD = "README.md"  # the hub shows this file as the model card


class HubUpload:
    """A repository of the hub, which exists before the export begins, because an export of a large model takes long.

    The client takes the address of the hub from HF_ENDPOINT, and the token from HF_TOKEN or `hf auth login`.
    """

    def __init__(self, name: str, private: bool) -> None:
        """Create the repository `name` if it does not exist. Raises UserError if the hub refuses.

        A new repository is public unless `private` is set, or the default of the organization is private.
        """
        from huggingface_hub import HfApi
        from transformers.utils import logging

        if not sys.stderr.isatty():
            logging.disable_progress_bar()  # also those of the client
        limit_hub_time()
        self._hub: HfApi = HfApi()
        try:
            self.name = self._hub.create_repo(name, private=private or None, exist_ok=True).repo_id
        except Exception as error:  # the client raises errors of its own, and of its HTTP library
            raise StorageError(
                f"--push-to-hub {name}: the hub refuses the repository: {_first_line(error)}. Check the name and the"
                " network, and log in with `hf auth login` or HF_TOKEN"
            ) from error

    def send(self, export: Path) -> str:
        """Upload all files of `export`, and return the URL of the commit. Raises UserError if the upload breaks."""
        message = "Upload an export of aliquot"
        try:
            commit = self._hub.upload_folder(repo_id=self.name, folder_path=export, commit_message=message)
        except Exception as error:  # the client raises errors of its own, and of its HTTP and upload libraries
            raise StorageFailureError(
                f"--push-to-hub {self.name}: the upload broke: {_first_line(error)}. The export is complete; continue"
                f" with: hf upload {self.name} {export} ."
            ) from error
        return printable(str(commit.commit_url))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(". ")


def write_model_card(export: Path, checkpoint: Path, name: str) -> None:
    """Write the model card of an export of `checkpoint`, with base model, data, steps and loss.

    The card shows only the last part of local paths, because the hub may be public. It names no licence.
    """
    from huggingface_hub import ModelCardData

    state = read_state(checkpoint)
    config, is_adapter = state["config"], (export / ADAPTER_CONFIG).is_file()
    path = config["model"].get("path")
    hub_ids = state.get("hub_ids", [])  # aliquot 0.1.0 does not record them
    data = ModelCardData(
        base_model=path if path in hub_ids else None,
        library_name="peft" if is_adapter else "transformers",
        license="unknown",
        pipeline_tag="text-generation",
        tags=["aliquot", *(["lora"] if config.get("adapter") else [])],
    )
    step = int(state["step"])
    rows = {
        "base model": "none: trained from scratch" if path is None else _public_name(path, hub_ids),
        "trained weights": "a LoRA adapter" if is_adapter else "a merged LoRA adapter" if config.get("adapter") else "",
        "objective": config["train"].get("objective", "sft"),
        "data": ", ".join(_data_names(config["data"], hub_ids)),
        "optimizer steps": f"{step:,}, {int(state['tokens']):,} tokens",
        **_last_losses(checkpoint.resolve().parent.parent / "metrics.jsonl", step),
        "license": "unknown: ask the owners of the base model and of the data",
    }
    cells = {key: " ".join(value.split()).replace("|", "\\|") for key, value in rows.items() if value}
    table = "\n".join(f"| {key} | {value} |" for key, value in cells.items())
    text = f"# {PurePath(name).name}\n\nTrained with aliquot.\n\n| | |\n|--|--|\n{table}\n"
    (export / _CARD).write_text(f"---\n{data.to_yaml()}\n---\n\n{text}", encoding="utf-8")


def _last_losses(metrics: Path, step: int) -> dict[str, str]:
    """Return the newest training and evaluation loss up to `step`, from a run's metrics if they exist."""
    points = {label: last_point(metrics, name, step) for name, label in _LOSSES.items()}
    return {label: f"{value:.4f} at step {at:,}" for label, (at, value) in points.items() if value is not None}


def names_on_hub(config: RunConfig) -> list[str]:
    """Return the models and datasets of `config` that are hub ids; a run calls this while its local files exist."""
    names = [*([] if config.model.path is None else [config.model.path]), *config.data.datasets()]
    return [name for name in names if not looks_local(name)]


def _data_names(data: Mapping[str, Any], hub_ids: Collection[str]) -> Iterator[str]:
    for source in data.get("sources") or [data]:
        paths = source.get("path") or []
        yield from (PurePath(path).name for path in ([paths] if isinstance(paths, str) else paths))
        if source.get("dataset"):
            yield _public_name(source["dataset"], hub_ids)


def _public_name(name: str, hub_ids: Collection[str]) -> str:
    """Return a hub id, or the last part of a local path."""
    return name if name in hub_ids else PurePath(name).name
