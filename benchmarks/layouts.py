"""Shapes of the benchmarks' models, and checkpoints in the layouts of published models.

Checkpoints have random bits; every value is a finite bf16 below 2.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aliquot.tensor_io.bytemap import Shape
from aliquot.tensor_io.file_layout import FilesLayout, LayoutEntry

BLOCK_BYTES = 64 << 20
SHARD_BYTES = 5_000_000_000  # size of files by transformers when these models were published

LLAMA_1B = {  # 1,235,814,400 parameters, 2.47 GB; five files here
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
LLAMA_3B = {**LLAMA_1B, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}
LLAMA_8B = {  # 8,030,261,248 parameters, 16.06 GB in four files
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LLAMA_500M = {**LLAMA_1B, "hidden_size": 1536, "intermediate_size": 4096, "vocab_size": 32000, "head_dim": 128}
LLAMA_500M |= {"num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": False}
LLAMA_125M = {**LLAMA_500M, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 64}


def llama_config(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "dtype": "bfloat16",
        **numbers,
    }


def llama_tensors(numbers: Mapping[str, Any]) -> list[tuple[str, Shape]]:
    """Return names and shapes in the model's order, in which published files are divided."""
    hidden, mlp, vocabulary = numbers["hidden_size"], numbers["intermediate_size"], numbers["vocab_size"]
    query, key = (numbers[name] * numbers["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    tensors: list[tuple[str, Shape]] = [("model.embed_tokens.weight", (vocabulary, hidden))]
    for index in range(numbers["num_hidden_layers"]):
        tensors += [(f"model.layers.{index}.{name}.weight", shape) for name, shape in layer.items()]
    tensors.append(("model.norm.weight", (hidden,)))
    if not numbers["tie_word_embeddings"]:
        tensors.append(("lm_head.weight", (vocabulary, hidden)))
    return tensors


def generate(directory: Path, numbers: Mapping[str, Any], max_shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a Hugging Face directory in bf16 with random bits."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(llama_config(numbers), indent=1))
    entries = [LayoutEntry(name, shape, torch.bfloat16) for name, shape in llama_tensors(numbers)]
    layout = FilesLayout.from_entries(entries, max_shard_bytes, "model")
    layout.create_files(directory)
    bits = torch.empty(BLOCK_BYTES // 8, dtype=torch.int64)
    for file in layout.files:
        with (directory / file.name).open("r+b") as out:
            out.seek(len(file.header))
            for start in range(len(file.header), file.file_bytes, BLOCK_BYTES):
                # clear the exponent's highest bit in each of the four values: neither inf nor nan
                values = bits.random_().bitwise_and_(~0x4000400040004000)
                out.write(values.numpy().data.cast("B")[: file.file_bytes - start])
            out.flush()
            os.fsync(out.fileno())
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return directory
