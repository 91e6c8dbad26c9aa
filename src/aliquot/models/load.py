"""Load the weights of a model from a Hugging Face directory: each rank reads only the bytes of its shards.

The embedding rows of added tokens are drawn as `resize_token_embeddings` of transformers draws them: from a normal
distribution with the mean of the old rows and 1e-9 times their covariance. No covariance matrix is computed: a new row
is the mean plus the sum of the centred old rows, each multiplied by a random number from N(0, 1e-9 / old rows). The
ranks share the sums in chunks of old rows. The chunks do not depend on the world size.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aliquot.core.errors import WeightsFileError
from aliquot.core.on_rank_0 import RankGroup, gather_results
from aliquot.core.small_files import open_regular
from aliquot.models.adapter import BASE, STEM
from aliquot.models.packed_weights import fill_packed, packed_weights
from aliquot.models.stored_weights import Published, PublishedParts, StoredNames, is_computed, tensors_of
from aliquot.models.traits import one_thread
from aliquot.tensor_io.bytemap import ByteMap, Shape, check_tensors
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.manifest import STATE, read_state
from aliquot.tensor_io.parts import PartStore
from aliquot.tensor_io.range_io import RangeReader
from aliquot.tensor_io.transfer import Watch, fill

_COMPARED_BYTES = 8 << 20
_CHUNKS = 16  # number of chunks of old rows that the ranks share
_BLOCK_NUMEL = 1 << 20
_AT_ONCE = 64  # number of new rows whose sums the ranks exchange together
_COVARIANCE_SCALE = 1e-9  # as in transformers


@dataclass(frozen=True)
class LoadOptions:
    """How names, layout and rows of the stored weights may differ from the weights of the model."""

    watch: Watch | None = None  # called with this rank's progress
    published: Sequence[Published] | None = None  # the published layout, in which the files may store the weights
    may_grow: Sequence[str] = ()  # weights that may have fewer rows in the files; the missing rows are drawn
    seed: int = 0  # seed of the drawn rows
    names: StoredNames = field(default_factory=StoredNames)  # other names that the files may use for the weights
    inform: Callable[[str], None] | None = None  # rank 0 calls it with a line about stored tensors that are ignored


def load_weights(
    store: PartStore,
    directory: Path,
    tensors: Sequence[tuple[str, Shape]],
    tied: Mapping[str, str],
    ranks: RankGroup,
    options: LoadOptions = LoadOptions(),
) -> int:
    """Load the weights of `store` from the safetensors in `directory`, which may have any float dtype. Collective.

    Args:
        tensors: names and shapes of the whole model, without the aliases of tied weights.
        tied: alias -> name in `tensors`, for tied weights. The files may have the weight under either name, or both.

    Returns the number of bytes that this rank read. Raises UserError on every rank if safetensors are missing or
    malformed, if the tensors do not fit the model, or if a value is not finite.
    """
    published, names = options.published, options.names

    def read() -> int:
        stored = ByteMap.from_directory(directory).entries
        expected, target = tensors, store
        if published is not None and _is_published(stored, published, names):
            expected, target = tensors_of(published), PublishedParts(store, published)
        shapes = dict(expected)
        matched = names.matched(stored, [*shapes, *tied])
        packed = packed_weights(stored, matched, shapes, directory)
        matched = {name: entry for name, entry in matched.items() if name not in packed}
        used = {entry.name for entry in matched.values()}
        used |= {entry.name for weight in packed.values() for entry in weight.entries}
        unused = [name for name, entry in stored.items() if name not in used and not is_computed(name, entry)]
        extra = names.unknown(unused, stored)
        if options.inform is not None and ranks.rank == 0 and (ignored := sorted(set(unused) - set(extra))):
            options.inform(
                f"{directory}: {len(ignored)} tensors that transformers does not load are left out,"
                f" {ignored[0]} for one"
            )
        _check_tied(matched, tied, directory, ranks)
        aliases = {tied[alias]: matched[alias] for alias in tied if alias in matched}
        entries = {name: entry for name, entry in (aliases | matched).items() if name in shapes}
        grown.update(
            (name, entry) for name, entry in entries.items() if name in options.may_grow and _grows(entry, shapes[name])
        )
        stored_shapes = [
            (name, grown[name].shape if name in grown else shape) for name, shape in expected if name not in packed
        ]
        check_tensors(stored_shapes, entries, directory, extra)
        packed_bytes = fill_packed(target, packed, _check_finite)
        if grown or packed:  # load into the old rows only; _add_rows fills the new rows
            target = PublishedParts(target, [Published(name, shape, name, 0) for name, shape in stored_shapes])
        return packed_bytes + fill(target, {"weight": entries}, watch=options.watch, check=_check_finite)

    grown: dict[str, TensorEntry] = {}
    read_bytes = gather_results(ranks, read)[ranks.rank]
    _add_rows(store, grown, dict(tensors), options.seed, ranks)
    return read_bytes


def load_adapter(
    store: PartStore, directory: Path, saves: Sequence[Published], base_fingerprint: str | None, ranks: RankGroup
) -> None:
    """Load the weights of an adapter from peft's files, an export or a checkpoint in `directory`. Collective.

    Args:
        saves: the tensors of the adapter, with their names in peft's files.
        base_fingerprint: fingerprint of the base model of this run. A checkpoint must have the same fingerprint.

    Raises UserError on every rank if the files do not exist, if the tensors do not fit the adapter, or if a checkpoint
    has the adapter of a different base model.
    """

    def read() -> None:
        is_checkpoint = (directory / STATE).is_file()
        stored = ByteMap.from_directory(directory, "model" if is_checkpoint else STEM).entries
        if is_checkpoint and read_state(directory)["determinants"].get(BASE) != base_fingerprint:
            raise WeightsFileError("this adapter was trained on another model than model.path", directory)
        expected = [(tensor.source if is_checkpoint else tensor.name, tensor.shape) for tensor in saves]
        names = {name for name, _ in expected}
        known = {name: stored[name] for name in names & stored.keys()}
        check_tensors(expected, known, directory, sorted(stored.keys() - names))
        fill(store if is_checkpoint else PublishedParts(store, saves), {"weight": stored}, check=_check_finite)

    gather_results(ranks, read)


def _check_finite(entry: TensorEntry, start: int, values: Tensor) -> None:
    """Raise UserError for an infinity or a NaN, which would make every loss infinite or NaN."""
    if bool(values.sum(dtype=torch.float32).isfinite()):  # fast check; a sum of finite values may still overflow
        return
    if (odd := values.isfinite().logical_not()).any():
        at = int(odd.nonzero()[0])
        place = [int(index) for index in np.unravel_index(start + at, entry.shape)] if entry.shape else []
        raise WeightsFileError(
            f"the weight {entry.name} is {float(values[at])} at {place}: no setting can train such a model. Take other"
            " weights; a merge, or a conversion to a smaller dtype, may have damaged these",
            entry.file,
        )


def _check_tied(stored: Mapping[str, TensorEntry], tied: Mapping[str, str], directory: Path, ranks: RankGroup) -> None:
    """Raise UserError if the files store a tied weight under both names with different values.

    Each rank compares its share of the bytes.
    """
    for alias, name in tied.items():
        first, second = stored.get(alias), stored.get(name)
        if first is None or second is None or first.dtype != second.dtype:
            continue
        length = first.numel * first.itemsize
        at, stop = (length * number // ranks.world_size for number in (ranks.rank, ranks.rank + 1))
        with open_regular(first.file) as file, open_regular(second.file) as second_file:
            file.seek(first.offset + at)
            second_file.seek(second.offset + at)
            is_same = first.shape == second.shape
            while is_same and at < stop:
                count = min(_COMPARED_BYTES, stop - at)
                is_same = file.read(count) == second_file.read(count)
                at += count
        if not is_same:
            raise WeightsFileError(
                f"{alias} and {name} differ, but config.json ties them: set tie_word_embeddings to false there",
                directory,
            )


def _grows(stored: TensorEntry, shape: Shape) -> bool:
    old = stored.shape
    return len(old) == len(shape) > 0 and 0 < old[0] < shape[0] and old[1:] == shape[1:]


def _is_published(stored: Mapping[str, TensorEntry], published: Sequence[Published], names: StoredNames) -> bool:
    pairs = [(tensor.name, tensor.source) for tensor in published]
    return bool(names.matched(stored, [name for name, to in pairs if names.model_name(name) != names.model_name(to)]))


def _add_rows(
    store: PartStore,
    grown: Mapping[str, TensorEntry],
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    ranks: RankGroup,
) -> None:
    """Draw and write the rows that `grown` tensors lack in the files. Collective.

    The entries of `grown` have the old shapes, `shapes` has the new ones.
    """
    for name, entry in grown.items():
        for first in range(entry.shape[0], shapes[name][0], _AT_ONCE):
            rows = new_rows(entry, f"{seed}:{name}:{first}", min(_AT_ONCE, shapes[name][0] - first), ranks)
            begin = first * (entry.numel // entry.shape[0])
            for part in store.parts():
                start, stop = max(begin, part.start), min(begin + rows.numel(), part.stop)
                if part.kind == "weight" and part.name == name and start < stop:
                    store.write(part, start, rows.flatten()[start - begin : stop - begin])


def new_rows(entry: TensorEntry, drawn_from: str, count: int, ranks: RankGroup) -> Tensor:
    """Draw `count` new rows for the stored tensor `entry`, fp32 [count, width]. Collective. Raises UserError.

    All ranks return the same rows.
    """
    rows, width = entry.shape[0], entry.numel // entry.shape[0]
    edges = [rows * chunk // _CHUNKS for chunk in range(_CHUNKS + 1)]
    rank_chunks = range(ranks.rank, _CHUNKS, ranks.world_size)

    def sums() -> list[str]:
        totals = [
            _sums(entry, width, edges[chunk], edges[chunk + 1], f"{drawn_from}:{chunk}", count) for chunk in rank_chunks
        ]
        return [base64.b64encode(total.numpy().tobytes()).decode() for total in totals]

    gathered = gather_results(ranks, sums)
    total = torch.zeros(count + 1, width + 1, dtype=torch.float64)
    for chunk in range(_CHUNKS):  # always in this order, so that rounding does not depend on the world size
        data = base64.b64decode(gathered[chunk % ranks.world_size][chunk // ranks.world_size])
        total += torch.frombuffer(bytearray(data), dtype=torch.float64).view(count + 1, width + 1)
    mean, weighted, weights = total[-1, :-1] / rows, total[:-1, :-1], total[:-1, -1:]
    return (mean + math.sqrt(_COVARIANCE_SCALE / rows) * (weighted - weights * mean)).float()


def _sums(entry: TensorEntry, width: int, start: int, stop: int, drawn_from: str, count: int) -> Tensor:
    """Sum the old rows [start, stop) for `count` new rows; return fp64 [count + 1, width + 1].

    In the sum of a new row each old row is multiplied by a random number from N(0, 1). The last row of the result is
    the plain sum of the old rows. The last column is the sum of the multipliers.
    """
    seed = int.from_bytes(hashlib.sha256(drawn_from.encode()).digest()[:8], "little")
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(count + 1, width + 1, dtype=torch.float64)
    step = max(1, _BLOCK_NUMEL // width)
    with one_thread(), RangeReader() as reader:  # the last digits of a product depend on the number of threads
        for first in range(start, stop, step):
            number = min(step, stop - first)
            stored = torch.empty(number * width)
            reader.read(entry, first * width, stored)
            values = torch.cat([stored.view(number, width).double(), torch.ones(number, 1).double()], dim=1)
            drawn = torch.randn(number, count, generator=generator, dtype=torch.float64)
            total[:-1] += drawn.T @ values
            total[-1] += values.sum(0)
    return total
