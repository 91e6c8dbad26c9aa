"""Weights as files store them: under which names, their values as parts, and a fingerprint of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from aliquot.core.errors import UserError
from aliquot.core.on_rank_0 import RankGroup, SingleRank
from aliquot.tensor_io.bytemap import ByteMap, Shape
from aliquot.tensor_io.header import TensorEntry, read_header
from aliquot.tensor_io.parts import Part, row_ranges
from aliquot.tensor_io.range_io import RangeReader

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.core_model_loading import WeightRenaming

# Buffers that older versions of transformers saved and that models compute today.
_COMPUTED = re.compile(
    r"(.*\.)?((rotary_emb|maybe_rotary)\.(inv_freq|cos_cached|sin_cached)|position_ids|embed_positions\.weights"
    r"|attn\.(bias|masked_bias|causal_mask))"
)
_MASK = re.compile(r".*\.attention\.(bias|masked_bias)")  # other models have trained biases of this name
_SAMPLE_BYTES = 4096
_EVERY_BYTES = 4 << 20  # distance of samples: an interrupted copy lacks more
_OTHER_FORMS = "consolidated*.safetensors"  # the same weights in a format for other programs


@dataclass(frozen=True)
class StoredNames:
    """Names that files may use for the weights of a model: its own, those of its base model, or older ones.

    Args:
        passed_over: patterns of stored names that the model lacks: layers that predict several tokens (DeepSeek-V3,
            GLM-4.5), masks and positions that are computed today (Pythia).
        renamings: renamings by transformers.
        base: prefix of the names of the base model.
    """

    passed_over: tuple[str, ...] = ()
    renamings: tuple[WeightRenaming, ...] = ()
    base: str = ""

    @classmethod
    def from_model(cls, model: nn.Module) -> StoredNames:
        """Each class says it of itself for `from_pretrained`, which has no other name for it either."""
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        if not isinstance(model, PreTrainedModel):
            return cls()
        passed_over = sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        renamings = [
            conversion for conversion in get_model_conversion_mapping(model) if isinstance(conversion, WeightRenaming)
        ]
        return cls(tuple(passed_over), tuple(renamings), model.base_model_prefix)

    def passes_over(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.passed_over)

    def matched(self, stored: Mapping[str, TensorEntry], names: Sequence[str]) -> dict[str, TensorEntry]:
        """Return the stored tensor of each of `names`; names without a stored tensor are left out."""
        entries = {}
        for name in names:
            match = next((candidate for candidate in (name, name.partition(".")[2]) if candidate in stored), None)
            if match is not None:
                entries[name] = stored[match]
        if absent := [name for name in names if name not in entries]:
            used = {entry.name for entry in entries.values()}
            entries |= self._renamed({name: entry for name, entry in stored.items() if name not in used}, absent)
        return entries

    def _renamed(self, stored: Mapping[str, TensorEntry], names: Sequence[str]) -> dict[str, TensorEntry]:
        """Return stored tensors whose renamed name equals a renamed name of `names`, if there is exactly one."""
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
        """Return the name that transformers gives to a stored name, apart from merges into other tensors."""
        from transformers.core_model_loading import apply_renamings

        renamed: str = apply_renamings(name, list(self.renamings))
        return renamed


def is_computed(name: str, entry: TensorEntry) -> bool:
    """Return whether models compute a stored tensor today."""
    return bool(_COMPUTED.fullmatch(name) or (_MASK.fullmatch(name) and len(entry.shape) in (0, 4)))


class StoredWeights:
    """The weights in files as parts: of each tensor the rows of this rank."""

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
    """Return names and shapes in the order of the files."""
    return [(entry.name, entry.shape) for entry in sorted(source.entries.values(), key=_position)]


def _position(entry: TensorEntry) -> tuple[Path, int, int]:
    return entry.file, entry.offset, entry.numel


def fingerprint(directory: Path) -> str:
    """Hash samples of the weights: sizes, headers, the beginning of each tensor, and 4 KiB of each 4 MiB.

    Raises OSError.
    """
    total = hashlib.sha256()
    for path in sorted(set(directory.glob("*.safetensors")) - set(directory.glob(_OTHER_FORMS))):
        total.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            for at in sorted({*range(0, path.stat().st_size, _EVERY_BYTES), *_places(path)}):
                file.seek(at)
                total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()[:16]


def _places(path: Path) -> Iterator[int]:
    """Yield the offsets of tensors and of pieces of the header; nothing for a file whose loading will fail."""
    with suppress(UserError):
        header = read_header(path)
        yield from range(0, header.header_bytes, _SAMPLE_BYTES)
        yield from (entry.offset for entry in header.entries.values())
