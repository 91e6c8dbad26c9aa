"""Continue a prompt with a model directory, through transformers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliquot.errors import ModelFilesError
from aliquot.models.adapter import CONFIG_FILE
from aliquot.models.code_of_strangers import without_code
from aliquot.models.model_files import trained_prefix

if TYPE_CHECKING:
    from torch import Tensor


def generate(directory: Path, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
    """The prompt and its continuation. Raises UserError where `directory` holds no model with a tokenizer."""
    if not any((directory / name).is_file() for name in ("config.json", CONFIG_FILE)):
        raise ModelFilesError(
            "no config.json here; generate wants an export, an adapter or a Hugging Face model directory", directory
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = without_code(AutoTokenizer.from_pretrained)(directory)
        model = without_code(AutoModelForCausalLM.from_pretrained)(directory, dtype="auto")
    except (OSError, ValueError) as error:
        raise ModelFilesError(
            f"transformers cannot load this model: {' '.join(str(error).split())}", directory
        ) from error
    return continuation(model.generate, tokenizer, prompt, trained_prefix(directory), max_new_tokens, temperature, seed)


def continuation(
    generate: Callable[..., Tensor],
    tokenizer: Any,
    prompt: str,
    prefix: Sequence[int] | None,
    max_new_tokens: int,
    temperature: float = 0.8,
    seed: int = 42,
) -> str:
    """The prompt and what `generate`, transformers' or an engine's, adds; temperature 0: the likeliest token each time.

    `prefix`: what training put before each document; None: what the tokenizer puts there. The seed makes all ranks of
    an engine draw the same tokens.
    """
    import torch

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    torch.manual_seed(seed)
    with torch.no_grad():
        asked = tokenizer.encode(prompt) if prefix is None else tokenizer.encode(prompt, add_special_tokens=False)
        ids = generate(torch.tensor([[*(prefix or ()), *asked]]), **options)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
