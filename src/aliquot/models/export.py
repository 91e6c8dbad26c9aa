"""Export a model as a Hugging Face directory. Each rank writes its shards; one rename makes the directory visible."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from aliquot.config.adapter_section import ADAPTER_CONFIG
from aliquot.core.decode import parse_json, read_small
from aliquot.core.errors import RunDirectoryError, UsageError
from aliquot.core.on_rank_0 import RankGroup, SingleRank, run_on_rank_0
from aliquot.models.adapter import BASE, STEM, MergedWeights, saves_of
from aliquot.models.model_files import export_dtype, json_bytes
from aliquot.models.source import model_on_meta
from aliquot.models.stored_weights import (
    Published,
    PublishedParts,
    StoredWeights,
    names_in_file_order,
    published_of,
    tensors_of,
)
from aliquot.models.structure import fp32_weights
from aliquot.tensor_io.bytemap import ByteMap, Shape
from aliquot.tensor_io.checksums import BlockChecksums
from aliquot.tensor_io.file_layout import FilesLayout, LayoutEntry
from aliquot.tensor_io.manifest import check_read, read_manifest, read_state, verify_descriptions
from aliquot.tensor_io.parts import PartSource
from aliquot.tensor_io.publish import check_names, check_space, clean_leftovers, publish_together, write_file
from aliquot.tensor_io.range_io import RangeReader
from aliquot.tensor_io.transfer import Watch, drain


@dataclass(frozen=True)
class ExportOptions:
    """How an export is stored, checked and published."""

    max_shard_bytes: int = 50_000_000_000  # size at which another safetensors file begins; the default of transformers
    published: Sequence[Published] | None = None  # the tensors to store; None: the tensors of the model
    exact: Collection[str] = ()  # names of weights that are stored as fp32, whatever the dtype of the export
    stem: str = "model"  # the first part of the names of the safetensors files
    # After writing, all ranks call `combine`, a collective, and rank 0 then calls `check` with its result. If one of
    # them raises, the export is discarded.
    combine: Callable[[], Any] = lambda: None
    check: Callable[[Any], None] = lambda combined: None
    watch: Watch | None = None  # called after each written piece; an exception ends the export
    # The small files that export_checkpoint writes; None: the files that the checkpoint was saved with.
    config_files: Mapping[str, bytes] | None = None
    verify: bool = True  # export_checkpoint compares all exported bytes with the checksums of the manifest
    # Replace an existing export: after the new export is complete, or before if the disk has no space for both.
    replace: bool = False
    # Rank 0 calls `keep_former` with the path of the existing export before deleting that export; True: keep it.
    keep_former: Callable[[Path], bool] = lambda former: False


def export(
    store: PartSource,
    tensors: Sequence[tuple[str, Shape]],
    out_dir: Path,
    dtype: torch.dtype,
    config_files: Mapping[str, bytes],
    ranks: RankGroup,
    options: ExportOptions = ExportOptions(),
) -> None:
    """Write the weights of `store` to `out_dir` as safetensors of `dtype`, rounded to nearest even. Collective.

    The files do not depend on the world size.

    Args:
        tensors: names and shapes of the whole model in the model's order, without tied aliases, the same on every rank.
        config_files: config.json, tokenizer files and other small files, by file name. Rank 0 writes its own
            `config_files` and sets the dtype in config.json.

    Raises UserError on every rank if `out_dir` exists and is not empty, if a rank cannot write, or if `check` or
    `watch` of the options raises. `out_dir` is then not created.
    """
    exact = options.exact
    if (published := options.published) is not None:
        store, tensors = PublishedParts(store, published), tensors_of(published)
        exact = {tensor.name for tensor in published if tensor.source in exact}
    out_dir = out_dir.resolve()  # the temporary directory needs the real name and parent, also of "." and of links
    entries = [LayoutEntry(name, shape, torch.float32 if name in exact else dtype) for name, shape in tensors]
    layout = FilesLayout.from_entries(entries, options.max_shard_bytes, options.stem)

    def make_way() -> None:
        if not options.replace and out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
            raise RunDirectoryError("exists and is not empty: give another directory, or remove it first", out_dir)
        clean_leftovers(out_dir.parent, re.compile(re.escape(out_dir.name)))

    def prepare(partial: Path) -> None:
        check_names(config_files, taken=())
        replaced = options.replace and out_dir.exists() and not options.keep_former(out_dir)
        check_space(partial, layout.total_bytes, out_dir if replaced else None)
        layout.create_files(partial)
        for name, data in config_files.items():
            write_file(partial / name, _with_dtype(data, dtype) if name == "config.json" else data)

    run_on_rank_0(ranks, make_way)
    keep_former = options.keep_former if options.replace else None
    publish_together(
        out_dir,
        ranks,
        prepare,
        write=lambda partial: drain(store, {"weight": layout.byte_map(partial).entries}, watch=options.watch),
        finish=lambda _, combined: options.check(combined),
        combine=lambda _: options.combine(),
        keep_former=keep_former,
    )


def export_checkpoint(
    checkpoint_dir: Path | str,
    out_dir: Path | str,
    dtype: Literal["bfloat16", "float16", "float32"] | torch.dtype,
    ranks: RankGroup = SingleRank(),  # noqa: B008 (it holds nothing)
    merge: bool = False,
    base: str | None = None,
    options: ExportOptions = ExportOptions(),
) -> None:
    """Export the weights of a checkpoint as a Hugging Face model directory. Collective over `ranks`.

    Each rank writes its share, and needs memory for a few buffers only. An adapter is exported as an adapter of peft.

    Args:
        checkpoint_dir: a checkpoint, for example `runs/mine/checkpoints/step-00000100`.
        out_dir: the directory to write, which must be new or empty.
        dtype: the dtype of the weights, rounded to nearest even.
        ranks: the ranks that export together. Default: this process alone.
        merge: for the checkpoint of an adapter, export the base model with the adapter merged in.
        base: the directory of the base model for `merge`, if the model has moved since training.
        options: for the export at the end of a run.

    Raises:
        UserError: on every rank: `out_dir` is not empty, files cannot be read or written, or bytes do not match the
            checksums of the checkpoint (DamagedCheckpoint). `out_dir` is then not created.
    """
    checkpoint_dir, out_dir = Path(checkpoint_dir), Path(out_dir)
    manifest = read_manifest(checkpoint_dir)
    if options.verify:
        exported = [name for name in manifest.files if not name.startswith("exp_avg")]
        run_on_rank_0(ranks, lambda: verify_descriptions(checkpoint_dir, manifest, exported))
    source = ByteMap.from_directory(checkpoint_dir)
    files = (
        {name: read_small(checkpoint_dir / name) for name in manifest.config_files}
        if options.config_files is None
        else options.config_files
    )
    tensors = names_in_file_order(source)
    checksums = BlockChecksums()

    adapter = files.get(ADAPTER_CONFIG)
    if merge and adapter is None:
        raise UsageError("--merge: this is a checkpoint of a whole model, not of an adapter", checkpoint_dir)
    stored_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if options.verify:
        options = replace(
            options,
            combine=lambda: checksums.shares(manifest.sizes(source.header_bytes)).combine(ranks),
            check=lambda shares: check_read(checkpoint_dir, manifest, source.header_bytes, shares),
        )
    with RangeReader(checksums if options.verify else None) as reader, RangeReader() as base_reader:
        store: PartSource = StoredWeights(source, reader, ranks)
        if adapter is None:
            model = model_on_meta(checkpoint_dir)
            options = replace(options, published=published_of(model, tensors), exact=fp32_weights(model))
        elif merge:
            fingerprint = read_state(checkpoint_dir)["determinants"].get(BASE)
            merged = MergedWeights(StoredWeights(source, reader), adapter, base_reader, base, fingerprint)
            store, tensors, files = merged, merged.tensors, merged.files(files)
            options = replace(options, exact=merged.exact)
        else:
            options = replace(options, published=saves_of(tensors), stem=STEM)
        export(store, tensors, out_dir, stored_dtype, files, ranks, options)


def trained_dtype(checkpoint_dir: Path) -> torch.dtype:
    """Return the dtype that the run of a checkpoint exports, or else computes with. Raises UserError."""
    settings = read_state(checkpoint_dir)["config"]
    return export_dtype(settings["model"]["dtype"], None, settings["train"]["precision"])


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """Return config.json with `dtype` as the dtype in which transformers loads the weights."""
    fields = parse_json(config, "config.json")
    fields.pop("torch_dtype", None)  # the name of `dtype` in transformers 4
    fields["dtype"] = str(dtype).removeprefix("torch.")
    return json_bytes(fields)
