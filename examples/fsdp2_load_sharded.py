"""Load a checkpoint into a model of your own that FSDP2 shards: every rank reads its own rows and nothing else.

torchrun --nproc-per-node 2 examples/fsdp2_load_sharded.py MODEL_DIRECTORY
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import aliquot

dist.init_process_group()
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.bfloat16)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
model = aliquot.load_sharded(model, sys.argv[1])

loss = model(input_ids=torch.arange(16)[None], labels=torch.arange(16)[None]).loss
print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
dist.destroy_process_group()
