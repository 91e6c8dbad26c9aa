"""Weights in files: map the names and the layout of stored tensors to the weights of a model, and fingerprint files.

The files of some models use other names than the model in memory, or one tensor per expert where the model has one
weight for all experts. The layout of such files is called the published layout. transformers defines it by a weight
conversion, which `save_pretrained` reverts. To learn which elements go where, the reverse conversion runs on small
tensors of consecutive numbers. If a published tensor is not one contiguous range of one weight, aliquot stores the
layout of the model in memory instead.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from aliquot.core.errors import UserError
from aliquot.core.on_rank_0 import RankGroup, SingleRank
from aliquot.core.small_files import open_regular
from aliquot.tensor_io.bytemap import ByteMap, Shape
from aliquot.tensor_io.header import TensorEntry, read_header
from aliquot.tensor_io.parts import Part, PartSource, PartStore, ViewableStore, row_ranges
from aliquot.tensor_io.range_io import RangeReader

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightRenaming

_log = logging.getLogger(__name__)

# Buffers that old versions of transformers saved and that current models compute.
_COMPUTED = re.compile(
    r"(.*\.)?((rotary_emb|maybe_rotary)\.(inv_freq|cos_cached|sin_cached)|position_ids|embed_positions\.weights"
    r"|attn\.(bias|masked_bias|causal_mask))"
)
# The text model in a model for images or sound: `model.language_model.layers`, `language_model.model.layers`.
_TEXT_PART = re.compile(r"^(model\.)?(?:language_model|text_model)\.(model\.)?")
_MASK = re.compile(r".*\.attention\.(bias|masked_bias)")  # some models have trained biases with these names
_SAMPLE_BYTES = 4096
_EVERY_BYTES = 4 << 20  # distance between samples; an interrupted copy misses more bytes than this
_OTHER_FORMS = "consolidated*.safetensors"  # the same weights in a format for other programs
_SMALL = (4, 2)  # small sizes for a matrix: different, so that a transposition shows, and even, to be halved


@dataclass(frozen=True)
class StoredNames:
    """The names under which files may store the weights of a model.

    Files may use the model's names, the names of the base model without output head, older names that transformers
    renames, or the names of a larger model for images or sound in which this model reads the text.
    """

    # Patterns of stored names to ignore: layers for multi-token prediction (DeepSeek-V3, GLM-4.5), and masks and
    # positions that current versions of transformers compute (Pythia).
    ignored: tuple[str, ...] = ()
    renamings: tuple[WeightRenaming, ...] = ()  # transformers' renamings of stored names
    base: str = ""  # prefix of the base model's names, such as `model`

    @classmethod
    def from_model(cls, model: nn.Module) -> StoredNames:
        """Return the names that the class of `model` declares for `from_pretrained` of transformers."""
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        if not isinstance(model, PreTrainedModel):
            return cls()
        ignored = sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        conversions = get_model_conversion_mapping(model)
        renamings = tuple(one for one in conversions if isinstance(one, WeightRenaming))
        return cls(tuple(ignored), renamings, model.base_model_prefix)

    def unknown(self, unused: Sequence[str], stored: Iterable[str]) -> list[str]:
        """Return the names in `unused` that no model with this one's weights declares, out of all names in `stored`.

        If the files contain the text model of a larger model, the other parts of the larger model are not unknown.
        """
        is_part = any(_TEXT_PART.match(name) for name in stored)
        named = [name for name in unused if not is_part or _TEXT_PART.match(name)]
        return [name for name in named if not any(re.search(pattern, name) for pattern in self.ignored)]

    def matched(self, stored: Mapping[str, TensorEntry], names: Sequence[str]) -> dict[str, TensorEntry]:
        """Return the stored tensor for each weight in `names`; weights without a stored tensor are omitted."""
        stored_names = {name: name if name in stored else name.partition(".")[2] for name in names}
        entries = {name: stored[stored_name] for name, stored_name in stored_names.items() if stored_name in stored}
        if absent := [name for name in names if name not in entries]:
            used = {entry.name for entry in entries.values()}
            entries |= self._renamed({name: entry for name, entry in stored.items() if name not in used}, absent)
        return entries

    def _renamed(self, stored: Mapping[str, TensorEntry], names: Sequence[str]) -> dict[str, TensorEntry]:
        """Match stored tensors to weights by the names that transformers' renamings give to both.

        A weight that matches several stored tensors is omitted.
        """
        renamed_names = {self.model_name(name): name for name in names}
        candidates: dict[str, list[TensorEntry]] = {}
        for stored_name, entry in stored.items():
            model_name = self.model_name(stored_name)
            variants = (model_name, model_name.removeprefix(f"{self.base}."), f"{self.base}.{model_name}")
            name = next((renamed_names[variant] for variant in variants if variant in renamed_names), None)
            if name is not None:
                candidates.setdefault(name, []).append(entry)
        return {name: entries[0] for name, entries in candidates.items() if len(entries) == 1}

    def model_name(self, name: str) -> str:
        """Strip the name of a text part and apply transformers' renamings to a stored name, without merging tensors."""
        from transformers.core_model_loading import apply_renamings

        text_name = _TEXT_PART.sub(lambda match: match[1] or match[2] or "", name, count=1)
        return cast(str, apply_renamings(text_name, list(self.renamings)))


def is_computed(name: str, entry: TensorEntry) -> bool:
    """Return whether a stored tensor is a buffer that current models compute instead of loading."""
    return bool(_COMPUTED.fullmatch(name) or (_MASK.fullmatch(name) and len(entry.shape) in (0, 4)))


class StoredWeights:
    """A source of weights that reads files: its parts are this rank's rows of each stored tensor."""

    def __init__(self, source: ByteMap, reader: RangeReader, ranks: RankGroup = SingleRank()) -> None:  # noqa: B008 (it holds nothing)
        self.entries = source.entries
        self._reader = reader
        self._ranks = ranks

    def parts(self) -> Sequence[Part]:
        every = [
            Part(entry.name, entry.shape, "weight", *row_ranges(entry.shape, self._ranks.world_size)[self._ranks.rank])
            for entry in self.entries.values()
        ]
        return [part for part in every if part.numel]

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._reader.read(self.entries[part.name], start, out)


def names_in_file_order(source: ByteMap) -> list[tuple[str, Shape]]:
    """Return the names and shapes of all tensors, in the order in which the files store them."""
    entries = sorted(source.entries.values(), key=lambda entry: (entry.file, entry.offset, entry.numel))
    return [(entry.name, entry.shape) for entry in entries]


@dataclass(frozen=True)
class Published:
    """A tensor as published files store it: elements [start, start + numel) of the model's weight `source`."""

    name: str
    shape: Shape
    source: str
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def published_of(model: nn.Module, tensors: Sequence[tuple[str, Shape]]) -> tuple[Published, ...] | None:
    """Return the published layout of a model's weights, in the order of `tensors`.

    None: the published layout equals the model's layout, or a published tensor is not a contiguous range of one weight.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return None
    numbers, places, end = {}, [], 0
    for name, shape in tensors:
        small = (shape[0], *_SMALL) if len(shape) == 3 else (*_SMALL, *[2] * len(shape))[: len(shape)]
        start, end = end, end + math.prod(small)
        numbers[name] = torch.arange(start, end).view(small)
        places.append((start, end, name, shape, small))
    try:
        converted: Mapping[str, Tensor] = revert_weight_conversion(model, numbers)
    except Exception as error:  # the conversion needs real weights
        _log.warning(
            "%s is stored as transformers holds it, not as it is published: its conversion fails on numbers (%s)",
            type(model).__name__,
            error,
        )
        return None
    if converted.keys() == numbers.keys() and all(converted[name].equal(numbers[name]) for name in numbers):
        return None
    layout = []
    for name, values in converted.items():
        flat = values.reshape(-1)
        first = int(flat[0])
        start, end, source, shape, small = next(place for place in places if place[0] <= first < place[1])
        whole = Fraction(math.prod(shape), math.prod(small))
        dimensions = _scaled(tuple(values.shape), shape, small)
        at = (first - start) * whole
        if not bool((flat.diff() == 1).all()) or int(flat[-1]) >= end or dimensions is None or at.denominator != 1:
            return None
        layout.append(Published(name, dimensions, source, int(at)))
    order = {name: number for number, (name, _) in enumerate(tensors)}
    layout.sort(key=lambda tensor: (order[tensor.source], tensor.start))
    is_complete = sum(tensor.stop - tensor.start for tensor in layout) == sum(math.prod(shape) for _, shape in tensors)
    return tuple(layout) if is_complete else None


def _scaled(converted: Shape, shape: Shape, small: Shape) -> Shape | None:
    """Return the shape of a converted tensor in the real model, from the shape of a small converted tensor.

    Args:
        converted: shape of the small tensor after the conversion, which may have removed leading dimensions.
        shape: shape of the real weight before the conversion.
        small: shape of the small tensor before the conversion.

    Returns None if the result is not a shape of integers.
    """
    missing = len(small) - len(converted)
    if missing < 0:
        return None
    scaled = [Fraction(f * of, s) for f, of, s in zip(converted, shape[missing:], small[missing:], strict=True)]
    return tuple(map(int, scaled)) if all(size.denominator == 1 for size in scaled) else None


def tensors_of(published: Sequence[Published]) -> list[tuple[str, Shape]]:
    """Return the names and shapes of published tensors."""
    return [(tensor.name, tensor.shape) for tensor in published]


class PublishedParts:
    """A view of a store that presents its weights as parts of published tensors."""

    def __init__(self, store: PartSource, published: Sequence[Published]) -> None:
        self._store = store
        tensors_of_source: dict[str, list[Published]] = {}
        for tensor in published:
            tensors_of_source.setdefault(tensor.source, []).append(tensor)
        # Part of a published tensor -> the part of the store that contains it, and the tensor's start in the weight.
        self._held: dict[Part, tuple[Part, int]] = {}
        for held in store.parts():
            for tensor in tensors_of_source.get(held.name, ()) if held.kind == "weight" else ():
                start, stop = max(held.start, tensor.start), min(held.stop, tensor.stop)
                if start < stop:
                    part = Part(tensor.name, tensor.shape, held.kind, start - tensor.start, stop - tensor.start)
                    self._held[part] = (held, tensor.start)

    def parts(self) -> Sequence[Part]:
        return list(self._held)

    def read(self, part: Part, start: int, out: Tensor) -> None:
        held, shift = self._held[part]
        self._store.read(held, start + shift, out)

    def write(self, part: Part, start: int, values: Tensor) -> None:
        held, shift = self._held[part]
        cast(PartStore, self._store).write(held, start + shift, values)

    def view(self, part: Part) -> Tensor | None:
        held, shift = self._held[part]
        whole = self._store.view(held) if isinstance(self._store, ViewableStore) else None
        return None if whole is None else whole[part.start + shift - held.start :][: part.numel]


def fingerprint(directory: Path) -> str:
    """Hash samples of the safetensors in a directory, to recognise the same weights quickly. Raises OSError.

    The samples are the sizes and headers of the files, the first 4 KiB of each tensor, and 4 KiB of every 4 MiB.
    """
    total = hashlib.sha256()
    for path in sorted(set(directory.glob("*.safetensors")) - set(directory.glob(_OTHER_FORMS))):
        total.update(f"{path.name} {path.stat().st_size} ".encode())
        with open_regular(path) as file:
            for at in sorted({*range(0, path.stat().st_size, _EVERY_BYTES), *_places(path)}):
                file.seek(at)
                total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()[:16]


def _places(path: Path) -> Iterator[int]:
    """Yield offsets to sample: of each tensor, and of each 4 KiB of the header; nothing for a malformed file."""
    with suppress(UserError):
        header = read_header(path)
        yield from range(0, header.header_bytes, _SAMPLE_BYTES)
        yield from (entry.offset for entry in header.entries.values())
