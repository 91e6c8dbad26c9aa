"""What one micro-batch holds in memory and computes: the model's own forward and backward pass on meta tensors.

Nothing is computed and no weight exists: every operation runs for its shapes alone, aliquot's own attention too, while
a dispatch mode follows which storages are alive. A model's layers are mostly alike, so only a few are run: one of each
kind, and one more of each kind to see what it adds.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from aliquot.attention import tiles
from aliquot.attention.document_attention import Documents
from aliquot.attention.tiled_attention import TiledAttention
from aliquot.loss.head_loss import SCRATCH_BYTES, rows_at_once
from aliquot.models import meta
from aliquot.models.recompute import enable
from aliquot.plan.live_storages import Live, Work
from aliquot.plan.shapes import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

Checkpointing = Literal["none", "selective", "full"]

_IMPLEMENTATION = "aliquot_planned"


@dataclass(frozen=True)
class Step:
    """How micro-batches are computed."""

    precision: Literal["bf16", "fp32"]
    checkpointing: Checkpointing
    device: Literal["cpu", "cuda"]
    looks_up: bool  # the embedding's gradient is a row a token, as in engine host; else a whole table
    head_gradient: bool  # the head's gradient exists as a whole; engine host writes it into its ring piece by piece


@dataclass(frozen=True)
class MicroBatchCost:
    """Bytes alive beside weights and their gradients, and the operations of one micro-batch."""

    saved_bytes: int  # for the backward pass, when the forward pass of the layers is done
    layer_bytes: int  # of them, what the largest layer saved
    forward_bytes: int  # most at once, head and loss included
    backward_bytes: int
    evaluation_bytes: int  # most at once in a forward pass without gradients
    largest_bytes: int  # the largest block of a forward and backward pass
    forward: Work
    backward: Work

    def plus(self, other: MicroBatchCost, base: MicroBatchCost, times: int) -> MicroBatchCost:
        """This, and `times` what `other` has more than `base`; the largest block is the largest of all."""
        values: dict[str, Any] = {}
        for field in fields(self):
            own, less, more = (getattr(each, field.name) for each in (self, base, other))
            if isinstance(own, int):
                values[field.name] = own + times * (more - less)
            else:
                work: Work = defaultdict(float)
                work.update({key: own[key] + times * (more[key] - less[key]) for key in {*own, *less, *more}})
                values[field.name] = work
        return replace(MicroBatchCost(**values), largest_bytes=max(self.largest_bytes, other.largest_bytes))


def micro_batch_cost(shape: ModelShape, step: Step, edges: tuple[int, ...], predicted: int) -> MicroBatchCost:
    """Of one row with documents at `edges`, `predicted` of whose tokens have a label."""
    with _prepared(shape, step) as run_layers:
        documents = _PlannedDocuments(edges, step.device)
        if step.device == "cpu":
            for kind in shape.kinds:
                documents.tiles(kind.window, _dtype(step))
        first = [kind.positions[0] for kind in shape.kinds]

        def measure(positions: list[int]) -> MicroBatchCost:
            with run_layers(positions):
                return _run(shape, step, documents, predicted)

        base = measure(first)
        total = base
        layer_bytes = 0
        for kind in shape.kinds:
            more = len(kind.positions) - 1
            if more == 0:
                continue
            other = measure(sorted([*first, kind.positions[1]]))
            layer_bytes = max(layer_bytes, other.saved_bytes - base.saved_bytes)
            total = total.plus(other, base, more)
        bias = documents.bias_bytes()
        return replace(
            total,
            saved_bytes=total.saved_bytes + bias,
            forward_bytes=total.forward_bytes + bias,
            backward_bytes=total.backward_bytes + bias,
            evaluation_bytes=total.evaluation_bytes + bias,
            layer_bytes=layer_bytes or total.saved_bytes // shape.layers,
        )


def _run(shape: ModelShape, step: Step, documents: _PlannedDocuments, predicted: int) -> MicroBatchCost:
    model, dtype = shape.built.model, _dtype(step)
    tokens = documents.edges[-1]
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    with Live(model.parameters()) as live:
        if shape.built.plain_head:
            inputs = ids
            if step.looks_up:
                inputs = torch.empty(tokens, shape.width, dtype=dtype, device="meta", requires_grad=True)
            hidden = meta.hidden_states(model, inputs, ids, documents)
            saved_bytes = live.live_bytes
            rows = hidden
            if predicted < tokens:
                rows = hidden.index_select(0, torch.empty(predicted, dtype=torch.int64, device="meta"))
            gradient, of_weight = _head(shape, step, rows.detach(), live)
            forward_bytes, forward = live.peak_bytes, live.take_work()
            live.peak_bytes = live.live_bytes
            rows.backward(gradient)  # type: ignore[no-untyped-call]
            del hidden, rows, gradient, of_weight
        else:
            loss = meta.whole_logits_loss(model, ids, ids, ids, documents)
            saved_bytes = live.live_bytes
            forward_bytes, forward = live.peak_bytes, live.take_work()
            live.peak_bytes = live.live_bytes
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        backward_bytes, backward = live.peak_bytes, live.take_work()
        largest_bytes = live.largest_bytes
        live.peak_bytes = live.live_bytes
        with torch.no_grad():
            model.eval()
            if shape.built.plain_head:
                hidden = meta.hidden_states(model, ids, ids, documents)
                _evaluated_head(shape, step, hidden[:predicted])
            else:
                meta.whole_logits_loss(model, ids, ids, ids, documents)
            model.train()
        return MicroBatchCost(
            saved_bytes, 0, forward_bytes, backward_bytes, live.peak_bytes, largest_bytes, forward, backward
        )


def _head(shape: ModelShape, step: Step, hidden: Tensor, live: Live) -> tuple[Tensor, Tensor | None]:
    """What loss/head_loss.py allocates and multiplies; the gradients that live until the backward pass takes them."""
    rows, vocabulary = len(hidden), shape.vocabulary
    weight = torch.empty(vocabulary, shape.width, dtype=hidden.dtype, device="meta")
    live.ignore(weight)  # it is one of the model's
    at_once = min(rows, rows_at_once(vocabulary, hidden.dtype.itemsize))
    gradient = torch.empty_like(hidden)
    logits = gradient
    for start in range(0, rows, max(1, at_once)):
        logits = torch.mm(hidden[start : start + at_once], weight.t())
        _softmax_scratch(step, logits, live)
        torch.mm(logits, weight, out=gradient[start : start + at_once])
    of_weight = torch.empty_like(weight) if step.head_gradient else None
    if rows > at_once:  # in chunks the logits are computed again, for the gradient of the weight
        columns = max(16, vocabulary * at_once // (2 * rows))
        del logits
        for _ in range(0, vocabulary, columns):
            logits = torch.mm(hidden, weight[:columns].t()).float()
            torch.mm(logits.to(hidden.dtype).t(), hidden)
    elif step.head_gradient:
        torch.mm(logits.t(), hidden, out=of_weight)
    else:
        live.note_matmul(vocabulary, rows, shape.width, hidden.dtype)  # its pieces lie in the ring
    return gradient, of_weight


def _softmax_scratch(step: Step, logits: Tensor, live: Live) -> None:
    """On CPU a few rows at a time go through fp32, on a GPU all of them: to_gradient_ of loss/head_loss.py."""
    rows, vocabulary = logits.shape
    at_once = rows if step.device == "cuda" else min(rows, max(1, SCRATCH_BYTES // (4 * vocabulary)))
    scratch = [torch.empty(at_once, vocabulary, device="meta") for _ in range(2)]  # values, probabilities
    times = rows / max(1, at_once)
    for operation, moved in (("_to_copy", 6), ("amax", 4), ("_softmax", 8), ("amax", 4), ("mul_", 8), ("copy_", 6)):
        live.note_memory(operation, scratch[0].nbytes, moved * rows * vocabulary, times)


def _evaluated_head(shape: ModelShape, step: Step, hidden: Tensor) -> None:
    at_once = rows_at_once(shape.vocabulary, hidden.dtype.itemsize)
    logits = torch.empty(min(at_once, len(hidden)), shape.vocabulary, dtype=hidden.dtype, device="meta")
    torch.log_softmax(logits.float(), 1)  # as F.cross_entropy does


class _PlannedDocuments(Documents):
    """Document edges whose tiles are cut as always and then only described."""

    def __init__(self, edges: tuple[int, ...], device: str) -> None:
        super().__init__(edges)
        self.device = device
        self._described: dict[tuple[int | None, torch.dtype], tuple[tiles.Tiles, int]] = {}

    def tiles(self, window: int | None, dtype: torch.dtype) -> tiles.Tiles:
        if (window, dtype) not in self._described:
            self._described[window, dtype] = _described(tiles.cut(self.edges, window, dtype))
        return self._described[window, dtype][0]

    def bias_bytes(self) -> int:
        return sum(size for _, size in self._described.values())


def _described(cut: tiles.Tiles) -> tuple[tiles.Tiles, int]:
    """The same tiles on the meta device, and how large their masks are."""
    masks = [bins.bias for bins in cut.bins] + [block.bias for long in cut.longs for block in long.blocks]
    described = tiles.Tiles(
        bins=tuple(replace(bins, bias=bins.bias.to("meta")) for bins in cut.bins),
        longs=tuple(
            replace(long, blocks=tuple(replace(block, bias=block.bias.to("meta")) for block in long.blocks))
            for long in cut.longs
        ),
        tokens=None if cut.tokens is None else cut.tokens.to("meta"),
        slots=None if cut.slots is None else cut.slots.to("meta"),
        padding=None if cut.padding is None else cut.padding.to("meta"),
    )
    return described, sum(mask.nbytes for mask in masks)


def _planned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: _PlannedDocuments | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """attention.document_attention as it would go on the device that is planned for."""
    assert documents is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if documents.device == "cpu":
        rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        out: Tensor = TiledAttention.apply(*rows, documents.tiles(sliding_window, query.dtype), scale)  # type: ignore[no-untyped-call]
        return out[None], None
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    edges = zip(documents.edges, documents.edges[1:], strict=False)
    outputs = [
        flash(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], 0.0, True, False, scale=scale)[0] for a, b in edges
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


@contextmanager
def _prepared(shape: ModelShape, step: Step) -> Iterator[Callable[[list[int]], Any]]:
    """The model of `shape` with weights of the compute dtype, and a way to leave only some of its layers in it."""
    from transformers import AttentionInterface

    AttentionInterface.register(_IMPLEMENTATION, _planned_attention)
    model = shape.built.model
    model.config._attn_implementation = _IMPLEMENTATION
    _cast(model, _dtype(step))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers is about to rename these
        model.gradient_checkpointing_disable()
        enable(model, step.checkpointing)
    model.train()
    layers = meta.decoder_layers(model)
    holder = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and m[0] is layers[0])
    kinds = getattr(model.config, "layer_types", None)

    @contextmanager
    def only(positions: list[int]) -> Iterator[None]:
        holder._modules = {str(at): layers[position] for at, position in enumerate(positions)}
        if kinds is not None:
            model.config.layer_types = [kinds[position] for position in positions]
        try:
            yield
        finally:
            holder._modules = {str(at): layer for at, layer in enumerate(layers)}
            if kinds is not None:
                model.config.layer_types = kinds

    yield only


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Meta weights of `dtype`, whose gradients are gone as soon as they are complete."""
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in placed:
                placed[id(parameter)] = nn.Parameter(torch.empty_like(parameter, dtype=dtype))
                placed[id(parameter)].register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
            module.register_parameter(name, placed[id(parameter)])


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _dtype(step: Step) -> torch.dtype:
    return torch.bfloat16 if step.precision == "bf16" else torch.float32
