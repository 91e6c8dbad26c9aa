"""Continue a prompt with a model directory, through transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aliquot.errors import UserError


def sampling(max_new_tokens: int, temperature: float) -> dict[str, Any]:
    """Options of transformers' generate; temperature 0 takes the likeliest token each time."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    return options


def generate(directory: Path, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
    """The prompt and its continuation. Raises UserError where `directory` holds no model with a tokenizer."""
    if not (directory / "config.json").is_file():
        raise UserError("no config.json here; generate wants an export or a Hugging Face model directory", directory)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    except (OSError, ValueError) as error:
        raise UserError(f"transformers cannot load this model: {' '.join(str(error).split())}", directory) from error
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(inputs.input_ids, **sampling(max_new_tokens, temperature))
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
