"""Weights in MXFP4 and nf4 load as the values that they encode, at any world size, and a run trains on them."""

from __future__ import annotations

import json
import math
import re
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
from aliquot.tensor_io.code_sizes import SCALE_GROUP, code_bytes, scale_count
from aliquot.tensor_io.weight_codes import SCALE_VALUES, codes_in
from tests.plain import decoded
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
    save_file(
        {"norm": torch.ones(7)} | {f"w{end}": values for end, values in codes.items()}, directory / "model.safetensors"
    )


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
    assert (
        merging.returncode == 2 and "its weights are in 4 bits, into which no adapter can be merged" in merging.stderr
    )


def in_nf4(name: str, weight: Tensor, nested: bool) -> dict[str, Tensor]:
    """The tensors in which bitsandbytes stores a weight, with double quantisation (`nested`) or without."""
    base = "nf4" if nested else "nf4_single"
    memory, count = torch.zeros(code_bytes(base, weight.shape), dtype=torch.uint8), scale_count(base, weight.shape)
    codes = codes_in(memory, base, weight.shape)
    codes.set_scales(codes.encode(0, weight.float().view(-1)))
    pairs, rest = memory.tensor_split([weight.numel() // 2])
    groups, mean, scales = rest.split([4 * -(-count // SCALE_GROUP), 4, count]) if nested else (rest, rest, rest)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {".absmax": scales.clone() if nested else scales.view(torch.float32).clone()}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(mean.view(torch.float32))}
        tensors |= {".nested_absmax": groups.view(torch.float32).clone(), ".nested_quant_map": SCALE_VALUES.clone()}
    described = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {"": pairs.clone()[:, None], ".quant_state.bitsandbytes__nf4": described}
    return {f"{name}{end}": values for end, values in tensors.items()}


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LINEAR = re.compile(r"model.layers.*_proj.weight")


def publish_in_nf4(directory: Path, nested: bool, beside: str) -> dict[str, Tensor]:
    """Write a Llama whose linear layers, but for `beside`, are in nf4; return the weights that the files encode."""
    config = narrow(AutoConfig.for_model("llama"))
    config.update({"vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "tie_word_embeddings": False})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.quantization_config = {**NF4, "llm_int8_skip_modules": ["lm_head", beside]}
    model.config.save_pretrained(directory)
    stored, values = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in model.state_dict().items():
        is_packed = LINEAR.fullmatch(name) and beside not in name
        stored |= in_nf4(name, weight, nested) if is_packed else {name: weight}
        values[name] = decoded(weight, "nf4" if nested else "nf4_single") if is_packed else weight
    save_file(stored, directory / "model.safetensors")
    return values


@pytest.mark.parametrize("nested", [True, False], ids=["double", "single"])
def test_run_on_nf4_files_equals_one_on_decoded_weights(tmp_path: Path, nested: bool) -> None:
    """In 4 bits and decoded, at one and two ranks; a module that the files store in 16 bits is not compressed."""
    directories = {name: tmp_path / name for name in ("published", "decoded")}
    values = publish_in_nf4(directories["published"], nested, "layers.0.mlp")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directories["published"]))
    del model.config.quantization_config
    model.save_pretrained(directories["decoded"], state_dict=values)
    for name, base, ranks in (("decoded", "bf16", 2), ("published", "bf16", 1), ("published", "nf4", 2)):
        path, adapter = {"config": None, "path": str(directories[name])}, {"r": 3, "base": base}
        train = {"max_steps": 3, "global_batch_size": 4}
        config = write_config(
            tmp_path / "runs", f"{name}-{base}", model=path, adapter=adapter, launch={"ranks": ranks}, train=train
        )
        trained(config)
    trained(config, "shard.engine=fsdp", f"run.directory={tmp_path}/runs/fsdp")
    expected = curve(tmp_path / "runs/decoded-bf16")
    assert curve(tmp_path / "runs/published-nf4") == expected
    assert curve(tmp_path / "runs/fsdp") == pytest.approx(expected, rel=1e-5)
    assert curve(tmp_path / "runs/published-bf16") == pytest.approx(expected, rel=1e-5)
    events = (tmp_path / "runs/published-nf4/events.jsonl").read_text().splitlines()
    assert json.loads(events[0])["plan"]["disk_read_bytes"] == pytest.approx(
        (directories["published"] / "model.safetensors").stat().st_size, rel=0.1
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shorter", "w is torch.uint8 [7680, 1], which is not nf4 in blocks of 64 for [5, 64, 48]"),
        ("nan", "the weight w is nan at [4, 62, 32]"),
    ],
)
def test_bad_scales_of_nf4_are_refused_in_one_line(tmp_path: Path, change: str, message: str) -> None:
    tensors = in_nf4("w", torch.randn(SHAPE), False)
    tensors["w.absmax"][-1] = math.nan
    if change == "shorter":
        tensors["w.absmax"] = tensors["w.absmax"][1:].clone()
    save_file({"norm": torch.ones(7), **tensors}, tmp_path / "model.safetensors")
    [error] = run_world(1, partial(part_of, tmp_path))
    assert isinstance(error, UserError) and message in str(error)
