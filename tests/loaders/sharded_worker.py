"""One rank of the load_sharded proofs: shards models in several ways, loads them, compares with transformers' own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.loaders.sharded import load_sharded
from tests.processes import as_ranks


def on_meta(directory: Path, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@cache
def from_pretrained(directory: Path, dtype: torch.dtype) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def check(model: nn.Module, directory: Path, dtype: torch.dtype) -> None:
    """Own rows, buffers and logits are bit for bit those of transformers."""
    original = from_pretrained(directory, dtype)
    expected = dict(original.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys(), "tied weights stay one"
    for name, weight in found.items():
        assert isinstance(weight, DTensor) and weight.dtype == dtype
        assert torch.equal(weight.full_tensor(), expected[name]), name
    for name, buffer in original.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, original(ids).logits)
    model(ids).logits.float().sum().backward()
    assert all(weight.grad is not None for weight in found.values())


def work(rank: int, world_size: int, folder: Path, names: list[str]) -> None:
    meshes = [init_device_mesh("cpu", (world_size,))]
    for shape in ((world_size, 1), (1, world_size), (2, world_size // 2)):
        if shape[0] * shape[1] == world_size:
            meshes.append(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    for name in names:
        directory = folder / name
        for mesh in meshes:
            check(load_sharded(on_meta(directory, mesh), directory), directory, torch.float32)
        larger = meshes[-1]["shard"]
        check(load_sharded(on_meta(directory, larger), directory), directory, torch.float32)
        bf16 = torch.bfloat16
        check(load_sharded(on_meta(directory, meshes[0], bf16), directory), directory, bf16)
        check(load_sharded(on_meta(directory, meshes[0]), directory, dtype=bf16), directory, bf16)
        config = AutoConfig.from_pretrained(directory)
        check(load_sharded(config, directory, meshes[-1], torch.float32), directory, torch.float32)


if __name__ == "__main__":
    as_ranks(work)
