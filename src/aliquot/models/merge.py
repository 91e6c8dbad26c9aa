"""Merge an adapter into its base model: to each adapted weight the product of two matrices is added, in fp32."""

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
from aliquot.models.stored_weights import StoredNames, StoredWeights, names_in_file_order
from aliquot.models.structure import fp32_weights
from aliquot.tensor_io.bytemap import ByteMap
from aliquot.tensor_io.jsonfile import parse_json, read_small
from aliquot.tensor_io.parts import Part
from aliquot.tensor_io.range_io import RangeReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


class MergedWeights:
    """Weights of the base model with the adapter merged in, by the names and shapes of the model's files."""

    def __init__(
        self, adapter: StoredWeights, settings: bytes, reader: RangeReader, base: str | None, base_fingerprint: object
    ) -> None:
        """Open the base model.

        Args:
            settings: peft's configuration, as JSON.
            reader: reads the files of the base model.
            base: the directory of the base model, if it has moved.
            base_fingerprint: fingerprint of the base model in training. Raises UserError for another model.
        """
        fields = parse_json(settings, ADAPTER_CONFIG)
        named = base or str(fields["base_model_name_or_path"])
        try:
            self._directory = local_directory(named, HUB_FILES)
        except ModelFilesError as error:
            raise ModelFilesError(f"the model that the adapter is for: {error}; --base names another place") from None
        if fingerprint(self._directory) != base_fingerprint:
            raise WeightsFileError("not the base weights that the adapter was trained on", self._directory)
        source = ByteMap.from_directory(self._directory)
        self._base = StoredWeights(source, reader)
        self.tensors = names_in_file_order(source)
        rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
        self._scaling = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}  # [rows, r] and [r, columns]
        parts = {part.name: part for part in adapter.parts()}
        for name in parts:
            if name.endswith(_A):
                module = name.removesuffix(_A)
                a, b = (_whole(adapter, parts[module + end]) for end in (_A, _B))
                self._factors[self._stored_name(module)] = (a.t(), b.t()) if fields.get("fan_in_fan_out") else (b, a)

    def files(self, adapter_files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the configurations of the base model and the tokenizer files of the adapter."""
        config_names = [
            name for name in ("config.json", "generation_config.json") if (self._directory / name).is_file()
        ]
        text_files = {name: data for name, data in adapter_files.items() if name != ADAPTER_CONFIG}
        return with_ends(text_files | {name: read_small(self._directory / name) for name in config_names})

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
        """Names of weights that transformers keeps in fp32, as in the files."""
        names = sorted(fp32_weights(self._model))
        return frozenset(entry.name for entry in self._names.matched(self._base.entries, names).values())

    @cached_property
    def _names(self) -> StoredNames:
        return StoredNames.from_model(self._model)

    @cached_property
    def _model(self) -> PreTrainedModel:
        return model_on_meta(self._directory)

    def _stored_name(self, module: str) -> str:
        """Return the name of an adapted weight in the files of the base model."""
        name = f"{module}.weight"
        if (entry := self._names.matched(self._base.entries, [name]).get(name)) is None:
            raise WeightsFileError(f"no {name} here, which the adapter is for", self._directory)
        return entry.name


def _whole(store: StoredWeights, part: Part) -> Tensor:
    out = torch.empty(part.numel)
    store.read(part, 0, out)
    return out.view(part.shape)
