"""Fill the weights of a model from a Hugging Face directory: every rank reads exactly the bytes of its own parts."""

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
        watch: told of this rank's progress.
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
        stored = ByteMap.of_directory(directory).entries
        wanted, filled = tensors, store
        if published is not None and _is_published(stored, published, names):
            wanted, filled = tensors_of(published), PublishedStore(store, published)
        shapes = dict(wanted)
        matched = names.matched(stored, [*shapes, *tied])
        used = {entry.name for entry in matched.values()}
        others = [name for name, entry in stored.items() if name not in used and not is_computed(name, entry)]
        extra = [name for name in others if not names.passes_over(name)]
        if options.tell is not None and ranks.rank == 0 and (left := sorted(set(others) - set(extra))):
            options.tell(
                f"{directory}: {len(left)} tensors that transformers does not load are left out, {left[0]} for one"
            )
        _check_tied(matched, tied, directory, ranks)
        instead = {tied[alias]: matched[alias] for alias in tied if alias in matched}
        found = {name: entry for name, entry in (instead | matched).items() if name in shapes}
        short = {
            name: found[name] for name in options.may_grow if name in found and _grows(found[name].shape, shapes[name])
        }
        grown.update(short)
        check_tensors(
            [(name, short[name].shape if name in short else shape) for name, shape in wanted], found, directory, extra
        )
        target = OldRows(filled, found) if short else filled
        return fill(target, {"weight": found}, watch=options.watch, check=_check_finite)

    grown: dict[str, TensorEntry] = {}
    read_bytes = gather_results(ranks, read)[ranks.rank]
    add_rows(store, grown, dict(tensors), options.seed, ranks)
    return read_bytes


def load_adapter(
    store: PartStore, directory: Path, saves: Sequence[Published], beside: str | None, ranks: RankGroup
) -> None:
    """Fill the weights of `store`, which are those of an adapter alone, from peft's files, an export or a checkpoint in
    `directory`. Collective.

    `saves`: how peft names them; `beside`: the fingerprint of the model, which a checkpoint knows. Raises UserError on
    every rank: no such files, tensors missing, extra or of another shape, learned beside another model.
    """

    def read() -> None:
        of_checkpoint = (directory / STATE).is_file()
        stored = ByteMap.of_directory(directory, "model" if of_checkpoint else STEM).entries
        if of_checkpoint and read_json(directory / STATE)["determinants"].get(BASE) != beside:
            raise WeightsFileError("this adapter was learned beside another model than model.path", directory)
        wanted = [(each.source if of_checkpoint else each.name, each.shape) for each in saves]
        names = {name for name, _ in wanted}
        check_tensors(
            wanted, {name: stored[name] for name in names & stored.keys()}, directory, sorted(stored.keys() - names)
        )
        target = store if of_checkpoint else PublishedStore(store, saves)
        fill(target, {"weight": stored}, check=_check_finite)

    gather_results(ranks, read)


def _check_finite(entry: TensorEntry, start: int, values: Tensor) -> None:
    """Raises UserError for an infinity or a NaN: every loss of such a model is one, whatever the settings."""
    if bool(values.sum(dtype=torch.float32).isfinite()):  # one pass; a sum may overflow where no value has
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
    """Every rank its share: that weights which are one here are the same where the files hold both."""
    for alias, name in tied.items():
        one, other = stored.get(alias), stored.get(name)
        if one is None or other is None or one.dtype != other.dtype:
            continue
        length = one.numel * one.itemsize
        at, stop = (length * number // ranks.world_size for number in (ranks.rank, ranks.rank + 1))
        with one.file.open("rb") as ours, other.file.open("rb") as theirs:
            ours.seek(one.offset + at)
            theirs.seek(other.offset + at)
            same = one.shape == other.shape
            while same and at < stop:
                count = min(_COMPARED_BYTES, stop - at)
                same = ours.read(count) == theirs.read(count)
                at += count
        if not same:
            raise WeightsFileError(
                f"{alias} and {name} differ, and are one by config.json: set tie_word_embeddings to false there",
                directory,
            )


def _grows(stored: Shape, wanted: Shape) -> bool:
    return len(stored) == len(wanted) > 0 and 0 < stored[0] < wanted[0] and stored[1:] == wanted[1:]


def _is_published(stored: Mapping[str, TensorEntry], published: Sequence[Published], names: StoredNames) -> bool:
    others = [each.name for each in published if names.as_held(each.name) != names.as_held(each.source)]
    return bool(names.matched(stored, others))
