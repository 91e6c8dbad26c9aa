"""Mixture of experts on CPU: tokens are sorted by expert, and each expert computes once, over all its tokens.

transformers calls `sorted_experts` through its ExpertsInterface, which defines signature and attributes. The forward
pass saves only the result of the first product. The backward pass is written by hand. The gradient of the scores thus
needs no second product, and the engine gets the gradients of weights expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aliquot.nn.experts.expert_adapters import LowRank, adapters_of
from aliquot.nn.experts.expert_modules import ExpertGradients, Passes, count, gradients_of, passes_of, weights_of
from aliquot.nn.product_shapes import filled_up


@dataclass(frozen=True)
class Routing:
    """The assignment of tokens to slots 0 to S - 1, which are ordered by expert.

    The slots of an expert are padded to one of a few numbers of rows, because oneDNN caches a kernel for every shape of
    product. Padding slots contain token 0 with a score of 0.
    """

    tokens: Tensor  # int64 [S]: the token of each slot
    slots: Tensor  # int64 [T, K]: the slot of each choice of a token; S if the choice is none of the experts
    spans: tuple[tuple[int, int], ...]  # [expert]: its range of slots; empty without tokens
    counts: tuple[int, ...]  # [expert]: tokens that chose it

    @property
    def size(self) -> int:
        return len(self.tokens)

    def scores(self, choice_scores: Tensor) -> Tensor:
        """Return the score of each slot, [T, K] -> [S]; 0 for padding slots."""
        slot_scores = choice_scores.new_zeros(self.size + 1)
        slot_scores[self.slots.reshape(-1)] = choice_scores.reshape(-1)
        return slot_scores[: self.size]


def route(chosen: Tensor, experts: int) -> Routing:
    """Sort tokens by expert. `chosen`: int64 [T, K], experts of each token; a number beyond the last means no expert.

    On the meta device, which has no values, all experts get the same number of tokens.
    """
    if chosen.is_meta:
        return _even(chosen, experts)
    tokens, per_token = chosen.shape
    flat = chosen.reshape(-1)
    counts = torch.bincount(flat.clamp(max=experts), minlength=experts + 1)[:experts].tolist()
    ends = list(accumulate(filled_up(count) for count in counts))
    starts = [0, *ends[:-1]]
    choice_count = sum(counts)
    order = torch.argsort(flat, stable=True)[:choice_count]
    shifts = [start - before for start, before in zip(starts, [0, *accumulate(counts[:-1])], strict=True)]
    repeats = torch.tensor(counts, device=flat.device)
    shift = torch.tensor(shifts, device=flat.device).repeat_interleave(repeats, output_size=choice_count)
    places = torch.arange(choice_count, device=flat.device) + shift
    slots = flat.new_full((flat.numel(),), ends[-1])
    slots[order] = places
    token_of_slot = flat.new_zeros(ends[-1])
    token_of_slot[places] = order // per_token
    return Routing(token_of_slot, slots.view(tokens, per_token), tuple(zip(starts, ends, strict=True)), tuple(counts))


def _even(chosen: Tensor, experts: int) -> Routing:
    count = -(-chosen.numel() // experts)
    rows = filled_up(count)
    spans = tuple((expert * rows, (expert + 1) * rows) for expert in range(experts))
    return Routing(chosen.new_empty(experts * rows), torch.empty_like(chosen), spans, (count,) * experts)


def activation_of(module: nn.Module) -> Activation:
    from transformers.activations import ACT2FN
    from transformers.integrations import moe

    usual = getattr(moe, "_default_apply_gate", None)  # a private name; without it the model's own code runs
    is_usual = module.has_gate and getattr(type(module), "_apply_gate", None) is usual
    if is_usual and isinstance(module.act_fn, (nn.SiLU, type(ACT2FN["silu"]))):  # transformers may have its own class
        return GatedSilu()
    return AutogradActivation(module)


class GatedSilu:
    """The activation silu(gate) * up, whose input is the concatenation [gate, up]."""

    def forward(self, before: Tensor) -> Tensor:
        """Map the result of the first product [n, W] to the input of the second product [n, I]."""
        gate, up = before.chunk(2, 1)
        return F.silu(gate).mul_(up)

    def backward(self, before: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
        """Write the gradient of `before` [n, W] to `out`, from `gradient` [n, I]; return the result of `forward`."""
        gate, up = before.chunk(2, 1)
        gate_gradient, up_gradient = out.chunk(2, 1)
        silu = F.silu(gate)
        torch.mul(gradient, silu, out=up_gradient)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=gate_gradient)
        return silu.mul_(up)


class AutogradActivation:
    """The module's own activation, with its gradient by autograd."""

    def __init__(self, module: Any) -> None:
        self._run = module._apply_gate if module.has_gate else module.act_fn

    def forward(self, before: Tensor) -> Tensor:
        result: Tensor = self._run(before)
        return result

    def backward(self, before: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
        with torch.enable_grad():
            first = before.detach().requires_grad_()
            acted = self.forward(first)
        (input_gradient,) = torch.autograd.grad(acted, first, gradient)
        out.copy_(input_gradient)
        return acted.detach()


Activation = GatedSilu | AutogradActivation
IMPLEMENTATION = "aliquot_experts"


def register(compiled: bool = False) -> None:
    """Register `sorted_experts` with transformers as `experts_implementation=IMPLEMENTATION`.

    `compiled`: exclude the function from torch.compile, because its products depend on the routing of tokens.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    function = torch.compiler.disable(sorted_experts) if compiled else sorted_experts  # type: ignore[no-untyped-call]
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, function)


def suits(module: nn.Module) -> bool:
    """Return whether `sorted_experts` gives the same result as the module's own forward method."""
    return not getattr(module, "has_post_expert_norm", False)


def sorted_experts(module: nn.Module, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Compute a mixture of experts, summed over the K chosen experts in fp32, in the order of `chosen`.

    hidden [T, H], chosen int64 [T, K], scores [T, K] -> [T, H].
    """
    # torch's grouped product needs aligned rows.
    rows_bytes = (w.element_size() * size for w in module.parameters() if w.ndim == 3 for size in w.shape[1:])
    if hidden.is_cuda and not any(size % 16 for size in rows_bytes):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        result_of_kernel: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, chosen, scores)
        return result_of_kernel
    weights = weights_of(module)
    assert weights is not None
    up, down = weights
    names = ("gate_up_proj_bias" if module.has_gate else "up_proj_bias", "down_proj_bias")
    biases = [getattr(module, name) if module.has_bias else None for name in names]
    # If no earlier weight is trainable, autograd runs this backward pass only for the experts' weights.
    learning = torch.is_grad_enabled() and (hidden.requires_grad or scores.requires_grad)
    sinks = [gradients_of(weight) if learning else None for weight in weights]
    if None in sinks:
        sinks = [None, None]
    routing = route(chosen, up.shape[0])
    mixture = _Mixture(module, activation_of(module), routing, bool(module.is_transposed), passes_of(module), *sinks)
    factors = [
        (None, None) if adapter is None else (adapter.a.to(up.dtype), adapter.b.to(up.dtype))
        for adapter in adapters_of(module)
    ]
    if sinks[0] is not None:
        up, down = up.detach(), down.detach()  # type: ignore[assignment]
    result: Tensor = _SortedExperts.apply(  # type: ignore[no-untyped-call]
        hidden.to(up.dtype), scores, up, down, *biases, mixture, *factors[0], *factors[1]
    )
    return result.to(hidden.dtype)


@dataclass(frozen=True)
class _Mixture:
    module: nn.Module
    activation: Activation
    routing: Routing
    transposed: bool  # weights are [E, in, out], else [E, out, in]
    passes: Passes
    up_gradients: ExpertGradients | None
    down_gradients: ExpertGradients | None

    def used(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has tokens, with its slots."""
        for expert in self.passes(range(len(self.routing.spans))):
            start, stop = self.routing.spans[expert]
            if start < stop:
                yield expert, slice(start, stop)

    def forward_of(self, weight: Tensor) -> Tensor:
        """Return an expert's weight as [in, out]."""
        return weight if self.transposed else weight.t()

    def to_gradient(self, inputs: Tensor, gradient: Tensor, out: Tensor) -> None:
        """Write the gradient of the weight that maps `inputs` [n, in] to outputs with `gradient` [n, out]."""
        if self.transposed:
            torch.mm(inputs.t(), gradient, out=out)
        else:
            torch.mm(gradient.t(), inputs, out=out)


class _SortedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        scores: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        mixture: _Mixture,
        *factors: Tensor | None,
    ) -> Tensor:
        routing = mixture.routing
        up_adapter, down_adapter = _adapter(*factors[:2]), _adapter(*factors[2:])
        slot_scores = routing.scores(scores)[:, None]
        width = up.shape[2 if mixture.transposed else 1]
        before = hidden.new_empty(routing.size, width)
        results = hidden.new_empty(routing.size + 1, hidden.shape[1])
        results[-1].zero_()  # for choices of no expert
        for expert, span in mixture.used():
            rows = hidden.index_select(0, routing.tokens[span])
            torch.mm(rows, mixture.forward_of(up[expert]), out=before[span])
            if up_adapter is not None:
                up_adapter.add_forward(expert, rows, before[span])
            if up_bias is not None:
                before[span] += up_bias[expert]
            acted = (mixture.activation.forward(before[span]) * slot_scores[span]).to(hidden.dtype)
            torch.mm(acted, mixture.forward_of(down[expert]), out=results[span])
            if down_adapter is not None:
                down_adapter.add_forward(expert, acted, results[span])
            if down_bias is not None:
                results[span] += down_bias[expert] * slot_scores[span]
        ctx.save_for_backward(hidden, scores, up, down, up_bias, down_bias, *factors, before)
        ctx.mixture = mixture
        return _summed(routing.slots, results)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, scores, up, down, up_bias, down_bias, *factors, before = ctx.saved_tensors
        up_adapter, down_adapter = _adapter(*factors[:2]), _adapter(*factors[2:])
        up_change, down_change = (None if it is None else it.zeros() for it in (up_adapter, down_adapter))
        mixture: _Mixture = ctx.mixture
        routing = mixture.routing
        count(mixture.module, routing.counts)  # not in forward, which checkpointing may run twice
        slot_scores = routing.scores(scores)[:, None]
        score_gradients = torch.zeros(routing.size + 1, device=hidden.device)
        before_gradients = torch.empty_like(before)
        bias_gradients = [None if bias is None else torch.zeros_like(bias) for bias in (up_bias, down_bias)]

        def through_down(expert: int, out: Tensor | None) -> None:
            span = slice(*routing.spans[expert])
            rows = gradient.index_select(0, routing.tokens[span])
            unscored = torch.mm(rows, mixture.forward_of(down[expert]).t())
            if down_adapter is not None:
                down_adapter.add_backward(expert, rows, unscored)
            scored = (unscored * slot_scores[span]).to(before.dtype)
            acted = mixture.activation.backward(before[span], scored, before_gradients[span])
            score_gradient = (unscored * acted).sum(1, dtype=torch.float32)
            if out is not None:
                mixture.to_gradient((acted * slot_scores[span]).to(rows.dtype), rows, out)
            if down_adapter is not None and down_change is not None:
                inputs = (acted * slot_scores[span]).to(rows.dtype)
                down_adapter.write_gradients(expert, inputs, rows, down_change)
            if down_bias is not None:
                score_gradient += (rows @ down_bias[expert]).float()
                bias_gradients[1][expert] = (rows * slot_scores[span]).sum(0)  # type: ignore[index]
            score_gradients[span] = score_gradient

        row_gradients = hidden.new_empty(routing.size + 1, hidden.shape[1])
        row_gradients[-1].zero_()

        def through_up(expert: int, out: Tensor | None) -> None:
            span = slice(*routing.spans[expert])
            before_gradient = before_gradients[span]
            if out is not None:
                mixture.to_gradient(hidden.index_select(0, routing.tokens[span]), before_gradient, out)
            if up_bias is not None:
                bias_gradients[0][expert] = before_gradient.sum(0)  # type: ignore[index]
            torch.mm(before_gradient, mixture.forward_of(up[expert]).t(), out=row_gradients[span])
            if up_adapter is not None and up_change is not None:
                up_adapter.add_backward(expert, before_gradient, row_gradients[span])
                rows = hidden.index_select(0, routing.tokens[span])
                up_adapter.write_gradients(expert, rows, before_gradient, up_change)

        needs = ctx.needs_input_grad
        down_gradient = _run_experts(mixture, down, mixture.down_gradients, needs[3], through_down)
        up_gradient = _run_experts(mixture, up, mixture.up_gradients, needs[2], through_up)
        choice_gradients = score_gradients[routing.slots.reshape(-1)].view_as(scores).to(scores.dtype)
        hidden_gradient = _summed(routing.slots, row_gradients)
        factor_gradients = [
            gradient for it in (up_change, down_change) for gradient in ((None, None) if it is None else (it.a, it.b))
        ]
        return hidden_gradient, choice_gradients, up_gradient, down_gradient, *bias_gradients, None, *factor_gradients


def _adapter(a: Tensor | None, b: Tensor | None) -> LowRank | None:
    return None if a is None or b is None else LowRank(a, b)


def _run_experts(
    mixture: _Mixture,
    weight: Tensor,
    sink: ExpertGradients | None,
    needs_gradient: bool,
    work: Callable[[int, Tensor | None], None],
) -> Tensor | None:
    """Call `work(expert, buffer for its gradient)` for all experts. Return the whole gradient if autograd needs it."""
    counts = mixture.routing.counts
    if sink is None and not needs_gradient:
        for expert, _ in mixture.used():
            work(expert, None)
        return None
    blocks = None if sink is None else sink.begin()
    if sink is not None and blocks is not None:
        for first, last in blocks:
            present = any(counts[first:last])
            room = sink.buffer(first, last)
            for expert in range(first, last) if present else ():
                _fill(room[expert - first], counts[expert], expert, work)
            sink.publish(present)
        return None
    gradient = torch.empty_like(weight)
    for expert in mixture.passes(range(len(counts))):
        _fill(gradient[expert], counts[expert], expert, work)
    if sink is None:
        return gradient
    sink.whole(gradient)
    return None


def _fill(room: Tensor, tokens: int, expert: int, work: Callable[[int, Tensor | None], None]) -> None:
    if tokens:
        work(expert, room)
    else:
        room.zero_()


def _summed(slots: Tensor, rows: Tensor) -> Tensor:
    """Sum the rows of each token in order, in fp32: slots [T, K], rows [S, H] -> [T, H]."""
    return F.embedding_bag(slots, rows, mode="sum")
