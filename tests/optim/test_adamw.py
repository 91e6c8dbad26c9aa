"""Both updates against torch's AdamW, and which weights decay.

AdamW of a single GPU, too, on the CPU.

Schedules against transformers' own, step by step over whole runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from aliquot.config.train_section import REFUSED, SETTINGS, TrainSection
from aliquot.core.errors import ConfigError
from aliquot.engines.global_norm import squared_norms
from aliquot.optim import adamw
from aliquot.optim.adamw import BlockedAdamW, FlatShard, ShardedAdamW, decays
from aliquot.optim.master_weights import PairedWeights, SplitWeights
from aliquot.optim.moments import ExactValues, moment
from aliquot.optim.resident_adamw import ResidentAdamW, ResidentWeight
from aliquot.optim.schedule import Schedule, warmup


@pytest.mark.parametrize("kind", ["whole", "split", "paired", pytest.param("compiled", marks=pytest.mark.long)])
def test_blocked_adamw_equals_torch_adamw_with_clipping(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(adamw, "BLOCK", 1 << 7)  # several blocks and a remainder
    start = torch.randn(1000).bfloat16().float()
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    gradient = torch.zeros(1000)
    if kind != "whole":
        split = SplitWeights if kind == "split" else PairedWeights
        weights: ExactValues | SplitWeights = split(torch.zeros(1000, dtype=torch.bfloat16))
    else:
        weights = ExactValues(torch.zeros(1000))
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
        results.append(
            [*weights, *(optimizer.moment(weight, kind) for weight in weights for kind in ("exp_avg", "exp_avg_sq"))]
        )
    for known, unknown in zip(*results, strict=True):
        torch.testing.assert_close(unknown, known, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_frugal_states_do_not_depend_on_sharding(states: str) -> None:
    start, gradient = torch.randn(4, 512), torch.randn(4, 512)

    def run(edges: list[int]) -> torch.Tensor:
        shards = []
        for a, b in pairwise(edges):
            weights = ExactValues(start.view(-1)[a * 512 : b * 512].clone())
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


SIZES = (64, 257, 64)
DECAYS = (True, False, False)
RATIOS = (1.0, 1.0, 4.0)


def resident(dtype: torch.dtype) -> list[ResidentWeight]:
    torch.manual_seed(0)
    weights = []
    for size, decay, ratio in zip(SIZES, DECAYS, RATIOS, strict=True):
        master = torch.randn(size)
        compute = master if dtype == torch.float32 else master.to(dtype)
        weights.append(ResidentWeight(compute, master, torch.zeros(size), torch.zeros(size), decay, ratio))
    return weights


def gradients(dtype: torch.dtype, step: int) -> list[Tensor]:
    torch.manual_seed(step)
    return [torch.randn(size).to(dtype) for size in SIZES]


def state(weights: Sequence[ResidentWeight]) -> list[Tensor]:
    return [values.clone() for w in weights for values in (w.compute, w.master, w.exp_avg, w.exp_avg_sq)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_updates_equal_those_of_torch(dtype: torch.dtype, compiled: bool) -> None:
    weights = resident(dtype)
    expected = [torch.nn.Parameter(weight.master.clone()) for weight in weights]
    groups = [
        {"params": [p], "weight_decay": 0.1 if w.decays else 0.0, "lr": 1e-2 * w.rate_ratio}
        for p, w in zip(expected, weights, strict=True)
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    ours = ResidentAdamW(weights, (0.9, 0.95), 1e-8, 0.1, compiled)
    for step in range(4):
        for parameter, gradient in zip(expected, gradients(dtype, step), strict=True):
            parameter.grad = gradient.float()
        norm = torch.nn.utils.clip_grad_norm_(expected, 1.0)
        theirs.step()
        assert float(ours.step(gradients(dtype, step), 1e-2, 1.0)) == pytest.approx(float(norm), rel=1e-6)
    for parameter, weight in zip(expected, weights, strict=True):
        torch.testing.assert_close(weight.master, parameter.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weight.compute, weight.master.to(dtype))


def test_update_copies_no_number_to_the_gpu() -> None:
    """torch dispatches `lift_fresh` for each tensor from Python's numbers. A GPU would be waited for, once a weight."""
    operations: list[str] = []

    class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(str(operation))
            return operation(*args, **(kwargs or {}))

    ours, given = ResidentAdamW(resident(torch.bfloat16), (0.9, 0.95), 1e-8, 0.1, False), gradients(torch.bfloat16, 0)
    with Operations():
        ours.step(given, 1e-2, math.inf)
    assert "aten.lift_fresh.default" not in operations and "aten.unbind.int" in operations


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gradient_that_is_not_finite_changes_nothing(compiled: bool) -> None:
    weights = resident(torch.bfloat16)
    before = state(weights)
    bad = gradients(torch.bfloat16, 0)
    bad[1][3] = torch.nan
    norm = ResidentAdamW(weights, (0.9, 0.95), 1e-8, 0.1, compiled).step(bad, 1e-2, 1.0)
    assert not torch.tensor(float(norm)).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, state(weights), strict=True))


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}), ("cosine", {"num_cycles": 1.5}), ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {"lr_end": 0.1, "power": 2.0}), ("constant", {}), ("constant_with_warmup", {}),
    ("inverse_sqrt", {"timescale": 7}), ("cosine_with_min_lr", {"min_lr": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "num_stable_steps": 3, "decay_type": "1-sqrt"}),
]  # fmt: skip


def test_all_that_transformers_has_are_there_or_refused() -> None:
    assert {kind.value for kind in SchedulerType} == SETTINGS.keys() | REFUSED.keys()
    assert {kind for kind, _ in SCHEDULES} == SETTINGS.keys()


@pytest.mark.parametrize(("kind", "options"), SCHEDULES)
@pytest.mark.filterwarnings("error")
def test_rates_are_those_of_a_transformers_scheduler(kind: str, options: dict[str, Any]) -> None:
    """Except that `constant` has the warm-up that is asked for."""
    train = TrainSection(lr_scheduler_type=kind, lr_scheduler_kwargs=options, learning_rate=0.5, warmup_steps=4)
    schedule = Schedule.of(train, 20)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    name, steps = "constant_with_warmup" if kind == "constant" else kind, None if "num_stable_steps" in options else 20
    theirs = get_scheduler(name, optimizer, 4, steps, options)
    for step in range(20):
        assert schedule.rate(step) == theirs.get_last_lr()[0], step
        optimizer.step()
        theirs.step()


def test_phases_longer_than_the_run_are_refused() -> None:
    train = TrainSection(
        lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 17}, warmup_steps=4
    )
    with pytest.raises(ConfigError, match="needs 21 steps, and the run has 20"):
        Schedule.of(train, 20)


def test_warmup_steps_win_over_the_ratio() -> None:
    assert (warmup(3, 0.5, 100), warmup(None, 0.031, 100)) == (3, 4)
