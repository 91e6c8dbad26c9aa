"""Every objective over every kind of output head, in an engine's passes with and without gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.distributed.topology import Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.fsdp.single_gpu_engine import SingleGpuEngine
from aliquot.models import meta
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.preference_loss import Answers, Name, Objective, RatedAnswers
from tests.engines.cases import NO_DROPOUT, SMALL, micro_batch

HEADS: dict[str, dict[str, Any]] = {
    "soft-capped": {"model_type": "gemma2", "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "plain": {"model_type": "llama"},
    "scaled": {"model_type": "cohere", "logit_scale": 0.3},
    "divided": {"model_type": "granite", "logits_scaling": 3.0},
    "with-bias": {"model_type": "phi"},
    "gptj": {"model_type": "gptj", "rotary_dim": 4, **NO_DROPOUT},
    "codegen": {"model_type": "codegen", "rotary_dim": 4, "n_ctx": 64, **NO_DROPOUT},
}
OBJECTIVES: tuple[Name, ...] = ("kto", "dpo", "simpo", "orpo")
LENGTHS = (5, 7, 4, 6)


@cache
def model(head: str) -> nn.Module:
    torch.manual_seed(1)
    config = AutoConfig.for_model(**{**SMALL, **HEADS[head]})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def batch_of(objective: Objective, rated: bool) -> MicroBatch:
    """Four answers; the mismatched answers of KTO are answers in groups of one without a rating."""
    generator = torch.Generator().manual_seed(0)
    row = micro_batch([torch.randint(3, 60, (length,), generator=generator) for length in LENGTHS])
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    shape = (-1, 1 if objective.rates_answers else 2)
    lengths = torch.tensor([length - 1.0 for length in LENGTHS]).view(shape)
    tokens = (row.labels != -100).nonzero().flatten()
    values = tokens, objective, numbers[tokens], lengths, -4.0 * lengths
    if not rated:
        return replace(row, row_loss=Answers(*values))
    desirable = torch.tensor([True, False, False, True])
    return replace(row, row_loss=RatedAnswers(*values, desirable=desirable, divergence=0.7))


def logprobs_of(head: str, row: MicroBatch) -> Tensor:
    sums = []
    for start, stop in zip(row.edges[:-1], row.edges[1:], strict=True):
        ids = row.input_ids[start:stop]
        logits = model(head)(input_ids=ids[None]).logits[0, :-1]
        sums.append(-nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    assert isinstance(row.row_loss, Answers)
    return torch.stack(sums).view(row.row_loss.lengths.shape)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("head", HEADS)
def test_answers_have_the_log_probabilities_and_the_gradient_of_the_model(head: str, name: Name) -> None:
    built = meta.build(AutoConfig.for_model(**{**SMALL, **HEADS[head]}))
    assert built.traits.plain_head == (head == "plain")
    spec = EngineSpec("fp32", 64, built.traits.plain_head, built.traits.packs, built.traits.looks_up)
    engine = SingleGpuEngine.build(built.model, spec, Topology(0, 1, 0, 1, 0, 1, "cpu", 1, ()))
    weights = dict(model(head).named_parameters())
    for part in engine.parts():
        if part.kind == "weight":
            engine.write(part, 0, weights[part.name].detach().view(-1))
    engine.ready()
    objective = Objective(name, beta=0.5)
    row = batch_of(objective, rated=objective.rates_answers)
    assert isinstance(row.row_loss, Answers)
    expected = logprobs_of(head, row)
    results = [engine.evaluate(evaluated) for evaluated in (row, batch_of(objective, rated=False))]
    for logprobs in (*results, engine.backward(row, 0.25, last=True)):
        torch.testing.assert_close(row.row_loss.sums(logprobs), expected.detach(), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(0.25 * row.row_loss.losses(expected).sum(), list(weights.values()))
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    assert engine.step(0.0, math.inf) == pytest.approx(norm, rel=1e-4)
