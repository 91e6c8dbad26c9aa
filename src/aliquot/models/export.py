"""Write a model as a Hugging Face directory: every rank its own ranges, published by one rename."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from aliquot.config.schema import ModelSection
from aliquot.errors import RunDirectoryError
from aliquot.models.code_of_strangers import without_code
from aliquot.models.published import Published, PublishedParts, published_of, tensors_of
from aliquot.models.source import resolve
from aliquot.ranges.bytemap import ByteMap, Shape
from aliquot.ranges.checksums import BlockChecksums
from aliquot.ranges.file_layout import FilesLayout
from aliquot.ranges.header import TensorEntry
from aliquot.ranges.jsonfile import parse_json, read_small
from aliquot.ranges.manifest import check_read, read_manifest
from aliquot.ranges.parts import Part, PartSource
from aliquot.ranges.publish import check_names, check_space, clean_leftovers, publish_together, write_file
from aliquot.ranges.reader import RangeReader
from aliquot.ranges.together import Alone, RankGroup, on_first
from aliquot.ranges.transfer import drain

MAX_SHARD_BYTES = 50_000_000_000  # transformers' default


def export(
    store: PartSource,
    tensors: Sequence[tuple[str, Shape]],
    out_dir: Path,
    dtype: torch.dtype,
    config_files: Mapping[str, bytes],
    ranks: RankGroup,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    check: Callable[[], None] = lambda: None,
    published: Sequence[Published] | None = None,
) -> None:
    """Write the weight parts of `store` to `out_dir` as safetensors of `dtype`, rounded to nearest even. Collective.

    `tensors`: names and shapes of the whole model in its order, without tied aliases, the same on every rank.
    `published`: how they are to be stored, if not so. `config_files`: config.json, tokenizer files and so on by plain
    name; rank 0's are written, and config.json is made to tell `dtype`. The files do not depend on the world size.
    Raises the same UserError on every rank: `out_dir` is there and not empty, a rank cannot write, or `check`, which
    rank 0 calls last, raises; then no `out_dir` appears.
    """
    if published is not None:
        store, tensors = PublishedParts(store, published), tensors_of(published)
    out_dir = out_dir.resolve()  # "." and links have no name beside which to write
    layout = FilesLayout.of(tensors, dtype, max_shard_bytes, "model")

    def make_way() -> None:
        if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
            raise RunDirectoryError("exists and is not empty: give another directory, or remove it first", out_dir)
        clean_leftovers(out_dir.parent, re.compile(re.escape(out_dir.name)))

    def prepare(partial: Path) -> None:
        check_names(config_files, taken=())
        check_space(partial, layout.total_bytes)
        layout.create_files(partial)
        for name, data in config_files.items():
            write_file(partial / name, _with_dtype(data, dtype) if name == "config.json" else data)

    on_first(ranks, make_way)
    publish_together(
        out_dir,
        ranks,
        prepare,
        write=lambda partial: drain(store, {"weight": layout.byte_map(partial).entries}),
        finish=lambda partial, written: check(),
    )


def export_checkpoint(
    checkpoint_dir: Path,
    out_dir: Path,
    dtype: Literal["bfloat16", "float16", "float32"],
    verify: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Export the weights of a checkpoint, with the config files that it was saved with, in this one process.

    Memory is bounded by a few buffers; a model is built only on the meta device, of experts that are stored apart.
    `verify`: compare all bytes that are exported with the checksums of the manifest. Raises UserError as `export` does,
    DamagedCheckpoint where the checkpoint is not whole.
    """
    manifest = read_manifest(checkpoint_dir)
    source = ByteMap.of_directory(checkpoint_dir)
    config_files = {name: read_small(checkpoint_dir / name) for name in manifest.config_files}
    tensors = [(entry.name, entry.shape) for entry in sorted(source.entries.values(), key=_position)]
    checksums = BlockChecksums()

    def check() -> None:
        if verify:
            check_read(checkpoint_dir, manifest, source.header_bytes, checksums.pieces(), manifest.config_files)

    with RangeReader(checksums if verify else None) as reader:
        store = _StoredWeights(source, reader)
        published = _published(checkpoint_dir, tensors)
        export(store, tensors, out_dir, getattr(torch, dtype), config_files, Alone(), max_shard_bytes, check, published)


def _published(checkpoint_dir: Path, tensors: Sequence[tuple[str, Shape]]) -> tuple[Published, ...] | None:
    if all(len(shape) != 3 for _, shape in tensors):
        return None
    from transformers import AutoModelForCausalLM

    config = resolve(ModelSection(path=str(checkpoint_dir))).config
    with torch.device("meta"):
        model = without_code(AutoModelForCausalLM.from_config)(config)
    return published_of(model, tensors)


class _StoredWeights:
    """The weights of a directory as a store that can only be read."""

    def __init__(self, source: ByteMap, reader: RangeReader) -> None:
        self._entries = source.entries
        self._reader = reader

    def parts(self) -> Sequence[Part]:
        return [Part(entry.name, entry.shape, "weight", 0, entry.numel) for entry in self._entries.values()]

    def read(self, part: Part, start: int, out: torch.Tensor) -> None:
        self._reader.read(self._entries[part.name], start, out)


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """A config.json that tells the dtype of the weights beside it, which transformers loads them in."""
    fields = parse_json(config, "config.json")
    fields.pop("torch_dtype", None)  # what transformers 4 called it
    fields["dtype"] = str(dtype).removeprefix("torch.")
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def _position(entry: TensorEntry) -> tuple[Path, int, int]:
    return entry.file, entry.offset, entry.numel
