"""Weights as files store them: under which names, and their values as parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from aliquot.core.on_rank_0 import RankGroup, SingleRank
from aliquot.tensor_io.bytemap import ByteMap, Shape
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.parts import Part, row_ranges
from aliquot.tensor_io.range_io import RangeReader

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.core_model_loading import WeightRenaming

    from aliquot.tensor_io.header import TensorEntry


# buffers that older versions of transformers saved and that are computed, not learned
_COMPUTED = re.compile(
    r"(.*\.)?((rotary_emb|maybe_rotary)\.(inv_freq|cos_cached|sin_cached)|position_ids|embed_positions\.weights"
    r"|attn\.(bias|masked_bias|causal_mask))"
)
_MASK = re.compile(r".*\.attention\.(bias|masked_bias)")  # as a bias that is learned is called elsewhere


@dataclass(frozen=True)
class StoredNames:
    """What a model of transformers says of names in files.

    `passed_over`: patterns of names that published weights have and the model has not: layers that predict several
    tokens (DeepSeek-V3, GLM-4.5), masks and positions that are computed now (Pythia). `base`: what the names of its
    base model begin with.
    """

    passed_over: tuple[str, ...] = ()
    renamings: tuple[WeightRenaming, ...] = ()
    base: str = ""

    @classmethod
    def of_model(cls, model: nn.Module) -> StoredNames:
        """Each class says it of itself for `from_pretrained`, which has no other name for it either."""
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        if not isinstance(model, PreTrainedModel):
            return cls()
        passed_over = sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        return cls(tuple(passed_over), tuple(renamings), model.base_model_prefix)

    def passes_over(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.passed_over)

    def matched(self, stored: Mapping[str, TensorEntry], names: Sequence[str]) -> dict[str, TensorEntry]:
        """The stored tensor for each of `names`; a name that has none is left out."""
        found = {}
        for name in names:
            match = next((each for each in (name, name.partition(".")[2]) if each in stored), None)
            if match is not None:
                found[name] = stored[match]
        if absent := [name for name in names if name not in found]:
            used = {entry.name for entry in found.values()}
            found |= self._renamed({name: entry for name, entry in stored.items() if name not in used}, absent)
        return found

    def _renamed(self, stored: Mapping[str, TensorEntry], names: Sequence[str]) -> dict[str, TensorEntry]:
        """The stored tensor that is called like one of `names` when both are renamed, where there is just one."""
        called = {self.as_held(name): name for name in names}
        found: dict[str, list[TensorEntry]] = {}
        for stored_name, entry in stored.items():
            held = self.as_held(stored_name)
            variants = (held, held.removeprefix(f"{self.base}."), f"{self.base}.{held}")
            name = next((called[each] for each in variants if each in called), None)
            if name is not None:
                found.setdefault(name, []).append(entry)
        return {name: entries[0] for name, entries in found.items() if len(entries) == 1}

    def as_held(self, name: str) -> str:
        """What transformers makes of a name in files, but for what becomes part of another tensor."""
        from transformers.core_model_loading import apply_renamings

        renamed: str = apply_renamings(name, list(self.renamings))
        return renamed


def is_computed(name: str, entry: TensorEntry) -> bool:
    """Whether a model computes what is stored under that name."""
    return bool(_COMPUTED.fullmatch(name) or (_MASK.fullmatch(name) and len(entry.shape) in (0, 4)))


class StoredWeights:
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


def in_order(source: ByteMap) -> list[tuple[str, Shape]]:
    """Names and shapes, as they lie in the files."""
    return [(entry.name, entry.shape) for entry in sorted(source.entries.values(), key=_position)]


def _position(entry: TensorEntry) -> tuple[Path, int, int]:
    return entry.file, entry.offset, entry.numel
