"""Measure the cost of a micro-batch by running the model's own forward and backward pass on meta tensors.

The pass computes nothing and needs no weights: every operation, also aliquot's attention and loss, only derives shapes.
A dispatch mode (`meta_trace`) records the live storages. Most layers of a model are alike. Therefore one pass runs one
layer of each kind, and further passes with one more layer of a kind show what each further layer costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aliquot.engines.host.host_memory import piece_edges
from aliquot.models import model_calls
from aliquot.models.backward_pass import copy_in_backward, enable_checkpointing
from aliquot.models.model_shape import ModelShape
from aliquot.models.shaped_model import ShapedModel
from aliquot.models.structure import decoder_layers
from aliquot.nn.attention.document_attention import AttentionBackend, Documents, Scoring, attention_on, causal
from aliquot.nn.experts.expert_modules import experts_weights, pass_over, send_to, weights_of
from aliquot.nn.head_loss import GradientRows, choose, head_loss_on
from aliquot.nn.logits_gradient import IGNORE
from aliquot.nn.product_shapes import PRODUCTS, TILE_PRODUCTS
from aliquot.planner.meta_trace import MetaTrace, Product
from aliquot.planner.micro_batch_cost import Costs, MicroBatchCost, Step


def micro_batch_costs(shaped: ShapedModel, step: Step, edges: tuple[int, ...], predicted: int) -> Costs:
    """Return the costs of a micro-batch of one row, whose documents begin and end at `edges`.

    `predicted` tokens of the row have a label. Raises any exception that the code of the model raises on meta tensors.
    """
    with _prepared(shaped, step) as run_layers:
        first = [kind.positions[0] for kind in shaped.shape.kinds]

        def measure(positions: list[int]) -> Costs:
            with run_layers(positions):
                return _run(shaped, step, edges, predicted, tuple(positions))

        base = measure(first)
        extended = [
            (measure(sorted([*first, kind.positions[1]])), len(kind.positions) - 1)
            for kind in shaped.shape.kinds
            if len(kind.positions) > 1
        ]
    plain, compiled = (
        _all_layers(base[way], [(costs[way], count) for costs, count in extended], shaped.shape.layers)
        for way in (0, 1)
    )
    return plain, compiled


def _all_layers(base: MicroBatchCost, extended: list[tuple[MicroBatchCost, int]], layers: int) -> MicroBatchCost:
    """Extrapolate the cost of a few layers to all layers of the model.

    Args:
        extended: for each kind, the cost with one more layer than `base`, and the number of further layers.
    """
    total, layer_bytes = base, 0
    for cost, count in extended:
        layer_bytes = max(layer_bytes, cost.saved_bytes - base.saved_bytes)
        total = total.plus(cost, base, count)
    return replace(total, layer_bytes=layer_bytes or total.saved_bytes // layers)


def _run(shaped: ShapedModel, step: Step, edges: tuple[int, ...], predicted: int, layers: tuple[int, ...]) -> Costs:
    shape, model, traits = shaped.shape, shaped.built.model, shaped.built.traits
    backend = attention_on(step.device, traits.packs, step.checkpointing == "selective")
    tokens = edges[-1]
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    labels = torch.zeros(tokens, dtype=torch.int64)  # not on meta, because the values determine the rows of the loss
    labels[predicted:] = IGNORE
    with MetaTrace(model.parameters()) as live, _fusing_in_layers(model, live):
        on_gpu = step.device == "cuda"
        attention = backend and _EagerAttention(FlashOfDocuments() if on_gpu else backend, live)
        for module in model.modules():
            if weights_of(module) is not None:
                pass_over(module, live.two_for_all)
        if not step.head_gradient and traits.packs:
            for weight in experts_weights(model):
                send_to(weight, _ExpertsRing(weight, live))

        head_products: set[Product] = set()

        def loss_of(inputs: Tensor) -> tuple[int, Tensor]:
            """Return the live bytes after the layers, and the loss."""
            documents = Documents(edges, attention)
            if not traits.plain_head:
                loss = model_calls.whole_logits_loss(model, ids, ids, ids, documents)[1]
                return live.live_bytes, loss
            head_loss = head_loss_on(step.device, live.two_for_all, step.logits_bytes, step.copies_transposed)
            head, chosen = model.get_output_embeddings().weight, choose(labels)
            in_ring = not step.head_gradient and torch.is_grad_enabled()
            room = head_loss.room(chosen, labels, head) if in_ring else None
            hidden = model_calls.hidden_states(model, inputs, ids, documents)
            saved_bytes, before = live.live_bytes - (0 if room is None else room.nbytes), live.products.copy()
            sink = _head_ring(shape, step, live) if in_ring and head.requires_grad else None
            if step.runs_head_twice and torch.is_grad_enabled():
                with torch.no_grad():
                    head_loss(hidden, head, labels, 1.0, None, chosen, room)
            loss = head_loss(hidden, head, labels, 1.0, sink, chosen, room)[1]
            head_products.update(live.products - before)
            return saved_bytes, loss

        inputs = ids
        if step.looks_up and traits.plain_head and traits.looks_up and shape.embedding_learns:
            inputs = torch.empty(tokens, shape.width, dtype=_dtype(step), device="meta", requires_grad=True)
        saved_bytes, loss = loss_of(inputs)
        forward_bytes, forward = live.peak_bytes, live.take_work()
        live.peak_bytes = live.live_bytes
        if loss.requires_grad:
            live.fusing = _compiles(model)  # also counts the few elementwise operations of attention as fused
            loss.backward()  # type: ignore[no-untyped-call]
            live.fusing = False
        backward_bytes, backward = live.peak_bytes, live.take_work()
        largest_bytes = live.largest_bytes
        other_products = len(live.products - head_products)
        del inputs, loss
        # An evaluation costs the same with and without activation checkpointing, so it is measured once.
        evaluation = (step.precision, step.device, step.logits_bytes, edges, predicted, layers)
        if evaluation not in shaped.evaluations:
            live.peak_bytes = live.live_bytes
            model.eval()
            with torch.no_grad():
                loss_of(ids)
            model.train()
            shaped.evaluations[evaluation] = live.peak_bytes, live.take_work()
        most, evaluating = shaped.evaluations[evaluation]
        plain, compiled = (
            MicroBatchCost(
                saved_bytes, 0, forward_bytes, backward_bytes, most, largest_bytes, *_products_of_kinds(shaped, step),
                other_products, len(head_products), *works,
            )
            for works in zip(forward, backward, evaluating, strict=True)
        )  # fmt: skip
        return plain, compiled


def _products_of_kinds(shaped: ShapedModel, step: Step) -> tuple[int, int]:
    """Return how many matrix products there are per tile shape of attention, and per number of rows of an expert."""
    if step.device != "cpu" or not shaped.built.traits.packs:
        return 0, 0
    # With `v_head_dim`, values may have another width than keys, which doubles the products of attention.
    ways = 1 if getattr(shaped.config, "v_head_dim", None) is None else 2
    layers = {tuple(weight.shape[1:]) for weight in experts_weights(shaped.built.model)}
    return ways * TILE_PRODUCTS, PRODUCTS * -(-len(layers) // 2)


def _head_ring(shape: ModelShape, step: Step, live: MetaTrace) -> GradientRows:
    """Return a stand-in for the ring buffer into which engine host writes the gradient of the output head.

    The trace ignores this buffer, because the memory of the engine contains it already.
    """
    edges = piece_edges(shape.vocabulary, shape.width, _dtype(step).itemsize)
    room = torch.empty(edges[1], shape.width, dtype=_dtype(step), device="meta")
    live.ignore(room)
    return _TwoForAll(live, edges, lambda a, b: room[: b - a], lambda: None)


def _compiles(model: nn.Module) -> bool:
    """Whether layers count as compiled. Layers of a mixture of experts do not, because experts stay eager."""
    return not experts_weights(model)


@contextmanager
def _fusing_in_layers(model: nn.Module, live: MetaTrace) -> Iterator[None]:
    def begin(*_: Any) -> None:
        live.fusing = True

    def end(*_: Any) -> None:
        live.fusing = False

    with ExitStack() as hooks:
        for layer in decoder_layers(model) if _compiles(model) else ():
            hooks.enter_context(layer.register_forward_pre_hook(begin))
            hooks.enter_context(layer.register_forward_hook(end))
        yield


@dataclass(frozen=True)
class _EagerAttention:
    """Attention that counts as eager within compiled layers, because torch.compile does not compile attention."""

    backend: AttentionBackend
    live: MetaTrace

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        before, self.live.fusing = self.live.fusing, False
        attended = self.backend.attend(query, key, value, documents, scoring)
        self.live.fusing = before
        return attended


class FlashOfDocuments:
    """Attention on a GPU as a meta pass sees it: flash attention, one document after another.

    torch's default for meta tensors would compute all scores. On meta tensors, the kernel returns heads as wide as the
    query's, even if values are narrower (DeepSeek's latent attention).
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        from aliquot.nn.attention.cuda_attention import attend_separately  # imports torch's compiler

        def flash(query: Tensor, key: Tensor, value: Tensor, *, scale: float, **_: object) -> Tensor:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention
            out: Tensor = kernel(query, key, value, 0.0, True, False, scale=scale)[0]
            return out[..., : value.shape[-1]]

        return attend_separately(query, key, value, documents, scoring, partial(causal, kernel=flash))


class _ExpertsRing:
    """A stand-in for the ring buffer into which engine host writes gradients of experts."""

    def __init__(self, weight: Tensor, live: MetaTrace) -> None:
        edges = piece_edges(weight.shape[0], weight[0].numel(), weight.element_size())
        self._live, self._edges = live, edges
        self._room = torch.empty_like(weight[: edges[1]])
        live.ignore(self._room)

    def begin(self) -> Iterator[tuple[int, int]]:
        """Yield two blocks of experts, which the trace counts as all blocks."""
        for first in self._live.two_for_all(range(0, self._edges[-1], self._edges[1])):
            yield first, min(first + self._edges[1], self._edges[-1])

    def buffer(self, first: int, last: int) -> Tensor:
        return self._room[: last - first]

    def publish(self, present: bool) -> None:
        pass

    def whole(self, gradient: Tensor) -> None:
        raise AssertionError("a ring of the planner never skips a block")


class _TwoForAll(GradientRows):
    """Two blocks of rows of the head's gradient. The trace lets them stand for all blocks of a large vocabulary."""

    def __init__(self, live: MetaTrace, edges: tuple[int, ...], *how: Any) -> None:
        super().__init__(edges, *how)
        self._live = live

    def blocks(self) -> Iterator[tuple[int, int]]:
        for start in self._live.two_for_all(range(0, self.edges[-1], self.edges[1])):
            yield start, min(start + self.edges[1], self.edges[-1])


@contextmanager
def _prepared(shaped: ShapedModel, step: Step) -> Iterator[Callable[[list[int]], Any]]:
    """Cast the model to the compute dtype, and yield a context manager that leaves only some layers in the model."""
    model = shaped.built.model
    _cast(model, _dtype(step))
    copy_in_backward(model, step.copies_transposed)  # the layers that count as compiled do this, too
    model.activation_checkpointing_disable()
    enable_checkpointing(model, step.checkpointing)
    model.train()
    layers = decoder_layers(model)
    holder = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and m[0] is layers[0])
    kinds = getattr(model.config, "layer_types", None)

    @contextmanager
    def only(positions: list[int]) -> Iterator[None]:
        if kinds is not None:
            model.config.layer_types = [kinds[position] for position in positions]
        holder._modules = {str(at): layers[position] for at, position in enumerate(positions)}
        try:
            yield
        finally:
            holder._modules = {str(at): layer for at, layer in enumerate(layers)}
            if kinds is not None:
                model.config.layer_types = kinds

    yield only


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace weights by meta weights of `dtype` that drop each gradient once it is complete."""
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in placed:
                learns = parameter.requires_grad
                placed[id(parameter)] = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=learns)
                if learns:
                    placed[id(parameter)].register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
            module.register_parameter(name, placed[id(parameter)])


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _dtype(step: Step) -> torch.dtype:
    return torch.bfloat16 if step.precision == "bf16" else torch.float32
