"""What the code of a model does, found by running a narrow copy of it: what no name or signature tells for sure.

A model *packs* if several documents in one row, with attention that we hand it, give each document exactly what it
gives alone under the model's own eager attention. Mixers of other kinds, masks of its own, attention that does not go
through transformers' interface: whatever it is that does not, the numbers differ or an error comes, and the model is
called once a document instead.
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

from aliquot.core.errors import UnsupportedModelError
from aliquot.models import model_calls
from aliquot.models.narrow import VOCABULARY, built, narrow
from aliquot.nn.attention.base import Documents
from aliquot.nn.attention.document_attention import IMPLEMENTATION, register
from aliquot.nn.attention.plain_attention import ReferenceAttention

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Of two documents: one longer than a window or chunk of the narrow copy and one shorter than its convolutions.
LENGTHS = (13, 3)
_TOLERANCE = 1e-4  # of the largest logit, in fp32: a thousand roundings; what mixes tokens changes the first digits


@dataclass(frozen=True)
class Traits:
    attention: str  # the implementation to build it with: ours where it packs, else one of transformers'
    why_alone: str | None  # why it does not pack; None: it does
    plain_head: bool  # logits are the head's product with what the decoder returns: no bias, soft-cap or scale
    looks_up: bool  # embeddings handed to the decoder give what ids give

    @property
    def packs(self) -> bool:
        return self.why_alone is None


def traits(config: PretrainedConfig, longest: int | None = None) -> Traits:
    """Of a model that is given documents of at most `longest` tokens; None: of any length.

    Raises UnsupportedModelError for a model that transformers cannot run or that sees what follows a token.
    """
    kind: Any = type(config)
    # The ids of special tokens, which a run and its plan may know differently, change none of it.
    values = {key: value for key, value in config.to_dict().items() if not key.endswith("_token_id")}
    found = _traits(kind, json.dumps(values, sort_keys=True, default=str))
    if found.packs and (limit := _length_that_changes_frequencies(config)) and (longest is None or longest > limit):
        why = f"its rotary frequencies depend on whether a document has more than {limit} tokens"
        return replace(found, attention=_own_attention(config), why_alone=why)
    return found


def _length_that_changes_frequencies(config: PretrainedConfig) -> int | None:
    """None: none does."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    told = [each for each in kinds if each.get("rope_type") in ("dynamic", "longrope")]
    known = [getattr(text, "original_max_position_embeddings", None), getattr(text, "max_position_embeddings", None)]
    limits = [each.get("original_max_position_embeddings") or known[0] or known[1] or 1 for each in told]
    return min(limits, default=None)


@cache
def _traits(kind: Any, values: str) -> Traits:
    config = kind.from_dict(json.loads(values))
    register()
    with quiet(), _one_thread():
        model = eager_copy(config)
        alone = _logits_alone(model)
        _check_keeps_weights(model)
        _check_causal(model, alone)
        hidden = _decoded(model)
        plain_head, looks_up = _plain_head(model, alone, hidden), _looks_up(model, hidden)
        why_alone = _why_alone(config, model, alone)
        return Traits(IMPLEMENTATION if why_alone is None else _own_attention(config), why_alone, plain_head, looks_up)


def eager_copy(config: PretrainedConfig, dropout: bool = True) -> PreTrainedModel:
    """A narrow copy for evaluation with random weights, in fp32 on CPU, under transformers' own eager attention."""
    try:
        model = built(narrow(config, dropout), "eager")
    except Exception as error:  # each model's code fails in its own way on a config it does not like
        raise UnsupportedModelError(
            f"transformers cannot run this {config.model_type} model: {_line(error)}"
        ) from error
    redraw(model)
    return model.eval()


def redraw(model: nn.Module) -> None:
    """Weights of a size at which attention, gates and caps matter; the usual initialisation leaves them hardly any."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)


def example(model: PreTrainedModel) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Ids and positions [T] of a row of two documents, and its edges."""
    vocabulary = min(VOCABULARY, model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary // 2, vocabulary, (sum(LENGTHS),), generator=generator)
    return ids, torch.cat([torch.arange(length) for length in LENGTHS]), (0, LENGTHS[0], sum(LENGTHS))


def agree(found: Tensor, expected: Tensor) -> bool:
    return bool(((found - expected).abs() <= _TOLERANCE * expected.abs().max()).all())


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of transformers about what narrow copies lack, and without a trace in random numbers."""
    logger = logging.getLogger("transformers")
    before, logger.level = logger.level, logging.CRITICAL
    state = torch.random.get_rng_state()
    torch.manual_seed(0)  # the same on every rank
    try:
        yield
    finally:
        logger.level = before
        torch.random.set_rng_state(state)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products of narrow copies take longer to hand out than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _logits_alone(model: PreTrainedModel) -> Tensor:
    ids, positions, edges = example(model)
    try:
        with torch.no_grad():
            found = model_calls.logits(model, ids, positions, Documents(edges, None))
    except Exception as error:
        kind = type(model).__name__
        raise UnsupportedModelError(f"{kind} does not run on token ids alone: {_line(error)}") from error
    return found


def _check_keeps_weights(model: PreTrainedModel) -> None:
    """Weights are in one memory of all ranks of a host: what a rank wrote there in passing, all would train on."""
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for training in (True, False):
        _logits_alone(model.train(training))
    changed = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
    if changed:
        raise UnsupportedModelError(f"{type(model).__name__} changes its weights when it is called: {changed[0]}")


def _check_causal(model: PreTrainedModel, alone: Tensor) -> None:
    ids, positions, edges = example(model)
    seen = LENGTHS[0] // 2
    ids[seen : LENGTHS[0]] = ids[: LENGTHS[0] - seen].clone()
    with torch.no_grad():
        changed = model_calls.logits(model, ids, positions, Documents(edges, None))
    if not agree(changed[:, :seen], alone[:, :seen]):
        raise UnsupportedModelError(
            f"{type(model).__name__} sees tokens that follow: there is nothing to predict. Not a causal language model"
        )


def _decoded(model: PreTrainedModel, embed: bool = False) -> Tensor | None:
    """What the decoder alone gives for ids, or for their embeddings; None: it cannot be called so."""
    ids, positions, edges = example(model)
    with torch.no_grad():
        tokens = F.embedding(ids, model.get_input_embeddings().weight) if embed else ids
        try:
            return model_calls.hidden_states(model, tokens, positions, Documents(edges, None))
        except (
            AttributeError,
            TypeError,
            ValueError,
            RuntimeError,
        ):  # each in its own way; whole logits are taken then
            return None


def _plain_head(model: PreTrainedModel, alone: Tensor, hidden: Tensor | None) -> bool:
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        return False
    return (
        hidden is not None and hidden.shape[-1] == head.in_features and agree(F.linear(hidden, head.weight), alone[0])
    )


def _looks_up(model: PreTrainedModel, of_ids: Tensor | None) -> bool:
    if type(model.get_input_embeddings()) is not nn.Embedding:  # a subclass may do more than look up
        return False
    of_rows = _decoded(model, embed=True)
    return of_ids is not None and of_rows is not None and agree(of_rows, of_ids)


def _why_alone(config: PretrainedConfig, model: PreTrainedModel, alone: Tensor) -> str | None:
    if not model_calls.accepts(model, "position_ids"):
        return "it takes no positions"
    try:
        packed = built(narrow(config), IMPLEMENTATION)
        packed.load_state_dict(model.state_dict())
        ids, positions, edges = example(model)
        with torch.no_grad():
            # In training: what is dropped in attention is asked for there.
            packed.train()
            model_calls.logits(packed, ids, positions, Documents(edges, ReferenceAttention()))
            packed.eval()
            row = model_calls.logits(packed, ids, positions, Documents(edges, ReferenceAttention()))
    except UnsupportedModelError as error:
        return str(error)
    except Exception as error:
        return f"its attention cannot be replaced: {_line(error)}"
    if agree(row, alone):
        return None
    return "something in it but attention mixes tokens, or attention needs more than it is told"


def _own_attention(config: PretrainedConfig) -> str:
    """torch's, where the model has that way and it gives what its eager one does."""
    model = eager_copy(config)
    try:
        other = built(narrow(config), "sdpa").eval()
    except ValueError:  # transformers says so of a model that has no such way
        return "eager"
    other.load_state_dict(model.state_dict())
    return "sdpa" if agree(_logits_alone(other), _logits_alone(model)) else "eager"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
