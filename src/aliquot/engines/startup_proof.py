"""Prove before a run that the engine trains the model correctly, by a comparison with transformers on a narrow copy.

The engine computes two rows of two documents as micro-batches on all ranks. The reference is the same narrow model with
transformers' eager attention, which gets one document at a time. The losses and the gradient of every weight must
agree. The proof finds errors in attention, masks, windows, heads, sums or the gradient exchange, which would otherwise
give a wrong but plausible loss curve. The proof runs in fp32, in which attention may have other kernels
(attention_proof.py). A bf16 run also tests whether the model's code runs with bf16 weights at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aliquot.core.errors import SelfTestError, UnsupportedModelError
from aliquot.distributed.ranks import gather
from aliquot.distributed.topology import Topology
from aliquot.engines.base import Engine, EngineSpec, PhaseHooks
from aliquot.models import meta, model_calls
from aliquot.models.micro_batch import MicroBatch
from aliquot.models.narrow import built, narrow, without_dropout
from aliquot.models.traits import Traits, eager_copy, example, quiet
from aliquot.nn.attention.document_attention import Documents, ReferenceAttention
from aliquot.nn.head_loss import head_loss_on
from aliquot.nn.logits_gradient import IGNORE
from aliquot.tensor_io.transfer import read_part

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ROWS = 2
# Relative to each weight's gradient. All architectures of docs/reference/models.md pass with this tolerance, and every
# fault in tests/engines/test_startup_proof.py is found.
_TOLERANCE = 1e-3
_REDUCED_TOLERANCE = 2**-7  # for sums sent as bf16, which has a relative error of 2^-9; sums of hosts may cancel
_EXACT_DEEPSPEED = {
    "bf16": {"enabled": False}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"},
}  # fmt: skip
_BETA = 0.5  # Adam's beta1, so that the first moment after one step gives the gradient
_NOISE = 1e-5  # relative to the norm of all gradients: rounding errors in a gradient that should be zero


def prove(config: PretrainedConfig, traits: Traits, kind: type[Engine], spec: EngineSpec, topology: Topology) -> None:
    """Compare engine `kind` with transformers on a narrow copy of the model. Collective.

    Raises SelfTestError on every rank if the loss or a weight's gradient is wrong. Raises UnsupportedModelError if the
    model's code does not run in `spec.precision`.
    """
    config = without_dropout(config)
    with quiet():
        if spec.precision == "bf16":
            _run_in_bf16(config, traits, spec.fused_loss)
        model = eager_copy(config)
        ids, positions, edges = example(model)
        rows = [_row(ids.roll(number), positions, edges) for number in range(_ROWS)]
        scale = 1 / sum(row.predicted for row in rows)
        losses = []
        for row in rows:
            documents = Documents(edges, None)
            summed, loss = model_calls.whole_logits_loss(model, row.input_ids, row.position_ids, row.labels, documents)
            losses.append(float(summed))
            model_calls.with_auxiliary(model, loss * scale, scale, row.labels, documents).backward()  # type: ignore[no-untyped-call]
        weights = model.state_dict()  # includes persistent buffers, which get no gradients
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        expected = {name: gradients.get(name, torch.zeros_like(weight)).view(-1) for name, weight in weights.items()}
        on_meta = meta.build(narrow(config), traits)
        exact = replace(
            spec, precision="fp32", fp8=False, deepspeed=spec.deepspeed and {**spec.deepspeed, **_EXACT_DEEPSPEED},
            on_disk=None, optimizer_states="fp32", compile="none", weight_decay=0.0, adam_beta1=_BETA,
            micro_batch_tokens=len(ids), micro_batches=-(-_ROWS // topology.world_size), hooks=PhaseHooks(),
        )  # fmt: skip
        with closing(kind.build(on_meta.model, exact, topology)) as engine:
            computed, parts = _run_engine(engine, topology, rows, scale, weights, traits.packs)
    expected_loss, computed_loss = sum(losses), sum(computed)
    wrong = []
    if not abs(computed_loss - expected_loss) <= 1e-4 * abs(expected_loss):
        wrong.append(f"loss is {computed_loss:.6g} instead of {expected_loss:.6g}")
    whole = torch.stack([gradient.float().norm() for gradient in expected.values()]).norm()
    tolerance = _REDUCED_TOLERANCE if spec.reduce_dtype == "bf16" else _TOLERANCE
    for name, (start, gradient) in parts.items():
        bound = tolerance * float(expected[name].norm()) + _NOISE * float(whole)
        if not float((gradient - expected[name][start : start + len(gradient)]).norm()) <= bound:
            wrong.append(name)
    findings = [finding for rank_findings in gather(wrong) for finding in rank_findings]
    if findings:
        first = findings[0] if findings[0].startswith("loss") else f"the gradient of {findings[0]} differs from the one"
        raise SelfTestError(
            f"{type(model).__name__}: {first} with transformers' own eager attention ({len(set(findings))} findings on"
            " a narrow copy): this model would be trained wrongly, so nothing was begun"
        )


def _run_in_bf16(config: PretrainedConfig, traits: Traits, fused_loss: bool) -> None:
    """Run a forward and a backward pass with bf16 weights. Buffers, such as routers' biases, stay fp32."""
    model = built(narrow(config), traits.attention).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    row = _row(*example(model))
    documents = Documents(row.edges, ReferenceAttention() if traits.packs else None)
    try:
        if fused_loss:
            hidden = model_calls.hidden_states(model, row.input_ids, row.position_ids, documents)
            loss = head_loss_on("cpu")(hidden, model.get_output_embeddings().weight, row.labels, 1.0)[1]
        else:
            loss = model_calls.whole_logits_loss(model, row.input_ids, row.position_ids, row.labels, documents)[1]
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # models raise various exceptions if weights and buffers differ in dtype
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run with weights of bf16: {reason}; train.precision: fp32 can train it"
        ) from error


def _row(ids: Tensor, positions: Tensor, edges: tuple[int, ...]) -> MicroBatch:
    labels = ids.roll(-1)
    labels[[edge - 1 for edge in edges[1:]]] = IGNORE
    return MicroBatch(ids, labels, positions, edges, calls=len(edges) - 1)


def _run_engine(
    engine: Engine,
    topology: Topology,
    rows: Sequence[MicroBatch],
    scale: float,
    weights: Mapping[str, Tensor],
    packs: bool,
) -> tuple[list[float], dict[str, tuple[int, Tensor]]]:
    """Run all rows through the engine. Return their losses, and this rank's gradients as {name: (start, values)}."""
    for part in engine.parts():
        if part.kind == "weight":
            engine.write(part, part.start, weights[part.name].view(-1)[part.start : part.stop])
    engine.ready()
    local: list[MicroBatch | None] = [*rows[topology.rank :: topology.world_size]]
    rounds = -(-len(rows) // topology.world_size)
    local += [None if packs else MicroBatch.empty(rows[0].calls)] * (rounds - len(local))
    losses = [float(engine.backward(row, scale, number == rounds - 1)) for number, row in enumerate(local)]
    engine.step(0.0, math.inf)
    # After one step, this moment is (1 - beta1) x the gradient.
    moments = [part for part in engine.parts() if part.kind == "exp_avg"]
    gradients = {part.name: (part.start, read_part(engine, part) / (1 - _BETA)) for part in moments}
    return [loss for rank_losses in gather(losses) for loss in rank_losses], gradients
