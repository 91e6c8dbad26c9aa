"""The experts of a mixture on CPU: each computes once, over all tokens that chose it, from a view of its own weights.

Registered through transformers' ExpertsInterface, with the signature and the attributes that it defines. Forward keeps
the first product alone; backward is written out: the scores' gradient needs no second product again, and the gradients
of the weights go expert by expert to wherever the engine wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aliquot.nn.experts.expert_modules import ExpertGradients, Passes, gradients_of, passes_of, weights_of
from aliquot.nn.experts.routing import Routing, count, route


class Activation(Protocol):
    def forward(self, before: Tensor) -> Tensor:
        """What the first product gave [n, W] -> what the second is given [n, I]."""
        ...

    def backward(self, before: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
        """`gradient` [n, I] -> into `out` that of `before` [n, W]; returns what `forward` gave."""
        ...


def activation_of(module: nn.Module) -> Activation:
    from transformers.integrations import moe

    usual = getattr(moe, "_default_apply_gate", None)  # a private name: without it the models' own code is run
    if module.has_gate and getattr(type(module), "_apply_gate", None) is usual and isinstance(module.act_fn, nn.SiLU):
        return GatedSilu()
    return OwnActivation(module)


class GatedSilu:
    """silu(gate) * up, of [gate, up]."""

    def forward(self, before: Tensor) -> Tensor:
        gate, up = before.chunk(2, 1)
        return F.silu(gate).mul_(up)

    def backward(self, before: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
        gate, up = before.chunk(2, 1)
        of_gate, of_up = out.chunk(2, 1)
        silu = F.silu(gate)
        torch.mul(gradient, silu, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return silu.mul_(up)


class OwnActivation:
    """Whatever the module's own code does, through autograd."""

    def __init__(self, module: Any) -> None:
        self._run = module._apply_gate if module.has_gate else module.act_fn

    def forward(self, before: Tensor) -> Tensor:
        found: Tensor = self._run(before)
        return found

    def backward(self, before: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
        with torch.enable_grad():
            first = before.detach().requires_grad_()
            acted = self.forward(first)
        (found,) = torch.autograd.grad(acted, first, gradient)
        out.copy_(found)
        return acted.detach()


IMPLEMENTATION = "aliquot_experts"


def register(compiled: bool = False) -> None:
    """Make `experts_implementation=IMPLEMENTATION` known to transformers.

    `compiled`: torch.compile leaves it as it is: its products depend on what tokens choose.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    function = torch.compiler.disable(sorted_experts) if compiled else sorted_experts  # type: ignore[no-untyped-call]
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, function)


def suits(module: nn.Module) -> bool:
    """Whether `sorted_experts` computes what this module of experts does; of no others transformers asks it."""
    return not getattr(module, "has_post_expert_norm", False)


def sorted_experts(module: nn.Module, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """hidden [T, H], chosen int64 [T, K], scores [T, K] -> [T, H], summed over K in fp32 in the order of `chosen`."""
    if hidden.is_cuda and not any(map(_is_misaligned, module.parameters())):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        found: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, chosen, scores)
        return found
    weights = weights_of(module)
    assert weights is not None
    up, down = weights
    biases = [None, None]
    if module.has_bias:
        name = "gate_up_proj_bias" if module.has_gate else "up_proj_bias"
        biases = [getattr(module, name), module.down_proj_bias]  # type: ignore[list-item]
    # Where nothing before them learns, only autograd of the weights themselves brings backward here.
    learning = torch.is_grad_enabled() and (hidden.requires_grad or scores.requires_grad)
    sinks = [gradients_of(weight) if learning else None for weight in weights]
    if None in sinks:
        sinks = [None, None]
    routing = route(chosen, up.shape[0])
    mixture = _Mixture(module, activation_of(module), routing, bool(module.is_transposed), passes_of(module), *sinks)
    if sinks[0] is not None:
        up, down = up.detach(), down.detach()  # type: ignore[assignment]
    result: Tensor = _SortedExperts.apply(hidden.to(up.dtype), scores, up, down, *biases, mixture)  # type: ignore[no-untyped-call]
    return result.to(hidden.dtype)


def _is_misaligned(weight: Tensor) -> bool:
    """Whether torch's grouped product refuses its rows."""
    return weight.ndim == 3 and any(weight.element_size() * size % 16 for size in weight.shape[1:])


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
        """The experts that were chosen, and their slots."""
        for expert in self.passes(range(len(self.routing.spans))):
            start, stop = self.routing.spans[expert]
            if start < stop:
                yield expert, slice(start, stop)

    def forward_of(self, weight: Tensor) -> Tensor:
        """[in, out]"""
        return weight if self.transposed else weight.t()

    def to_gradient(self, inputs: Tensor, gradient: Tensor, out: Tensor) -> None:
        """Of the weight that took `inputs` [n, in] to what has `gradient` [n, out]."""
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
    ) -> Tensor:
        routing = mixture.routing
        of_slots = routing.scores(scores)[:, None]
        width = up.shape[2 if mixture.transposed else 1]
        before = hidden.new_empty(routing.size, width)
        results = hidden.new_empty(routing.size + 1, hidden.shape[1])
        results[-1].zero_()  # of a choice of none
        for expert, span in mixture.used():
            rows = hidden.index_select(0, routing.tokens[span])
            torch.mm(rows, mixture.forward_of(up[expert]), out=before[span])
            if up_bias is not None:
                before[span] += up_bias[expert]
            acted = mixture.activation.forward(before[span]) * of_slots[span]
            torch.mm(acted.to(hidden.dtype), mixture.forward_of(down[expert]), out=results[span])
            if down_bias is not None:
                results[span] += down_bias[expert] * of_slots[span]
        ctx.save_for_backward(hidden, scores, up, down, up_bias, down_bias, before)
        ctx.mixture = mixture
        return _summed(routing.slots, results)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, scores, up, down, up_bias, down_bias, before = ctx.saved_tensors
        mixture: _Mixture = ctx.mixture
        routing = mixture.routing
        count(mixture.module, routing.counts)  # here and not in forward, which may run twice
        of_slots = routing.scores(scores)[:, None]
        score_gradients = torch.zeros(routing.size + 1, device=hidden.device)
        before_gradients = torch.empty_like(before)
        bias_gradients = [None if bias is None else torch.zeros_like(bias) for bias in (up_bias, down_bias)]

        def through_down(expert: int, out: Tensor | None) -> None:
            span = slice(*routing.spans[expert])
            rows = gradient.index_select(0, routing.tokens[span])
            unscored = torch.mm(rows, mixture.forward_of(down[expert]).t())
            scored = (unscored * of_slots[span]).to(before.dtype)
            acted = mixture.activation.backward(before[span], scored, before_gradients[span])
            of_score = (unscored * acted).sum(1, dtype=torch.float32)
            if out is not None:
                mixture.to_gradient((acted * of_slots[span]).to(rows.dtype), rows, out)
            if down_bias is not None:
                of_score += (rows @ down_bias[expert]).float()
                bias_gradients[1][expert] = (rows * of_slots[span]).sum(0)  # type: ignore[index]
            score_gradients[span] = of_score

        row_gradients = hidden.new_empty(routing.size + 1, hidden.shape[1])
        row_gradients[-1].zero_()

        def through_up(expert: int, out: Tensor | None) -> None:
            span = slice(*routing.spans[expert])
            of_before = before_gradients[span]
            if out is not None:
                mixture.to_gradient(hidden.index_select(0, routing.tokens[span]), of_before, out)
            if up_bias is not None:
                bias_gradients[0][expert] = of_before.sum(0)  # type: ignore[index]
            torch.mm(of_before, mixture.forward_of(up[expert]).t(), out=row_gradients[span])

        needs = ctx.needs_input_grad
        of_down = _by_expert(mixture, down, mixture.down_gradients, needs[3], through_down)
        of_up = _by_expert(mixture, up, mixture.up_gradients, needs[2], through_up)
        of_scores = score_gradients[routing.slots.reshape(-1)].view_as(scores).to(scores.dtype)
        return _summed(routing.slots, row_gradients), of_scores, of_up, of_down, *bias_gradients, None


def _by_expert(
    mixture: _Mixture,
    weight: Tensor,
    sink: ExpertGradients | None,
    wanted: bool,
    work: Callable[[int, Tensor | None], None],
) -> Tensor | None:
    """Calls `work(expert, room for its weight's gradient)` for each that was chosen. What is left for autograd."""
    counts = mixture.routing.counts
    if sink is None and not wanted:
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
    whole = torch.empty_like(weight)
    for expert in mixture.passes(range(len(counts))):
        _fill(whole[expert], counts[expert], expert, work)
    if sink is None:
        return whole
    sink.whole(whole)
    return None


def _fill(room: Tensor, tokens: int, expert: int, work: Callable[[int, Tensor | None], None]) -> None:
    if tokens:
        work(expert, room)
    else:
        room.zero_()


def _summed(slots: Tensor, rows: Tensor) -> Tensor:
    """slots [T, K], rows [S, H] -> [T, H]: of each token the sum of its rows, in fp32 and in order."""
    return F.embedding_bag(slots, rows, mode="sum")
