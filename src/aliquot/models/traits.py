"""Measure traits of a model's code on a narrow copy of the model, because names and signatures do not show them.

A model *packs* if it can run on several documents in one row with aliquot's attention: each document must get the same
logits as in a separate forward pass with the model's eager attention. Convolutions or recurrences over tokens, special
masks, or attention outside of transformers' interface change the logits or raise an error. Such a model runs one
forward pass per document.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aliquot.core.errors import UnsupportedModelError, reason_of
from aliquot.models import model_calls
from aliquot.models.narrow import VOCABULARY, built, narrow, without_dropout
from aliquot.nn.attention.document_attention import IMPLEMENTATION, Documents, ReferenceAttention, register

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Tokens of two documents: one is longer than a window or chunk of the narrow copy, one shorter than its convolutions.
LENGTHS = (13, 3)
# Relative to the largest logit: errors of fp32 rounding are far below, effects of other documents far above.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Traits:
    """Properties of a model's code that training depends on."""

    attention: str  # the attention implementation: aliquot's if the model packs, else `sdpa` or `eager`
    why_unpacked: str | None  # the reason why the model does not pack; None if it packs
    plain_head: bool  # whether logits are head x decoder output, without bias, soft-cap or scale
    looks_up: bool  # whether the decoder has the same output for token ids and for the embeddings of the ids

    @property
    def packs(self) -> bool:
        return self.why_unpacked is None


def traits(config: PretrainedConfig, longest: int | None = None, drops: bool = True) -> Traits:
    """Return the traits of a model for documents of at most `longest` tokens; None: documents of any length.

    `drops`: whether dropout is active in training.

    Raises UnsupportedModelError for a model that transformers cannot run, or that attends to later tokens.
    """
    config = config if drops else without_dropout(config)
    # Ids of special tokens have no effect on traits; without them, a plan and its run share the cached result.
    values = {key: value for key, value in config.to_dict().items() if not key.endswith("_token_id")}
    kind: Any = type(config)
    model_traits = _traits(kind, json.dumps(values, sort_keys=True, default=str))
    limit = _length_that_changes_frequencies(config) if model_traits.packs else None
    if not limit or (longest is not None and longest <= limit):
        return model_traits
    why = f"its rotary frequencies depend on whether a document has more than {limit} tokens"
    return replace(model_traits, attention=_transformers_attention(config), why_unpacked=why)


def _length_that_changes_frequencies(config: PretrainedConfig) -> int | None:
    """Return the document length at which rotary frequencies change; None if they never change."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    length = getattr(text, "original_max_position_embeddings", None) or getattr(text, "max_position_embeddings", None)
    limits = [
        rope_of_kind.get("original_max_position_embeddings") or length or 1
        for rope_of_kind in kinds
        if rope_of_kind.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


@cache
def _traits(kind: Any, values: str) -> Traits:
    config = kind.from_dict(json.loads(values))
    register()
    with quiet(), one_thread():
        model = eager_copy(config)
        logits = _logits_by_document(model)
        _check_keeps_weights(model)
        _check_causal(model, logits)
        hidden = _decoded(model)
        plain_head, looks_up = _plain_head(model, logits, hidden), _looks_up(model, hidden)
        why_unpacked = _why_unpacked(config, model, logits)
        attention = IMPLEMENTATION if why_unpacked is None else _transformers_attention(config)
        return Traits(attention, why_unpacked, plain_head, looks_up)


def eager_copy(config: PretrainedConfig) -> PreTrainedModel:
    """Build a narrow copy of a model with random weights and transformers' eager attention, in fp32 on the CPU.

    The copy is in evaluation mode. Raises UnsupportedModelError if transformers cannot build the copy.
    """
    try:
        model = built(narrow(config), "eager")
    except Exception as error:  # each model's code fails in its own way on a config it does not like
        raise UnsupportedModelError(
            f"transformers cannot run this {config.model_type} model: {reason_of(error, 200)}"
        ) from error
    redraw(model)
    return model.eval()


@torch.no_grad()
def redraw(model: nn.Module) -> None:
    """Draw weights that are large enough for attention, gates and soft-caps to affect the logits.

    The usual initial weights are too small.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.1 * noise)


def example(model: PreTrainedModel) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return the ids [T], positions [T] and document boundaries of an example row of two documents."""
    vocabulary = min(VOCABULARY, model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary // 2, vocabulary, (sum(LENGTHS),), generator=generator)
    return ids, torch.cat([torch.arange(length) for length in LENGTHS]), (0, LENGTHS[0], sum(LENGTHS))


def agree(values: Tensor, expected: Tensor) -> bool:
    """Return whether all values equal the expected ones, apart from rounding."""
    return bool(((values - expected).abs() <= _TOLERANCE * expected.abs().max()).all())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of transformers and use seed 0 in the block; then restore the log level and the random state."""
    logger = logging.getLogger("transformers")
    before, logger.level = logger.level, logging.CRITICAL
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same on every rank
            yield
    finally:
        logger.level = before


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: for products that are too small for several, or must not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _logits_by_document(model: PreTrainedModel) -> Tensor:
    ids, positions, edges = example(model)
    try:
        return model_calls.logits(model, ids, positions, Documents(edges, None))
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on token ids alone: {reason_of(error, 200)}"
        ) from error


def _check_keeps_weights(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if a forward pass changes weights, which ranks of a host may share in memory."""
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for training in (True, False):
        _logits_by_document(model.train(training))
    changed = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
    if changed:
        raise UnsupportedModelError(f"{type(model).__name__} changes its weights when it is called: {changed[0]}")


@torch.no_grad()
def _check_causal(model: PreTrainedModel, logits: Tensor) -> None:
    ids, positions, edges = example(model)
    prefix_length = LENGTHS[0] // 2
    ids[prefix_length : LENGTHS[0]] = ids[: LENGTHS[0] - prefix_length].clone()
    changed = model_calls.logits(model, ids, positions, Documents(edges, None))
    if not agree(changed[:, :prefix_length], logits[:, :prefix_length]):
        raise UnsupportedModelError(
            f"{type(model).__name__} sees tokens that follow: there is nothing to predict. Not a causal language model"
        )


@torch.no_grad()
def _decoded(model: PreTrainedModel, embed: bool = False) -> Tensor | None:
    """Return the decoder's output for the example row; None if the decoder cannot be called.

    With `embed`, the decoder gets the embeddings of the token ids instead of the ids.
    """
    ids, positions, edges = example(model)
    tokens = F.embedding(ids, model.get_input_embeddings().weight) if embed else ids
    try:
        return model_calls.hidden_states(model, tokens, positions, Documents(edges, None))
    # Models raise various errors here; training then computes the loss from the logits of the whole model.
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


def _plain_head(model: PreTrainedModel, logits: Tensor, hidden: Tensor | None) -> bool:
    head: Any = model.get_output_embeddings()
    return (
        type(head) is nn.Linear
        and getattr(head, "bias", None) is None
        and hidden is not None
        and hidden.shape[-1] == head.in_features
        and agree(F.linear(hidden, head.weight), logits[0])
    )


def _looks_up(model: PreTrainedModel, from_ids: Tensor | None) -> bool:
    from_embeddings = _decoded(model, embed=True)
    is_plain = type(model.get_input_embeddings()) is nn.Embedding  # a subclass may do more than a look-up
    return is_plain and from_ids is not None and from_embeddings is not None and agree(from_embeddings, from_ids)


@torch.no_grad()
def _why_unpacked(config: PretrainedConfig, model: PreTrainedModel, logits: Tensor) -> str | None:
    if not model_calls.accepts(model, "position_ids"):
        return "it takes no positions"
    try:
        packed = built(narrow(config), IMPLEMENTATION)
        packed.load_state_dict(model.state_dict())
        ids, positions, edges = example(model)
        packed.train()  # in training mode some models ask for attention dropout, which raises an error
        model_calls.logits(packed, ids, positions, Documents(edges, ReferenceAttention()))
        packed.eval()
        row = model_calls.logits(packed, ids, positions, Documents(edges, ReferenceAttention()))
    except UnsupportedModelError as error:
        return str(error)
    except Exception as error:
        return f"its attention cannot be replaced: {reason_of(error, 200)}"
    if agree(row, logits):
        return None
    return "something in it but attention mixes tokens, or attention needs more than it is told"


def _transformers_attention(config: PretrainedConfig) -> str:
    """Return "sdpa" if the model supports it with the same logits as its eager attention, else "eager"."""
    model = eager_copy(config)
    try:
        sdpa_model = built(narrow(config), "sdpa").eval()
    except ValueError:  # transformers refuses sdpa for models without it
        return "eager"
    sdpa_model.load_state_dict(model.state_dict())
    return "sdpa" if agree(_logits_by_document(sdpa_model), _logits_by_document(model)) else "eager"
