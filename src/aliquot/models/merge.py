"""A model as an adapter changes it: each adapted weight and the product of the two matrices beside it, in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aliquot.config.adapter_section import ADAPTER_CONFIG
from aliquot.core.errors import ModelFilesError, WeightsFileError
from aliquot.models.model_files import with_ends
from aliquot.models.model_identity import fingerprint
from aliquot.models.source import HUB_FILES, local_directory, model_on_meta
from aliquot.models.stored_weights import StoredNames, StoredWeights, in_order
from aliquot.models.structure import kept_in_fp32
from aliquot.tensor_io.bytemap import ByteMap
from aliquot.tensor_io.jsonfile import parse_json, read_small
from aliquot.tensor_io.parts import Part
from aliquot.tensor_io.range_io import RangeReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


class MergedWeights:
    """As the model's own files name and cut them."""

    def __init__(
        self, adapter: StoredWeights, settings: bytes, reader: RangeReader, base: str | None, beside: object
    ) -> None:
        """`settings`: peft's, as JSON. `reader`: of the model's files. `base`: where they are, if not where they were.
        `beside`: their fingerprint. Raises UserError where those do not belong."""
        fields = parse_json(settings, ADAPTER_CONFIG)
        named = base or str(fields["base_model_name_or_path"])
        try:
            self._directory = local_directory(named, HUB_FILES)
        except ModelFilesError as error:
            raise ModelFilesError(f"the model that the adapter is for: {error}; --base names another place") from None
        if fingerprint(self._directory) != beside:
            raise WeightsFileError("not the weights beside which the adapter was learned", self._directory)
        source = ByteMap.of_directory(self._directory)
        self._base = StoredWeights(source, reader)
        self.tensors = in_order(source)
        rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
        self._scaling = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}  # [rows, r] and [r, columns]
        parts = {part.name: part for part in adapter.parts()}
        for name in parts:
            if name.endswith(_A):
                module = name.removesuffix(_A)
                a, b = (_whole(adapter, parts[module + end]) for end in (_A, _B))
                self._factors[self._name_of(module)] = (a.t(), b.t()) if fields.get("fan_in_fan_out") else (b, a)

    def files(self, of_adapter: Mapping[str, bytes]) -> dict[str, bytes]:
        """What lies beside them: the model's configurations, and what the adapter was learned with about text."""
        own = [name for name in ("config.json", "generation_config.json") if (self._directory / name).is_file()]
        about_text = {name: data for name, data in of_adapter.items() if name != ADAPTER_CONFIG}
        return with_ends(about_text | {name: read_small(self._directory / name) for name in own})

    def parts(self) -> Sequence[Part]:
        return self._base.parts()

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._base.read(part, start, out)
        if part.name not in self._factors:
            return
        left, right = self._factors[part.name]
        columns = right.shape[1]
        first, last = start // columns, -(-(start + out.numel()) // columns)
        change = (left[first:last] @ right).mul_(self._scaling)
        out += change.view(-1)[start - first * columns :][: out.numel()]

    @cached_property
    def exact(self) -> frozenset[str]:
        """Names of what transformers keeps in fp32, as the files have them."""
        kept = sorted(kept_in_fp32(self._model))
        return frozenset(entry.name for entry in self._names.matched(self._base.entries, kept).values())

    @cached_property
    def _names(self) -> StoredNames:
        return StoredNames.of_model(self._model)

    @cached_property
    def _model(self) -> PreTrainedModel:
        return model_on_meta(self._directory)

    def _name_of(self, module: str) -> str:
        """Of an adapted weight, in the model's files."""
        name = f"{module}.weight"
        if (found := self._names.matched(self._base.entries, [name]).get(name)) is None:
            raise WeightsFileError(f"no {name} here, which the adapter is for", self._directory)
        return found.name


def _whole(store: StoredWeights, part: Part) -> Tensor:
    out = torch.empty(part.numel)
    store.read(part, 0, out)
    return out.view(part.shape)
