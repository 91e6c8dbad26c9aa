"""One rank that loads a model by load_zero3 and by from_pretrained under ZeRO-3, and compares every gathered byte."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from torch import nn

from aliquot.loaders import zero3
from aliquot.loaders.zero3 import load_zero3, zero_weights
from tests.processes import as_ranks


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    import deepspeed
    from transformers import AutoModelForCausalLM

    model, how = arguments
    if world_size == 1:  # which passes nothing to anybody: not a minute for DeepSpeed's shared-memory op
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    stock, own_kind = nn.Linear(5, 3), nn.Linear(5, 3, device="meta")
    deepspeed.zero.Init(module=stock, dtype=torch.float32, mem_efficient_linear=False)
    zero3._meta_init_class()(module=own_kind, dtype=torch.float32, mem_efficient_linear=False)
    for theirs, ours in zip(stock.parameters(), own_kind.parameters(), strict=True):
        assert set(vars(theirs)) == set(vars(ours)) and set(vars(theirs.ds_tensor)) == set(vars(ours.ds_tensor))
    if how == "unknown version":
        zero3._TESTED = ()
    dtype = torch.float32 if how == "fp32" else torch.bfloat16
    ours = load_zero3(model, dtype=dtype, config={"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9}})
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        own: Any = weight
        stop = sum(part.numel for part in zero_weights(ours).parts() if part.name == name)
        assert how == "unknown version" or not own.ds_tensor[stop:].any(), f"the padding of {name} is not zero"
        own.all_gather()
        assert own.dtype == other.dtype and torch.equal(own.data, other.data), name
        own.partition()
    for (name, buffer), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(buffer, other) and buffer.dtype == other.dtype, name
    engine, *_ = deepspeed.initialize(
        model=ours,
        model_parameters=list(ours.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    ids, losses = torch.arange(3, 40)[None], []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    plain = theirs(input_ids=ids, labels=ids).loss
    (folder / f"{rank}.json").write_text(json.dumps({"losses": losses, "plain": float(plain.detach())}))
    engine.destroy()
    dist.barrier()


if __name__ == "__main__":
    as_ranks(work)
