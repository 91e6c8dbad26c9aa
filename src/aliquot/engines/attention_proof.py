"""Prove before a run that attention is right on this device, in the dtype and with the heads and windows of the model.

startup_proof.py compares a narrow copy of the model in fp32. A GPU has other kernels for bf16 than for fp32, and for
wide heads than for narrow heads. Here, the run's attention backend and a plain computation get the same random
queries, keys and values. Outputs and gradients of the last rows must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aliquot.core.errors import SelfTestError
from aliquot.distributed.ranks import gather
from aliquot.engines.base import EngineSpec
from aliquot.models import model_calls
from aliquot.nn.attention.document_attention import AttentionBackend, Documents, Scoring, masked_attention
from aliquot.nn.experts.expert_modules import pass_over, weights_of

_WIDEST_WINDOW = 1024  # a wider window is proven with this width, because of the memory and time on CPUs
# A GPU computes a document of this length in several blocks. The time does not matter there.
_TOKENS_ON_GPU = 1024
_EDGE = 33  # tokens at both ends of the long document, which a wrong window or boundary would show or hide
_SHORT = 13  # tokens of the second document
_EDGE_VALUES = 8.0  # factor for values of edge tokens: one token too many is then far above rounding errors
# Relative to the norm: bf16 rounds probabilities and results to 8 bits.
_TOLERANCE = {torch.bfloat16: 2**-6, torch.float32: 1e-3}


@dataclass(frozen=True)
class AttentionCall:
    """The shapes and the scoring of a layer's attention."""

    heads: int
    key_heads: int
    width: int  # of queries and keys
    value_width: int
    scoring: Scoring  # without sinks
    has_sinks: bool

    def __str__(self) -> str:
        window = "" if self.scoring.window is None else f", window {self.scoring.window}"
        return f"{self.heads} heads of {self.width} over {self.key_heads} key heads{window}"


class _CallRecorder:
    """An attention backend on meta tensors that records the calls."""

    def __init__(self) -> None:
        self.calls: dict[AttentionCall, None] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        plain = replace(scoring, sinks=None)
        call = AttentionCall(
            query.shape[1], key.shape[1], query.shape[3], value.shape[3], plain, scoring.sinks is not None
        )
        self.calls[call] = None
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def attention_calls(model: nn.Module) -> list[AttentionCall]:
    """Return the different attention calls in a forward pass of `model`, which is on the meta device and packs."""
    recorder, experts = _CallRecorder(), [module for module in model.modules() if weights_of(module) is not None]
    ids = torch.zeros(2, dtype=torch.int64, device="meta")
    for module in experts:
        pass_over(module, lambda numbers: numbers[:0])
    was_training = model.training
    try:
        # A layer may need real values, such as the routing of tokens; earlier layers then speak for all.
        with torch.no_grad(), suppress(Exception):
            model_calls.hidden_states(model.eval(), ids, ids, Documents((0, 2), recorder))
    finally:
        model.train(was_training)
        for module in experts:
            pass_over(module, iter)
    return list(recorder.calls)


def prove_attention(calls: Sequence[AttentionCall], attention: AttentionBackend, spec: EngineSpec, device: str) -> None:
    """Compare `attention` with a plain computation for each call. Collective. Raises SelfTestError on every rank."""
    least = _TOKENS_ON_GPU if device == "cuda" else 0
    wrong = [
        f"{call}: {finding}"
        for call in calls
        if (finding := _difference(call, attention, spec, torch.device(device), least))
    ]
    if findings := [finding for rank_findings in gather(wrong) for finding in rank_findings]:
        raise SelfTestError(
            f"attention in {spec.precision} on {device} is wrong for {findings[0]} ({len(set(findings))} findings on"
            " random values): this model would be trained wrongly, so nothing was begun"
        )


def _difference(
    call: AttentionCall, attention: AttentionBackend, spec: EngineSpec, device: torch.device, least_tokens: int
) -> str | None:
    """Return which result differs from the plain computation, or None. `least_tokens`: of the long document."""
    window = min(call.scoring.window or _EDGE, _WIDEST_WINDOW)
    scoring = replace(call.scoring, window=None if call.scoring.window is None else window)
    long = min(max(window + _EDGE, least_tokens), spec.document_tokens)
    edges = (0, long, long + min(_SHORT, spec.document_tokens))
    rows = min(_EDGE + _SHORT, edges[-1])
    values = _random_inputs(call, edges, spec.compute_dtype, device)
    query, key, value = values[:3]
    scoring = replace(scoring, sinks=values[3] if call.has_sinks else None)
    documents = Documents(edges, attention).on(device)
    out = attention.attend(query, key, value, documents, scoring)[:, -rows:]
    wide = replace(scoring, sinks=None if scoring.sinks is None else scoring.sinks.float())
    visible = _visible(edges, scoring.window, rows, device)
    plain = masked_attention(query[:, :, -rows:].float(), key.float(), value.float(), visible, wide).transpose(1, 2)
    weights = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1)).to(device)
    computed = [out, *torch.autograd.grad((out.float() * weights).sum(), values)]
    expected = [plain, *torch.autograd.grad((plain * weights).sum(), values)]
    names = (
        "the output",
        "the gradient of queries",
        "the gradient of keys",
        "the gradient of values",
        "the gradient of sinks",
    )
    largest = max(float(tensor.detach().float().norm()) for tensor in expected)
    for name, ours, exact in zip(names, computed, expected, strict=False):
        exact = exact.detach().float()
        error, norm = float((ours.detach().float() - exact).norm()), float(exact.norm())
        # With a window of one token, queries and keys have no effect: their gradients are rounding errors.
        if not error <= _TOLERANCE[spec.compute_dtype] * max(norm, _TOLERANCE[spec.compute_dtype] * largest):
            return f"{name} differs by {error / max(norm, 1e-30):.1%}"
    return None


def _random_inputs(
    call: AttentionCall, edges: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return queries, keys, values, and sinks if the layer has them, as leaves that need gradients."""
    generator, tokens = torch.Generator().manual_seed(0), edges[-1]
    shapes = [
        (1, call.heads, tokens, call.width), (1, call.key_heads, tokens, call.width),
        (1, call.key_heads, tokens, call.value_width), *([(call.heads,)] if call.has_sinks else []),
    ]  # fmt: skip
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values[2][:, :, :_EDGE] *= _EDGE_VALUES
    values[2][:, :, max(0, edges[1] - _EDGE) :] *= _EDGE_VALUES
    return [value.to(device, dtype).requires_grad_() for value in values]


def _visible(edges: tuple[int, ...], window: int | None, rows: int, device: torch.device) -> Tensor:
    """Return which tokens each of the last `rows` tokens attends to, bool [rows, T]."""
    position = torch.arange(edges[-1], device=device)
    document = position >= edges[1]
    distance = position[-rows:, None] - position
    visible = (document[-rows:, None] == document) & (distance >= 0)
    return visible if window is None else visible & (distance < window)
