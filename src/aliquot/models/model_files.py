"""The small files beside the weights: config, generation config and tokenizer, as transformers writes them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def model_files(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, source: Path | None) -> dict[str, bytes]:
    """File name -> content, for fp32 weights. The generation config is the one of `source`, if it has one."""
    saved = type(config).from_dict(config.to_dict())
    saved.dtype = torch.float32
    saved.use_cache = True  # switched off for training
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
    if source is not None and (source / "generation_config.json").is_file():
        files["generation_config.json"] = (source / "generation_config.json").read_bytes()
    return files


def export_dtype(wanted: str, stored: torch.dtype | None, precision: str) -> torch.dtype:
    """What `model.dtype` means. auto: as the source stores its weights; where it does not say, the dtype trained in."""
    if wanted != "auto":
        named: torch.dtype = getattr(torch, wanted)
        return named
    return stored or (torch.bfloat16 if precision == "bf16" else torch.float32)
