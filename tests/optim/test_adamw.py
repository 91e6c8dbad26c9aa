"""Both updates against torch's AdamW, and which weights decay."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from aliquot.optim import adamw
from aliquot.optim.adamw import BlockedAdamW, FlatShard, ShardedAdamW, decays
from aliquot.optim.gradient_norm import squared_norms
from aliquot.optim.master_weights import PairedWeights, SplitWeights, WholeWeights
from aliquot.optim.moments import moment


@pytest.mark.parametrize("kind", ["whole", "split", "paired", pytest.param("compiled", marks=pytest.mark.long)])
def test_blocked_adamw_equals_torch_adamw_with_clipping(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(adamw, "BLOCK", 1 << 7)  # several blocks and a remainder
    start = torch.randn(1000).bfloat16().float()
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    gradient = torch.zeros(1000)
    if kind != "whole":
        split = SplitWeights if kind == "split" else PairedWeights
        weights: WholeWeights | SplitWeights = split(torch.zeros(1000, dtype=torch.bfloat16))
    else:
        weights = WholeWeights(torch.zeros(1000))
    weights.store(0, start)
    moments = [moment("fp32", 1000, 10, squared) for squared in (False, True)]
    shard = FlatShard(weights, *moments, gradient, True, 0)
    ours = BlockedAdamW((0.9, 0.95), 1e-8, 0.1, compiled=kind == "compiled")
    for step in range(5):
        gradient.copy_(torch.randn(1000, generator=torch.Generator().manual_seed(step)))
        theirs.grad = gradient.clone()
        norm = float(torch.nn.utils.clip_grad_norm_([theirs], 3.0))
        optimizer.step()
        assert squared_norms([gradient, torch.empty(0), gradient])[::2] == pytest.approx([norm**2] * 2, rel=2e-6)
        ours.step([shard], 1e-2, norm, 3.0)
    # The split master is exact, so both are torch's kernel on the same numbers, clipped by a factor rounded alike.
    torch.testing.assert_close(weights.load(0, torch.empty(1000)), theirs.detach(), rtol=1e-6, atol=1e-7)


def test_update_by_a_norm_on_the_device_equals_that_by_a_known_norm() -> None:
    """Also: a norm that is not finite changes nothing, and does not count as a step."""
    results = []
    for on_device in (False, True):
        torch.manual_seed(0)
        weights = [torch.randn(300).requires_grad_(), torch.randn(7).requires_grad_()]
        optimizer = ShardedAdamW(weights, [True, False], (0.9, 0.95), 1e-8, 0.1, [1.0, 4.0])
        for limit, wrong in ((1.0, False), (math.inf, False), (1.0, True), (1e6, False)):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            if wrong:
                weights[0].grad[3] = float("inf")  # type: ignore[index]
            norm = torch.stack([weight.grad.double().norm() for weight in weights]).norm()  # type: ignore[union-attr]
            optimizer.step(1e-2, norm if on_device else float(norm), limit)
            assert all(weight.grad is None for weight in weights)
        results.append([*weights, *(optimizer.moment(at, kind) for at in (0, 1) for kind in ("exp_avg", "exp_avg_sq"))])
    for known, unknown in zip(*results, strict=True):
        torch.testing.assert_close(unknown, known, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_frugal_states_do_not_depend_on_sharding(states: str) -> None:
    start, gradient = torch.randn(4, 512), torch.randn(4, 512)

    def run(edges: list[int]) -> torch.Tensor:
        shards = []
        for a, b in pairwise(edges):
            weights = WholeWeights(start.view(-1)[a * 512 : b * 512].clone())
            moments = [moment(states, (b - a) * 512, 512, squared) for squared in (False, True)]
            shard_gradient = gradient.view(-1)[a * 512 : b * 512].bfloat16()
            shards.append(FlatShard(weights, *moments, shard_gradient, True, a * 512))
        optimizer = BlockedAdamW((0.9, 0.999), 1e-8, 0.0, frugal=True)
        for _ in range(6):
            optimizer.step(shards, 1e-2, 1.0, math.inf)
        return torch.cat([shard.weights.load(0, torch.empty(shard.weights.numel)) for shard in shards])

    assert torch.equal(run([0, 4]), run([0, 1, 3, 4]))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), True),
        ("model.layers.0.input_layernorm.weight", (8,), False),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 16), False),  # gpt-oss: one an expert
        ("model.layers.0.self_attn.q_norm.weight", (4, 8), False),  # cohere: one a head
        ("model.norm.weight", (2, 8), False),
        ("model.layers.0.layernorm.mlp.fc1.weight", (8, 8), True),  # within a module that is called a norm
        ("model.layers.0.normalized_proj.weight", (8, 8), True),
        ("bias", (2, 8), False),
    ],
)
def test_matrices_decay(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert decays(name, shape) is expected
