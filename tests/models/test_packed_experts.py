"""Experts in MXFP4 load as the values that transformers decodes, at any world size, and a run trains on them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from aliquot.core.errors import UserError
from aliquot.models.load import load_weights
from aliquot.models.narrow import narrow
from tests.runs import command, curve, trained, write_config
from tests.tensor_io.world import FakeStore, run_world

SHAPE = (5, 64, 48)  # experts, in, out


def packed(shape: tuple[int, int, int], seed: int) -> dict[str, Tensor]:
    """Random blocks and scales of a weight [experts, in, out]."""
    experts, columns, rows = shape
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(116, 124, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return {"_blocks": blocks, "_scales": scales}


def part_of(directory: Path, ranks: Any) -> list[tuple[int, list[float]]]:
    tensors = [("norm", (7,)), ("w", SHAPE)]
    store = FakeStore(tensors, ranks.rank, ranks.world_size, zeros=True)
    load_weights(store, directory, tensors, {}, ranks)
    return [
        (part.start, values.tolist())
        for part, values in store.values.items()
        if (part.kind, part.name) == ("weight", "w")
    ]


def save(directory: Path, codes: dict[str, Tensor]) -> None:
    tensors = {"norm": torch.ones(7)} | {f"w{end}": values for end, values in codes.items()}
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_equal_those_of_transformers(tmp_path: Path, world: int) -> None:
    codes = packed(SHAPE, 0)
    save(tmp_path, codes)
    pieces = sorted(piece for of_rank in run_world(world, partial(part_of, tmp_path)) for piece in of_rank)
    values = torch.tensor([value for _, values in pieces for value in values]).view(SHAPE)
    expected = convert_moe_packed_tensors(codes["_blocks"], codes["_scales"], dtype=torch.float32)
    assert torch.equal(values, expected)


def test_other_shapes_are_refused_in_one_line(tmp_path: Path) -> None:
    save(tmp_path, packed((5, 96, 48), 0))
    [error] = run_world(1, partial(part_of, tmp_path))
    assert isinstance(error, UserError)
    assert "w_blocks is torch.uint8 [5, 48, 3, 16], which is not MXFP4 for [5, 64, 48]" in str(error)


def test_run_on_published_experts_equals_one_on_decoded_weights(tmp_path: Path) -> None:
    config = narrow(AutoConfig.for_model("gpt_oss"))
    config.update({"vocab_size": 300, "hidden_size": 64, "intermediate_size": 32})
    directories = {name: tmp_path / name for name in ("decoded", "published")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = model.state_dict()
    stored: dict[str, Tensor] = {}
    for number, (name, weight) in enumerate(weights.items()):
        if name.endswith((".gate_up_proj", ".down_proj")):
            codes = packed(tuple(weight.shape), number)
            weight.copy_(convert_moe_packed_tensors(codes["_blocks"], codes["_scales"], dtype=torch.float32))
            stored |= {f"{name}{end}": values for end, values in codes.items()}
        else:
            stored[name] = weight.clone()
    for directory in directories.values():
        model.save_pretrained(directory)
    save_file(stored, directories["published"] / "model.safetensors")
    described = json.loads((directories["published"] / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (directories["published"] / "config.json").write_text(json.dumps(described))
    for name, directory in directories.items():
        adapter = {"r": 3, "alpha": 12.0, "experts": True}
        path = {"config": None, "path": str(directory)}
        trained(
            write_config(
                tmp_path / "runs", name, model=path, adapter=adapter, launch={"ranks": 2}, train={"max_steps": 3}
            )
        )
    assert curve(tmp_path / "runs/published") == curve(tmp_path / "runs/decoded")
    merging = command("export", tmp_path / "runs/published", tmp_path / "merged", "--merge")
    assert merging.returncode == 2 and "its experts are in MXFP4, into which no adapter can be merged" in merging.stderr
