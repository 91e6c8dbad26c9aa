"""What many nodes cost a run, from numbers of messages, ranks and nodes."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Literal

import pytest

from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import SHARDED, RankMemory, Unsharded
from aliquot.planner.plan import Losses
from aliquot.planner.scaling import (
    FAILED_A_MONTH,
    MONTH_S,
    SAVING_PART,
    Storage,
    best_interval_s,
    expected_maximum,
    losses,
)
from aliquot.planner.step_time import StepSetting, StepTime

STEP = StepTime(overlaps=False, matmul_s=50.0, memory_s=10.0, local_s=0.0, wire_s=5.0, disk_s=0.0)


def losses_on(
    nodes: int,
    engine: str = "host",
    device: Literal["cpu", "cuda"] = "cpu",
    step: StepTime = STEP,
    micro_batches: int = 2,
    unsharded: Unsharded = SHARDED,
) -> Losses:
    setting = StepSetting(
        engine, RankLayout(nodes, 8, 1, device), RankMemory(0, 0, 0, 0, 0, 0), "fp32", False, numel=1, weights=300,
        groups=33, weights_bytes=0, patched_bytes=0, disk_bytes_per_s=1.0, offloads=False,
        unsharded=unsharded,
    )  # fmt: skip
    return losses(step, setting, micro_batches, 10**9, Storage(60.0, 60.0), 0.25)


@pytest.mark.parametrize("engine", ["host", "fsdp"])
def test_losses_grow_with_nodes(engine: str) -> None:
    assert losses_on(1, engine) == Losses(idle_ranks=0.25)
    few, many = losses_on(4, engine), losses_on(64, engine)
    for name, loss in few.shares.items():
        assert 0 < loss < 1 and (name == "idle ranks" or loss < many.shares[name])
    assert many.goodput < few.goodput < 0.75


def test_a_gpu_computes_while_messages_are_sent() -> None:
    assert losses_on(16, "fsdp", "cuda", replace(STEP, overlaps=True)).messages == 0
    assert losses_on(16, "fsdp", "cuda", replace(STEP, overlaps=True, wire_s=60.0)).messages > 0


def test_latency_of_unsharded_groups_does_not_grow_with_micro_batches() -> None:
    """NCCL's rings over 256 nodes of 8 GPUs: 255 hops between nodes and 1,792 within nodes, for each of 33 groups."""
    sending = replace(STEP, overlaps=True, wire_s=60.0)
    ring_s = 255 * 20e-6 + 1792 * 3e-6
    for unsharded, collectives in (
        (SHARDED, 16 * 3),
        (Unsharded(weights=True), 1 + 16),
        (Unsharded(weights=True, gradients=True), 2),
    ):
        loss = losses_on(256, "fsdp", "cuda", sending, 16, unsharded).messages
        assert loss / (1 - loss) * 60.0 == pytest.approx(33 * collectives * ring_s)


def test_expected_maximum_of_normal_values() -> None:
    draw = random.Random(0)
    sampled = statistics.mean(max(draw.gauss() for _ in range(64)) for _ in range(2000))
    assert expected_maximum(64) == pytest.approx(sampled, rel=0.02)
    assert expected_maximum(1) == 0


def test_the_interval_loses_the_least_time() -> None:
    lost_a_second = 256 * FAILED_A_MONTH / MONTH_S
    best = best_interval_s(60.0, lost_a_second)

    def lost(interval_s: float) -> float:
        return 60.0 / interval_s + lost_a_second * interval_s / 2

    assert lost(best) < min(lost(0.9 * best), lost(1.1 * best))
    assert best_interval_s(1e6, lost_a_second) == 1e6 / SAVING_PART
