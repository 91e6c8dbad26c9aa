"""Build a model on the meta device: its structure, names and shapes without one byte of weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from aliquot.attention.base import AttentionBackend, Documents
from aliquot.attention.document_attention import IMPLEMENTATION, register
from aliquot.attention.reference_attention import ReferenceAttention
from aliquot.errors import UnsupportedModelError
from aliquot.loss.base import summed_cross_entropy
from aliquot.models import initialize
from aliquot.models.batch import MicroBatch
from aliquot.models.materialise import tied_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MetaModel:
    """A model whose parameters are on the meta device and whose non-persistent buffers are real, on CPU."""

    # All but `model` is noted before an engine shards it: FSDP2 changes its class, ZeRO-3 the shapes of its weights.
    name: str  # of its class
    model: PreTrainedModel
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # every weight once, in the model's order
    tied: dict[str, str]  # further name -> the name under which it is in `tensors`
    fills: initialize.Fills  # how the model's own _init_weights fills each weight
    matmul_parameters: int  # multiply every token: all matrices but the input embedding; a tied head counts once
    plain_head: bool  # logits are the head's product as it is: no soft-cap, no scale

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for _, shape in self.tensors)


def build(config: PretrainedConfig) -> MetaModel:
    """The model of `config` on the meta device, with attention per document.

    Raises UserError for a model that does not follow the common decoder-only layout.
    """
    from transformers import AutoModelForCausalLM

    register()
    config.use_cache = False
    with torch.device("meta"):
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=IMPLEMENTATION
            )
        except Exception as error:  # each model's code fails in its own way on a config it does not like
            raise UnsupportedModelError(f"transformers cannot build this {config.model_type} model: {error}") from error
    config.architectures = [type(model).__name__]
    _check_layout(model)
    plain_head = _check_isolation(model)
    fills = initialize.record(model)
    tensors = tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())
    tied = tied_weights(model)
    return MetaModel(type(model).__name__, model, tensors, tied, fills, _matmul_parameters(model), plain_head)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the model, in order: the modules that transformers says not to split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _matmul_parameters(model: PreTrainedModel) -> int:
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim >= 2)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return int(matrices if tied else matrices - model.get_input_embeddings().weight.numel())


def attention_width(config: PretrainedConfig) -> int:
    """Layers x heads x head size: what one (query, key) pair costs in attention, in multiply-adds of each product."""
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(config.num_hidden_layers) * heads * int(head_dim)


def _check_layout(model: PreTrainedModel) -> None:
    kind = type(model).__name__
    if not decoder_layers(model):
        raise UnsupportedModelError(
            f"{kind}: no decoder layers found (_no_split_modules names none): model not supported"
        )
    if model.get_input_embeddings() is None or model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{kind}: no input embedding or output head found: model not supported")
    persistent = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    if persistent:
        raise UnsupportedModelError(f"{kind}: persistent buffers are not supported: {', '.join(sorted(persistent))}")


def _check_isolation(model: PreTrainedModel) -> bool:
    """Check that every attention layer receives the document edges: one that does not would mix documents silently.

    Returns whether the logits are what the output head returns, nothing done to them.
    """
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    documents = Documents((0, 1, 4), ReferenceAttention())
    of_head: list[Tensor] = []
    head = model.get_output_embeddings()
    listener = head.register_forward_hook(lambda _module, _inputs, output: of_head.append(output))
    with torch.no_grad():
        try:
            logits = forward(model, ids, torch.zeros_like(ids), documents)
        except (TypeError, NotImplementedError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not run with attention per document: {error}"
            ) from error
        finally:
            listener.remove()
    layers = int(model.config.num_hidden_layers)
    if documents.visits != layers:
        raise UnsupportedModelError(
            f"{type(model).__name__}: {documents.visits} of {layers} attention layers use transformers'"
            " AttentionInterface, so packed documents cannot be isolated: model not supported"
        )
    return len(of_head) == 1 and logits is of_head[0] and head.bias is None


def forward(model: nn.Module, ids: Tensor, positions: Tensor, documents: Documents) -> Tensor:
    """Logits [1, T, V] of one row of packed documents; ids and positions are int64 [1, T]."""
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, documents=documents).logits
    return logits


def hidden_states(model: nn.Module, tokens: Tensor, positions: Tensor, documents: Documents) -> Tensor:
    """What the output head is applied to, [T, E]. `tokens`: int64 ids [T], or their embeddings [T, E]."""
    name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    decoder = model.get_decoder()  # type: ignore[operator]
    inputs = {name: tokens[None], "position_ids": positions[None]}
    states: Tensor = decoder(**inputs, use_cache=False, documents=documents).last_hidden_state
    return states[0]


def whole_logits_loss(model: nn.Module, ids: Tensor, positions: Tensor, labels: Tensor, documents: Documents) -> Tensor:
    """The summed loss from the model's own logits, all of them at once: for heads that do more than multiply."""
    return summed_cross_entropy(forward(model, ids[None], positions[None], documents), labels)


def losses_agree(
    model: nn.Module, fused: Callable[[MicroBatch, float], tuple[Tensor, Tensor]], attention: AttentionBackend
) -> bool:
    """Whether an engine's fused loss is the model's own on a few tokens; warns if not. Every rank calls it.

    A head that does more than multiply is known from its structure; this is for what structure does not tell.
    """
    edges = (0, 5, 8)
    batch = MicroBatch(torch.arange(8), torch.arange(8).roll(-1), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]), edges)
    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    with torch.no_grad():
        ours = float(fused(batch, 1.0)[0])
        ids, positions, labels = (t.to(device) for t in (batch.input_ids, batch.position_ids, batch.labels))
        theirs = float(whole_logits_loss(model, ids, positions, labels, Documents(edges, attention)))
    # bf16 logits carry 8 bits. Before weights are loaded both may be nan, which says nothing.
    if math.isclose(ours, theirs, rel_tol=0.02, abs_tol=1e-3) or math.isnan(theirs):
        return True
    _log.warning("the fused loss gives %g where the model's own gives %g: training with the model's own", ours, theirs)
    return False
