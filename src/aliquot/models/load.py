"""Fill the weights of a model from a Hugging Face directory: every rank reads exactly the bytes of its own parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import nn

from aliquot.errors import WeightsFileError
from aliquot.models.adapter import BASE, STEM
from aliquot.models.added_rows import OldRows, add_rows
from aliquot.models.export import STATE
from aliquot.models.published import Published, PublishedStore, tensors_of
from aliquot.ranges.bytemap import ByteMap, Shape, check_tensors
from aliquot.ranges.header import TensorEntry
from aliquot.ranges.jsonfile import read_json
from aliquot.ranges.parts import PartStore
from aliquot.ranges.together import RankGroup, together
from aliquot.ranges.transfer import Watch, fill

# buffers that older versions of transformers saved and that are computed, not learned
_COMPUTED = re.compile(
    r"(.*\.)?((rotary_emb|maybe_rotary)\.(inv_freq|cos_cached|sin_cached)|position_ids|embed_positions\.weights"
    r"|attn\.(bias|masked_bias|causal_mask))"
)
_COMPARED_BYTES = 8 << 20
_MASK = re.compile(r".*\.attention\.(bias|masked_bias)")  # as a bias that is learned is called elsewhere


def load_weights(
    store: PartStore,
    directory: Path,
    tensors: Sequence[tuple[str, Shape]],
    tied: Mapping[str, str],
    ranks: RankGroup,
    watch: Watch | None = None,
    published: Sequence[Published] | None = None,
    may_grow: Sequence[str] = (),
    seed: int = 0,
    passed_over: Sequence[str] = (),
    tell: Callable[[str], None] | None = None,
) -> int:
    """Fill the weight parts of `store` from the safetensors in `directory`, whatever float dtype they have. Collective.

    `tensors`: names and shapes of the whole model without aliases. `tied`: alias -> the name in `tensors` whose weight
    it shares; the directory may hold either or both. Names may also be those of the bare base model (`layers.0` for
    `model.layers.0`), or all those of the `published` layout. Of the tensors that `may_grow` the directory may have
    fewer rows: the others are made of those (added_rows.py), from `seed`. What is stored beside them and has a name
    with one of the patterns `passed_over` is left alone, and rank 0 says so to `tell`. `watch` is told of this rank's
    progress. Returns the bytes that this rank read. Raises UserError on every rank: no safetensors, malformed files,
    tensors missing, extra or of another shape (names listed).
    """

    def read() -> int:
        stored = ByteMap.of_directory(directory).entries
        wanted, filled = tensors, store
        if published is not None and _is_published(stored, published):
            wanted, filled = tensors_of(published), PublishedStore(store, published)
        found = _matched(stored, wanted, tied)
        used = {entry.name for entry in found.values()}
        others = [
            name for name, entry in stored.items() if name not in used | tied.keys() and not _is_computed(name, entry)
        ]
        extra = [name for name in others if not any(re.search(pattern, name) for pattern in passed_over)]
        if tell is not None and ranks.rank == 0 and (left := sorted(set(others) - set(extra))):
            tell(f"{directory}: {len(left)} tensors that transformers does not load are left out, {left[0]} for one")
        _check_tied(stored, tied, directory, ranks)
        shapes = dict(wanted)
        short = {name: found[name] for name in may_grow if name in found and _grows(found[name].shape, shapes[name])}
        grown.update(short)
        check_tensors(
            [(name, short[name].shape if name in short else shape) for name, shape in wanted], found, directory, extra
        )
        return fill(OldRows(filled, found) if short else filled, {"weight": found}, watch=watch)

    grown: dict[str, TensorEntry] = {}
    read_bytes = together(ranks, read)[ranks.rank]
    add_rows(store, grown, dict(tensors), seed, ranks)
    return read_bytes


def passed_over_by(model: nn.Module) -> tuple[str, ...]:
    """Patterns of names that published weights of such a model have, and transformers' model has not: layers that
    predict several tokens (DeepSeek-V3, GLM-4.5), masks and positions that are computed now (Pythia).

    What each class of transformers says of itself for `from_pretrained`, which has no other name.
    """
    return tuple(sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))


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
        fill(store if of_checkpoint else PublishedStore(store, saves), {"weight": stored})

    together(ranks, read)


def _is_computed(name: str, entry: TensorEntry) -> bool:
    return bool(_COMPUTED.fullmatch(name) or (_MASK.fullmatch(name) and len(entry.shape) in (0, 4)))


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


def _is_published(stored: Mapping[str, TensorEntry], published: Sequence[Published]) -> bool:
    names = {each.name for each in published if each.name != each.source}
    return any(name in stored or name.partition(".")[2] in stored for name in names)


def _matched(
    stored: Mapping[str, TensorEntry], tensors: Sequence[tuple[str, Shape]], tied: Mapping[str, str]
) -> dict[str, TensorEntry]:
    """The stored tensor for each name of the model; a name that has none is left out."""
    found = {}
    for name, _ in tensors:
        aliases = [alias for alias, kept in tied.items() if kept == name]
        bare = name.partition(".")[2]
        match = next((candidate for candidate in (name, *aliases, bare) if candidate in stored), None)
        if match is not None:
            found[name] = stored[match]
    return found
