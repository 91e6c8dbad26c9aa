"""Fill the weights of a model from a Hugging Face directory: each rank reads only the bytes of its own parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aliquot.core.errors import WeightsFileError
from aliquot.core.on_rank_0 import RankGroup, gather_results
from aliquot.models.adapter import BASE, STEM
from aliquot.models.added_rows import OldRows, add_rows
from aliquot.models.export import STATE
from aliquot.models.published import Published, PublishedStore, tensors_of
from aliquot.models.stored_weights import StoredNames, is_computed
from aliquot.tensor_io.bytemap import ByteMap, Shape, check_tensors
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.jsonfile import read_json
from aliquot.tensor_io.parts import PartStore
from aliquot.tensor_io.transfer import Watch, fill

_COMPARED_BYTES = 8 << 20


@dataclass(frozen=True)
class LoadOptions:
    """How the names, layout and rows of stored weights may differ from those of the model.

    Args:
        watch: called with this rank's progress.
        published: the layout of a published model, if it differs from the model's own; the files may have either.
        may_grow: tensors of which the files may have fewer rows; added_rows.py makes the others from `seed`.
        names: other names that the files may use, and names that loading passes over.
        tell: rank 0 says here which tensors loading passes over.
    """

    watch: Watch | None = None
    published: Sequence[Published] | None = None
    may_grow: Sequence[str] = ()
    seed: int = 0
    names: StoredNames = field(default_factory=StoredNames)
    tell: Callable[[str], None] | None = None


def load_weights(
    store: PartStore,
    directory: Path,
    tensors: Sequence[tuple[str, Shape]],
    tied: Mapping[str, str],
    ranks: RankGroup,
    options: LoadOptions = LoadOptions(),
) -> int:
    """Fill the weight parts of `store` from the safetensors in `directory`, whatever their float dtype. Collective.

    Args:
        tensors: names and shapes of the whole model, without aliases.
        tied: alias -> the name in `tensors` whose weight it shares; the directory may hold either or both.

    Returns:
        The bytes that this rank read.

    Raises:
        UserError: on every rank: no safetensors, malformed files, tensors that are missing, superfluous or of another
            shape, or values that are not finite.
    """
    published, names = options.published, options.names

    def read() -> int:
        stored = ByteMap.from_directory(directory).entries
        expected, target_store = tensors, store
        if published is not None and _is_published(stored, published, names):
            expected, target_store = tensors_of(published), PublishedStore(store, published)
        shapes = dict(expected)
        matched = names.matched(stored, [*shapes, *tied])
        used = {entry.name for entry in matched.values()}
        unused = [name for name, entry in stored.items() if name not in used and not is_computed(name, entry)]
        extra = [name for name in unused if not names.passes_over(name)]
        if options.tell is not None and ranks.rank == 0 and (passed_over := sorted(set(unused) - set(extra))):
            options.tell(
                f"{directory}: {len(passed_over)} tensors that transformers does not load are left out,"
                f" {passed_over[0]} for one"
            )
        _check_tied(matched, tied, directory, ranks)
        aliases = {tied[alias]: matched[alias] for alias in tied if alias in matched}
        entries = {name: entry for name, entry in (aliases | matched).items() if name in shapes}
        short = {
            name: entries[name]
            for name in options.may_grow
            if name in entries and _grows(entries[name].shape, shapes[name])
        }
        grown.update(short)
        check_tensors(
            [(name, short[name].shape if name in short else shape) for name, shape in expected],
            entries,
            directory,
            extra,
        )
        target = OldRows(target_store, entries) if short else target_store
        return fill(target, {"weight": entries}, watch=options.watch, check=_check_finite)

    grown: dict[str, TensorEntry] = {}
    read_bytes = gather_results(ranks, read)[ranks.rank]
    add_rows(store, grown, dict(tensors), options.seed, ranks)
    return read_bytes


def load_adapter(
    store: PartStore, directory: Path, saves: Sequence[Published], base_fingerprint: str | None, ranks: RankGroup
) -> None:
    """Fill the weights of an adapter from peft's files, an export or a checkpoint in `directory`. Collective.

    Args:
        saves: the weights as peft names them.
        base_fingerprint: the fingerprint of the base model, which a checkpoint states, too.

    Raises:
        UserError: on every rank: no such files, tensors that are missing, superfluous or of another shape, or an
            adapter that was trained on another base model.
    """

    def read() -> None:
        is_checkpoint = (directory / STATE).is_file()
        stored = ByteMap.from_directory(directory, "model" if is_checkpoint else STEM).entries
        if is_checkpoint and read_json(directory / STATE)["determinants"].get(BASE) != base_fingerprint:
            raise WeightsFileError("this adapter was trained on another model than model.path", directory)
        expected = [(tensor.source if is_checkpoint else tensor.name, tensor.shape) for tensor in saves]
        names = {name for name, _ in expected}
        check_tensors(
            expected, {name: stored[name] for name in names & stored.keys()}, directory, sorted(stored.keys() - names)
        )
        target = store if is_checkpoint else PublishedStore(store, saves)
        fill(target, {"weight": stored}, check=_check_finite)

    gather_results(ranks, read)


def _check_finite(entry: TensorEntry, start: int, values: Tensor) -> None:
    """Raise UserError for an infinity or a NaN, which would make every loss of the model one."""
    if bool(
        values.sum(dtype=torch.float32).isfinite()
    ):  # one pass; the sum may overflow although all values are finite
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
    """Check that tied weights are equal if the files hold both of them; each rank compares its share."""
    for alias, name in tied.items():
        first, second = stored.get(alias), stored.get(name)
        if first is None or second is None or first.dtype != second.dtype:
            continue
        length = first.numel * first.itemsize
        at, stop = (length * number // ranks.world_size for number in (ranks.rank, ranks.rank + 1))
        with first.file.open("rb") as file, second.file.open("rb") as second_file:
            file.seek(first.offset + at)
            second_file.seek(second.offset + at)
            is_same = first.shape == second.shape
            while is_same and at < stop:
                count = min(_COMPARED_BYTES, stop - at)
                is_same = file.read(count) == second_file.read(count)
                at += count
        if not is_same:
            raise WeightsFileError(
                f"{alias} and {name} differ, and are one by config.json: set tie_word_embeddings to false there",
                directory,
            )


def _grows(stored: Shape, shape: Shape) -> bool:
    return len(stored) == len(shape) > 0 and 0 < stored[0] < shape[0] and stored[1:] == shape[1:]


def _is_published(stored: Mapping[str, TensorEntry], published: Sequence[Published], names: StoredNames) -> bool:
    other_names = [
        tensor.name for tensor in published if names.model_name(tensor.name) != names.model_name(tensor.source)
    ]
    return bool(names.matched(stored, other_names))
