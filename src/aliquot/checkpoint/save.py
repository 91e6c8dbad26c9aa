"""Save a checkpoint: every rank writes its own ranges into files that rank 0 laid out, then one rename publishes them.

step-00000100/
  model*.safetensors        fp32 master weights: with `config_files` a Hugging Face directory
  exp_avg*.safetensors      first moments, fp32
  exp_avg_sq*.safetensors   second moments, fp32
  state.json                where the run stands
  manifest.json             size and block checksums of all the others, written last
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from aliquot.checkpoint.directories import STATE, STEMS, clean, directory_of, retain
from aliquot.ranges.bytemap import Shape
from aliquot.ranges.checksums import BlockChecksums, Piece, combine_pieces
from aliquot.ranges.layout import Layout
from aliquot.ranges.manifest import MANIFEST, FileRecord, checksum, manifest_bytes
from aliquot.ranges.parts import PartStore
from aliquot.ranges.publish import check_names, check_space, publish_together, set_aside, write_file
from aliquot.ranges.together import Ranks, on_first
from aliquot.ranges.transfer import drain

MAX_FILE_BYTES = 4 << 30


def save(
    root: Path,
    step: int,
    store: PartStore,
    tensors: Sequence[tuple[str, Shape]],
    state: Mapping[str, Any],
    config_files: Mapping[str, bytes],
    ranks: Ranks,
    keep: int,
) -> Path:
    """Write `root/step-<step>` and then keep only the `keep` newest complete checkpoints. Collective.

    `tensors`: names and shapes of the whole model in its order, the same on every rank. `state`: any JSON object.
    `config_files`: config.json, tokenizer files and so on by plain name. Of both, rank 0's are written. A checkpoint of
    the same step is replaced. Raises the same UserError on every rank where any of them cannot write: then nothing is
    left of this one and the earlier ones are as they were.
    """
    layouts = {kind: Layout.of(tensors, torch.float32, MAX_FILE_BYTES, stem) for kind, stem in STEMS.items()}
    files = {file.name: file for layout in layouts.values() for file in layout.files}
    target = directory_of(root, step)

    def small_files() -> dict[str, bytes]:
        return {STATE: json.dumps(state, indent=1).encode(), **config_files}

    def prepare(partial: Path) -> None:
        check_names(config_files, taken={STATE, MANIFEST})
        check_space(partial, sum(file.file_bytes for file in files.values()))
        for layout in layouts.values():
            layout.create_files(partial)
        for name, data in small_files().items():
            write_file(partial / name, data)

    def write(partial: Path) -> list[Piece]:
        checksums = BlockChecksums()
        drain(store, {kind: layout.byte_map(partial).entries for kind, layout in layouts.items()}, checksums)
        return checksums.pieces()

    def finish(partial: Path, written: list[list[Piece]]) -> None:
        heads = BlockChecksums()
        heads.add_heads({partial / name: len(file.header) for name, file in files.items()})
        sizes = {name: file.file_bytes for name, file in files.items()}
        blocks = combine_pieces(chain(heads.pieces(), *written), sizes)
        records = {name: FileRecord(bytes=size, crc32=blocks[name]) for name, size in sizes.items()}
        for layout in layouts.values():
            records |= {name: checksum(data) for name, data in layout.index.items()}
        records |= {name: checksum(data) for name, data in small_files().items()}
        write_file(partial / MANIFEST, manifest_bytes(records, sorted(config_files)))
        if target.exists():
            set_aside(target)

    def tidy() -> None:
        retain(root, keep, target)
        clean(root)

    on_first(ranks, lambda: clean(root))
    publish_together(target, ranks, prepare, write, finish)
    on_first(ranks, tidy)
    return target
