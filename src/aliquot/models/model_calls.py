"""How a model is called on a row of documents: once, where it packs, else once a document."""

from __future__ import annotations

import inspect
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from aliquot.core.errors import UnsupportedModelError
from aliquot.nn.experts.routing import note_balance
from aliquot.nn.loss.base import IGNORE, summed_cross_entropy

if TYPE_CHECKING:
    from aliquot.nn.attention.base import Documents


def logits(model: nn.Module, ids: Tensor, positions: Tensor, documents: Documents) -> Tensor:
    """Logits [1, T, V] of one row of documents; ids and positions are int64 [T]."""
    results = _calls(model, model, "input_ids", ids, positions, documents)
    return torch.cat([result.logits[:, :length] for result, length in results], 1)


def hidden_states(model: nn.Module, tokens: Tensor, positions: Tensor, documents: Documents) -> Tensor:
    """What the output head is applied to, [T, E]. `tokens`: int64 ids [T], or their embeddings [T, E]."""
    name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    decoder = model.get_decoder()  # type: ignore[operator]
    results = _calls(model, decoder, name, tokens, positions, documents)
    return torch.cat([result.last_hidden_state[0, :length] for result, length in results])


def whole_logits_loss(model: nn.Module, ids: Tensor, positions: Tensor, labels: Tensor, documents: Documents) -> Tensor:
    """The summed loss from the model's own logits, all of them at once: for heads that do more than multiply."""
    return summed_cross_entropy(logits(model, ids, positions, documents), labels)


def with_auxiliary(model: nn.Module, summed: Tensor, scale: float, labels: Tensor, documents: Documents) -> Tensor:
    """`summed`, and `scale` times what a mixture of experts adds for its routers' balance, where it is asked for.

    That is `router_aux_loss_coef` x the balance of the micro-batch x its predicted tokens: so that, divided by all of
    the global batch, it is the mean over micro-batches.
    """
    if not documents.router_logits:
        return summed
    modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)  # FSDP2 gives it a class of its own
    functions = [getattr(module, "load_balancing_loss_func", None) for module in modules]
    balance = next((function for function in functions if function is not None), None)
    coefficient = getattr(model, "router_aux_loss_coef", None)
    if balance is None or coefficient is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no loss for output_router_logits: set it to false")
    learned = labels != IGNORE
    real = torch.cat([learned[a:b].any().expand(b - a) for a, b in pairwise(documents.edges)])  # no padded tail
    of_layers = tuple(torch.cat(layer)[real] for layer in zip(*documents.router_logits, strict=True))
    own: Any = model
    found: Tensor = coefficient * balance(of_layers, own.num_experts, own.num_experts_per_tok)
    if learned.any():
        note_balance(model, found, learned.sum())
    return summed + scale * found * learned.sum()


def accepts(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(module.forward).parameters


def _calls(
    model: nn.Module, called: nn.Module, name: str, tokens: Tensor, positions: Tensor, documents: Documents
) -> list[tuple[Any, int]]:
    """What each call returns, and the tokens of it that count: one that is alone is given a second time.

    The first token of a document uses only some of RWKV's weights, and FSDP2 sums over ranks what has a gradient.
    """
    balanced = torch.is_grad_enabled() and getattr(cast(Any, model).config, "output_router_logits", False)
    more = {"output_router_logits": True} if balanced else {}
    if documents.backend is not None:
        inputs = {name: tokens[None], "position_ids": positions[None], **more}
        result = called(**inputs, use_cache=False, documents=documents)
        if balanced:
            documents.router_logits.append(result.router_logits)
        return [(result, len(tokens))]
    options: dict[str, Any] = {"use_cache": False, **more} if accepts(called, "use_cache") else more
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
