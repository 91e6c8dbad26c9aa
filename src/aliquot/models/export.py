"""Write a model as a Hugging Face directory: every rank its own ranges, published by one rename."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from aliquot.config.adapter_section import ADAPTER_CONFIG
from aliquot.core.errors import RunDirectoryError, UsageError
from aliquot.core.on_rank_0 import RankGroup, SingleRank, run_on_rank_0
from aliquot.models.adapter import BASE, STEM, MergedWeights, saves_of
from aliquot.models.model_files import json_bytes
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
from aliquot.tensor_io.checksums import BlockChecksums, Piece
from aliquot.tensor_io.file_layout import FilesLayout, LayoutEntry
from aliquot.tensor_io.jsonfile import parse_json, read_json, read_small
from aliquot.tensor_io.manifest import check_read, read_manifest, verify_descriptions
from aliquot.tensor_io.parts import PartSource
from aliquot.tensor_io.publish import check_names, check_space, clean_leftovers, publish_together, write_file
from aliquot.tensor_io.range_io import RangeReader
from aliquot.tensor_io.transfer import Watch, drain

STATE = "state.json"  # of a checkpoint


@dataclass(frozen=True)
class ExportOptions:
    """How an export is stored, checked and published."""

    max_shard_bytes: int = 50_000_000_000  # at which a further safetensors file begins: transformers' default
    published: Sequence[Published] | None = None  # the tensors to store, if they are not those of the model
    exact: Collection[str] = ()  # tensors that are stored as fp32, whatever the dtype of the export is
    stem: str = "model"  # how the names of the safetensors files begin
    tell: Callable[[], Any] = lambda: None  # returns the report of a rank that has written its parts
    # Rank 0 calls it last, with the reports of all ranks; the export is published if it returns.
    check: Callable[[list[Any]], None] = lambda reports: None
    watch: Watch | None = None  # called for each written piece; an exception ends the export
    # export_checkpoint writes these instead of the files that the checkpoint was saved with.
    config_files: Mapping[str, bytes] | None = None
    verify: bool = True  # export_checkpoint compares all exported bytes with the checksums of the manifest
    replace: bool = False  # replace an existing export when the new one is whole, or before if only one has room
    # Rank 0 asks before a replacement; True: the former export has another name now and stays.
    spare: Callable[[Path], bool] = lambda former: False


def export(
    store: PartSource,
    tensors: Sequence[tuple[str, Shape]],
    out_dir: Path,
    dtype: torch.dtype,
    config_files: Mapping[str, bytes],
    ranks: RankGroup,
    options: ExportOptions = ExportOptions(),
) -> None:
    """Write the weight parts of `store` to `out_dir` as safetensors of `dtype`, rounded to nearest even. Collective.

    The files do not depend on the world size.

    Args:
        tensors: names and shapes of the whole model in its order, without tied aliases, the same on every rank.
        config_files: config.json, tokenizer files and so on by plain name; those of rank 0 are written, and config.json
            gets the dtype.

    Raises UserError on every rank, and no `out_dir` appears: it is not empty, a rank cannot write, or `check` or
    `watch` raises.
    """
    exact = options.exact
    if (published := options.published) is not None:
        store, tensors = PublishedParts(store, published), tensors_of(published)
        exact = {tensor.name for tensor in published if tensor.source in exact}
    out_dir = out_dir.resolve()  # "." and links have no name next to which a directory could be written
    entries = [LayoutEntry(name, shape, torch.float32 if name in exact else dtype) for name, shape in tensors]
    layout = FilesLayout.from_entries(entries, options.max_shard_bytes, options.stem)

    def make_way() -> None:
        if not options.replace and out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
            raise RunDirectoryError("exists and is not empty: give another directory, or remove it first", out_dir)
        clean_leftovers(out_dir.parent, re.compile(re.escape(out_dir.name)))

    def prepare(partial: Path) -> None:
        check_names(config_files, taken=())
        replaced = options.replace and out_dir.exists() and not options.spare(out_dir)
        check_space(partial, layout.total_bytes, out_dir if replaced else None)
        layout.create_files(partial)
        for name, data in config_files.items():
            write_file(partial / name, _with_dtype(data, dtype) if name == "config.json" else data)

    def write(partial: Path) -> Any:
        drain(store, {"weight": layout.byte_map(partial).entries}, watch=options.watch)
        return options.tell()

    def finish(_: Path, reports: list[Any]) -> None:
        options.check(reports)

    run_on_rank_0(ranks, make_way)
    publish_together(out_dir, ranks, prepare, write, finish, options.replace, options.spare)


def export_checkpoint(
    checkpoint_dir: Path,
    out_dir: Path,
    dtype: Literal["bfloat16", "float16", "float32"] | torch.dtype,
    ranks: RankGroup = SingleRank(),  # noqa: B008 (it holds nothing)
    merge: bool = False,
    base: str | None = None,
    options: ExportOptions = ExportOptions(),
) -> None:
    """Export the weights of a checkpoint; each rank writes its part. Collective.

    Memory is bounded by a few buffers. A model is built on the meta device alone, for the names that its files have.

    Raises UserError as `export` does, and DamagedCheckpoint.

    Args:
        merge: of an adapter, export the model that the adapter changes, instead of the adapter.
        base: the directory of that model, if the model has moved.
    """
    manifest = read_manifest(checkpoint_dir)
    if options.verify:
        exported = [name for name in manifest.files if not name.startswith("exp_avg")]
        run_on_rank_0(ranks, lambda: verify_descriptions(checkpoint_dir, manifest, exported))
    source = ByteMap.from_directory(checkpoint_dir)
    files = options.config_files
    if files is None:
        files = {name: read_small(checkpoint_dir / name) for name in manifest.config_files}
    tensors = names_in_file_order(source)
    checksums = BlockChecksums()

    def check(pieces: list[list[Piece]]) -> None:
        if options.verify:
            check_read(checkpoint_dir, manifest, source.header_bytes, chain(*pieces))

    adapter = files.get(ADAPTER_CONFIG)
    if merge and adapter is None:
        raise UsageError("--merge: this is a checkpoint of a whole model, not of an adapter", checkpoint_dir)
    stored_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    options = replace(options, tell=checksums.pieces, check=check)
    with RangeReader(checksums if options.verify else None) as reader, RangeReader() as base_reader:
        store: PartSource = StoredWeights(source, reader, ranks)
        if adapter is None:
            model = model_on_meta(checkpoint_dir)
            options = replace(options, published=published_of(model, tensors), exact=fp32_weights(model))
        elif merge:
            fingerprint = read_json(checkpoint_dir / STATE)["determinants"].get(BASE)
            merged = MergedWeights(StoredWeights(source, reader), adapter, base_reader, base, fingerprint)
            store, tensors, files = merged, merged.tensors, merged.files(files)
            options = replace(options, exact=merged.exact)
        else:
            options = replace(options, published=saves_of(tensors), stem=STEM)
        export(store, tensors, out_dir, stored_dtype, files, ranks, options)


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """Return config.json with the dtype of the weights, in which transformers loads them."""
    fields = parse_json(config, "config.json")
    fields.pop("torch_dtype", None)  # what transformers 4 called it
    fields["dtype"] = str(dtype).removeprefix("torch.")
    return json_bytes(fields)
