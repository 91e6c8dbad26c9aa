"""Write a model as a Hugging Face directory: every rank its own ranges, published by one rename."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from aliquot.config.adapter_section import ADAPTER_CONFIG
from aliquot.core.errors import RunDirectoryError, UsageError
from aliquot.core.on_rank_0 import RankGroup, SingleRank, run_on_rank_0
from aliquot.models.adapter import BASE, STEM, saves_of
from aliquot.models.merge import MergedWeights
from aliquot.models.published import Published, PublishedParts, published_of, tensors_of
from aliquot.models.source import model_on_meta
from aliquot.models.stored_weights import StoredWeights, in_order
from aliquot.models.structure import kept_in_fp32
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
MAX_SHARD_BYTES = 50_000_000_000  # transformers' default


def export(
    store: PartSource,
    tensors: Sequence[tuple[str, Shape]],
    out_dir: Path,
    dtype: torch.dtype,
    config_files: Mapping[str, bytes],
    ranks: RankGroup,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tell: Callable[[], Any] = lambda: None,
    check: Callable[[list[Any]], None] = lambda told: None,
    published: Sequence[Published] | None = None,
    stem: str = "model",
    replace: bool = False,
    exact: Collection[str] = (),
    watch: Watch | None = None,
    spare: Callable[[Path], bool] = lambda former: False,
) -> None:
    """Write the weight parts of `store` to `out_dir` as safetensors of `dtype`, rounded to nearest even. Collective.

    `tensors`: names and shapes of the whole model in its order, without tied aliases, the same on every rank. Those
    that are `exact` are stored as fp32 whatever `dtype` is.
    `published`: how they are to be stored, if not so; `stem`: how their files' names begin. `config_files`:
    config.json, tokenizer files and so on by plain name; rank 0's are written, and config.json is made to tell `dtype`.
    The files do not depend on the world size.
    Raises the same UserError on every rank: `out_dir` is there and not empty, a rank cannot write, or `check`, which
    rank 0 calls last with what every rank has to `tell` once it has written, or `watch`, which hears of every piece,
    raises; then no `out_dir` appears. With `replace` what is there goes when the new one is whole, or before, where
    there is no room for both, unless `spare`, which is asked before and on rank 0 alone, gives it another name.
    """
    if published is not None:
        store, tensors = PublishedParts(store, published), tensors_of(published)
        exact = {each.name for each in published if each.source in exact}
    out_dir = out_dir.resolve()  # "." and links have no name beside which to write
    laid = [LayoutEntry(name, shape, torch.float32 if name in exact else dtype) for name, shape in tensors]
    layout = FilesLayout.of_tensors(laid, max_shard_bytes, stem)

    def make_way() -> None:
        if not replace and out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
            raise RunDirectoryError("exists and is not empty: give another directory, or remove it first", out_dir)
        clean_leftovers(out_dir.parent, re.compile(re.escape(out_dir.name)))

    def prepare(partial: Path) -> None:
        check_names(config_files, taken=())
        replaced = replace and out_dir.exists() and not spare(out_dir)
        check_space(partial, layout.total_bytes, out_dir if replaced else None)
        layout.create_files(partial)
        for name, data in config_files.items():
            write_file(partial / name, _with_dtype(data, dtype) if name == "config.json" else data)

    def write(partial: Path) -> Any:
        drain(store, {"weight": layout.byte_map(partial).entries}, watch=watch)
        return tell()

    run_on_rank_0(ranks, make_way)
    publish_together(out_dir, ranks, prepare, write, lambda partial, told: check(told), replace, spare)


def export_checkpoint(
    checkpoint_dir: Path,
    out_dir: Path,
    dtype: Literal["bfloat16", "float16", "float32"] | torch.dtype,
    verify: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    ranks: RankGroup = SingleRank(),  # noqa: B008 (it holds nothing)
    merge: bool = False,
    base: str | None = None,
    files: Mapping[str, bytes] | None = None,
    replace: bool = False,
    watch: Watch | None = None,
    spare: Callable[[Path], bool] = lambda former: False,
) -> None:
    """Export the weights of a checkpoint, with the config files that it was saved with, or with `files`; each rank its
    part. Collective.

    Of an adapter they are one of peft; with `merge` they are the model that it was learned beside, which it changes
    and which lies where it did, or at `base`.

    Memory is bounded by a few buffers; a model is built only on the meta device, for the names that its files have.
    `verify`: compare all bytes that are exported with the checksums of the manifest. Raises UserError as `export` does,
    DamagedCheckpoint where the checkpoint is not whole.
    """
    manifest = read_manifest(checkpoint_dir)
    if verify:
        exported = [name for name in manifest.files if not name.startswith("exp_avg")]
        run_on_rank_0(ranks, lambda: verify_descriptions(checkpoint_dir, manifest, exported))
    source = ByteMap.of_directory(checkpoint_dir)
    config_files = files
    if config_files is None:
        config_files = {name: read_small(checkpoint_dir / name) for name in manifest.config_files}
    tensors = in_order(source)
    checksums = BlockChecksums()

    def check(pieces: list[list[Piece]]) -> None:
        if verify:
            check_read(checkpoint_dir, manifest, source.header_bytes, chain(*pieces))

    stored = getattr(torch, dtype) if isinstance(dtype, str) else dtype

    def write(store: PartSource, tensors: Sequence[tuple[str, Shape]], files: Mapping[str, bytes], **how: Any) -> None:
        tell, every = checksums.pieces, {"replace": replace, "watch": watch, "spare": spare, **how}
        export(store, tensors, out_dir, stored, files, ranks, max_shard_bytes, tell, check, **every)

    adapter = config_files.get(ADAPTER_CONFIG)
    if merge and adapter is None:
        raise UsageError("--merge: this is a checkpoint of a whole model, not of an adapter", checkpoint_dir)
    with RangeReader(checksums if verify else None) as reader, RangeReader() as of_base:
        store = StoredWeights(source, reader, ranks)
        if adapter is None:
            model = model_on_meta(checkpoint_dir)
            write(store, tensors, config_files, published=published_of(model, tensors), exact=kept_in_fp32(model))
        elif merge:
            beside = read_json(checkpoint_dir / STATE)["determinants"].get(BASE)
            merged = MergedWeights(StoredWeights(source, reader), adapter, of_base, base, beside)
            write(merged, merged.tensors, merged.files(config_files), exact=merged.exact)
        else:
            write(store, tensors, config_files, published=saves_of(tensors), stem=STEM)


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """A config.json that tells the dtype of the weights beside it, which transformers loads them in."""
    fields = parse_json(config, "config.json")
    fields.pop("torch_dtype", None)  # what transformers 4 called it
    fields["dtype"] = str(dtype).removeprefix("torch.")
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()
