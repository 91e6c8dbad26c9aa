"""What transformers saves of a model can be trained further, whatever its architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from aliquot.core.errors import WeightsFileError
from aliquot.core.on_rank_0 import SingleRank
from aliquot.models import meta
from aliquot.models.export import ExportOptions, export
from aliquot.models.load import LoadOptions, load_weights
from aliquot.models.stored_weights import published_of
from aliquot.tensor_io.parts import Part
from tests import plain
from tests.tools.architectures import small_config
from tests.tools.docs_models import exact_types

TYPES = exact_types()
MERGED = {"hrm_text", "inkling2_text"}  # a published tensor joins several weights: docs/reference/models.md


class Readable(plain.Whole):
    def read(self, part: Part, start: int, out: Tensor) -> None:
        out.copy_(self.view(part)[start:][: out.numel()])

    def view(self, part: Part) -> Tensor:
        return self.values[part.name].view(-1)


def stored_in(folder: Path) -> list[str]:
    return list(load_file(folder / "model.safetensors"))


@pytest.mark.long
@pytest.mark.parametrize("kind", TYPES)
def test_load_and_export_equal_transformers(kind: str, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_config(small_config(kind, False), dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    built = meta.build(small_config(kind, False))
    store, published = Readable(built.tensors), published_of(built.model, built.tensors)
    if kind in MERGED:
        with pytest.raises(WeightsFileError, match="tensors do not fit the model"):
            load_weights(
                store, tmp_path / "saved", built.tensors, built.tied, SingleRank(), LoadOptions(published=published)
            )
        return
    load_weights(store, tmp_path / "saved", built.tensors, built.tied, SingleRank(), LoadOptions(published=published))
    expected = model.state_dict()
    for name, shape in built.tensors:
        assert torch.equal(store.values[name].view(shape), expected[name].float()), name
    config = {"config.json": (tmp_path / "saved" / "config.json").read_bytes()}
    export(
        store, built.tensors, tmp_path / "out", torch.float32, config, SingleRank(), ExportOptions(published=published)
    )
    names = [{built.tied.get(name, name) for name in stored_in(tmp_path / folder)} for folder in ("saved", "out")]
    assert names[0] == names[1]
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[trouble] for trouble in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(values, expected[name].float()) for name, values in again.state_dict().items())
