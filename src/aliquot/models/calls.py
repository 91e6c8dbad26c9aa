"""How a model is called on a row of documents: once, where it packs, else once a document."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aliquot.loss.base import summed_cross_entropy

if TYPE_CHECKING:
    from aliquot.attention.base import Documents


def logits(model: nn.Module, ids: Tensor, positions: Tensor, documents: Documents) -> Tensor:
    """Logits [1, T, V] of one row of documents; ids and positions are int64 [T]."""
    outputs = [result.logits for result in _calls(model, model, "input_ids", ids, positions, documents)]
    return torch.cat(outputs, 1)


def hidden_states(model: nn.Module, tokens: Tensor, positions: Tensor, documents: Documents) -> Tensor:
    """What the output head is applied to, [T, E]. `tokens`: int64 ids [T], or their embeddings [T, E]."""
    name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    decoder = model.get_decoder()  # type: ignore[operator]
    outputs = [result.last_hidden_state[0] for result in _calls(model, decoder, name, tokens, positions, documents)]
    return torch.cat(outputs)


def whole_logits_loss(model: nn.Module, ids: Tensor, positions: Tensor, labels: Tensor, documents: Documents) -> Tensor:
    """The summed loss from the model's own logits, all of them at once: for heads that do more than multiply."""
    return summed_cross_entropy(logits(model, ids, positions, documents), labels)


def accepts(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(module.forward).parameters


def _calls(
    model: nn.Module, called: nn.Module, name: str, tokens: Tensor, positions: Tensor, documents: Documents
) -> list[Any]:
    if documents.backend is not None:
        inputs = {name: tokens[None], "position_ids": positions[None]}
        return [called(**inputs, use_cache=False, documents=documents)]
    options: dict[str, Any] = {"use_cache": False} if accepts(called, "use_cache") else {}
    results = []
    for start, stop in pairwise(documents.edges):
        _forget_lengths(model)
        results.append(called(**{name: tokens[None, start:stop]}, **options))
    return results


def _forget_lengths(model: nn.Module) -> None:
    """Rotary frequencies that grow with the longest document so far (dynamic NTK) begin anew with each document."""
    for module in model.modules():
        if not hasattr(module, "max_seq_len_cached") or "dynamic" not in str(getattr(module, "rope_type", "")):
            continue
        for name in [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]:
            prefix = name.removesuffix("inv_freq")
            original = getattr(module, f"{prefix}original_inv_freq", None)
            if original is not None:
                module.register_buffer(name, original.clone(), persistent=False)
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
