"""Run the forward pass of a model on a row of documents: one pass if the model packs, else one per document."""

from __future__ import annotations

import inspect
import sys
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from aliquot.core.errors import UnsupportedModelError
from aliquot.nn.attention.document_attention import Documents
from aliquot.nn.experts.expert_modules import note_balance
from aliquot.nn.head_loss import Chosen
from aliquot.nn.logits_gradient import IGNORE, token_cross_entropy, token_entropies
from aliquot.nn.row_loss import RowLoss


def logits(model: nn.Module, ids: Tensor, positions: Tensor, documents: Documents) -> Tensor:
    """Return the logits [1, T, V] of one row of documents; ids and positions are int64 [T]."""
    results = _calls(model, model, "input_ids", ids, positions, documents)
    return torch.cat([result.logits[:, :length] for result, length in results], 1)


def hidden_states(model: nn.Module, tokens: Tensor, positions: Tensor, documents: Documents) -> Tensor:
    """Return the inputs of the output head, [T, E]. `tokens` are ids, int64 [T], or embeddings [T, E]."""
    name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    decoder = model.get_decoder()  # type: ignore[operator]
    results = _calls(model, decoder, name, tokens, positions, documents)
    return torch.cat([result.last_hidden_state[0, :length] for result, length in results])


def whole_logits_loss(
    model: nn.Module,
    ids: Tensor,
    positions: Tensor,
    labels: Tensor,
    documents: Documents,
    row_loss: RowLoss | None = None,
    chosen: Chosen | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss, detached and for autograd, computed from the logits of all tokens at once.

    This is for models whose logits are not just the product with the output head, for example with a soft-cap. With
    `row_loss`, the results are those of nn/head_loss.py.
    """
    values = logits(model, ids, positions, documents)
    if chosen is not None and chosen.labels is not None:
        values, labels, row_loss = values[:, chosen.rows], chosen.labels, chosen.row_loss
    losses = token_cross_entropy(values, labels)
    if row_loss is None:
        summed = losses.sum()
        return summed.detach(), summed
    logprobs = row_loss.logprobs(losses.detach())
    if not torch.is_grad_enabled():  # mismatched answers have log-probabilities, but no loss
        return logprobs, logprobs
    if not row_loss.needs_entropies:
        return logprobs, (losses * row_loss.weights(losses.detach())).sum()
    entropies = token_entropies(values[0])
    weights = row_loss.weights(losses.detach(), entropies.detach())
    return logprobs, (torch.stack([losses, entropies], 1) * weights).sum()


def with_auxiliary(model: nn.Module, summed: Tensor, scale: float, labels: Tensor, documents: Documents) -> Tensor:
    """Add `scale` times the auxiliary loss of a mixture of experts to `summed`, if the model's config enables it.

    The auxiliary loss is `router_aux_loss_coef` x load-balancing loss of the micro-batch x labelled tokens of the
    micro-batch. Dividing by the labelled tokens of the global batch then gives a weighted mean over micro-batches.
    """
    if not documents.router_logits:
        return summed
    # Search the modules of all base classes, because FSDP2 replaces the model's class by a subclass.
    modules = (vars(sys.modules[kind.__module__]) for kind in type(model).__mro__)
    balance = next(filter(None, (module.get("load_balancing_loss_func") for module in modules)), None)
    coefficient = getattr(model, "router_aux_loss_coef", None)
    if balance is None or coefficient is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no loss for output_router_logits: set it to false")
    learned = labels != IGNORE
    # Documents without any label, such as padding at the end of the row, do not count.
    real = torch.cat([learned[a:b].any().expand(b - a) for a, b in pairwise(documents.edges)])
    layer_logits = tuple(torch.cat(layer)[real] for layer in zip(*documents.router_logits, strict=True))
    mixture: Any = model
    auxiliary: Tensor = coefficient * balance(layer_logits, mixture.num_experts, mixture.num_experts_per_tok)
    if learned.any():
        note_balance(model, auxiliary, learned.sum())
    return summed + scale * auxiliary * learned.sum()


def accepts(module: nn.Module, name: str) -> bool:
    """Return whether the forward pass of a module has a parameter of this name."""
    return name in inspect.signature(module.forward).parameters


def _calls(
    model: nn.Module, called: nn.Module, name: str, tokens: Tensor, positions: Tensor, documents: Documents
) -> list[tuple[Any, int]]:
    """Run the forward passes of a row; return the result of each pass with its number of tokens.

    In separate passes, a document of one token gets a second token. RWKV does not use all weights for the first token
    of a document, but FSDP2 needs gradients of all weights.
    """
    balanced = torch.is_grad_enabled() and getattr(cast(Any, model).config, "output_router_logits", False)
    extra = {"output_router_logits": True} if balanced else {}
    if documents.backend is not None:
        inputs = {name: tokens[None], "position_ids": positions[None], **extra}
        result = called(**inputs, use_cache=False, documents=documents)
        if balanced:
            documents.router_logits.append(result.router_logits)
        return [(result, len(tokens))]
    options: dict[str, Any] = {"use_cache": False, **extra} if accepts(called, "use_cache") else extra
    results = []
    for start, stop in pairwise(documents.edges):
        _forget_lengths(model)
        document = tokens[None, start:stop]
        if stop - start == 1 and not balanced:
            document = document.repeat_interleave(2, 1)
        result = called(**{name: document}, **options)
        results.append((result, stop - start))
        if balanced:
            documents.router_logits.append(result.router_logits)
    return results


def _forget_lengths(model: nn.Module) -> None:
    """Reset rotary frequencies (dynamic NTK), which would otherwise depend on the longest document so far."""
    for module in model.modules():
        if not hasattr(module, "max_seq_len_cached") or "dynamic" not in str(getattr(module, "rope_type", "")):
            continue
        for name in [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]:
            prefix = name.removesuffix("inv_freq")
            original = getattr(module, f"{prefix}original_inv_freq", None)
            if original is not None:
                module.register_buffer(name, original.clone(), persistent=False)
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
