"""What many nodes cost a run, from numbers of messages, ranks and nodes.

The cost of checkpoints: number of saves, waiting steps, and memory for copies of unsaved parts.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import SHARDED, RankMemory, Unsharded
from aliquot.planner.checkpoint_cost import Saving, count_saves, snapshot_bytes
from aliquot.planner.plan import Losses
from aliquot.planner.scaling import (
    FAILED_A_MONTH,
    MONTH_S,
    SAVING_PART,
    best_interval_s,
    expected_maximum,
    losses,
)
from aliquot.planner.step_time import MicroBatchTime, StepSetting, StepTime
from tests.planner.shapes import LLAMA, planned_config

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
    return losses(step, setting, micro_batches, 10**9, 60.0, 0.25)


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


GB = 10**9


def config_of(every: int, eval_steps: int = 0, **checkpoint: Any) -> RunConfig:
    sections = {"train": {"eval_steps": eval_steps}, "data": {"eval_fraction": 0.1}}
    return planned_config(LLAMA, **sections, checkpoint={"every": every, **checkpoint})


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 40), st.booleans(), st.booleans(), st.booleans())
def test_saves_are_counted_like_a_run_makes_them(
    every: int, eval_steps: int, steps: int, best: bool, last: bool, asynchronous: bool
) -> None:
    config = config_of(every, eval_steps, best=best, last=last, **{"async": asynchronous})
    due = {step for step in range(1, steps + 1) if (every and step % every == 0) or (best and step % eval_steps == 0)}
    if last or best:
        due.add(steps)
    blocking, overlapped, _ = count_saves(config, steps, Saving(1, GB, GB), 1, 1.0, 1.0)
    assert blocking + overlapped == len(due)
    assert blocking == (int(steps in due) if asynchronous else len(due))


def test_steps_wait_for_uncopied_parts() -> None:
    config = config_of(1, buffer_bytes=GB)
    # Of 96 GB at 0.5 GB/s, 2 may be copied by two ranks: 188 s, less the 8 s until the next update.
    assert count_saves(config, 100, Saving(1, 96 * GB, 0.5 * GB), 2, 10.0, 8.0) == (1, 99, 99 * 182.0)
    slow = count_saves(config_of(100, buffer_bytes=GB), 1000, Saving(1, 96 * GB, 0.5 * GB), 2, 10.0, 8.0)
    assert slow.stall_s == pytest.approx(9 * 180.0)
    assert count_saves(config_of(100, buffer_bytes=GB), 1000, Saving(1, 4 * GB, 0.5 * GB), 2, 10.0, 8.0).stall_s == 0
    assert count_saves(config_of(0, last=False), 100, Saving(1, GB, GB), 1, 1.0, 1.0) == (0, 0, 0.0)


MIB = 1 << 20
PAIR = RankLayout(1, 2, 1, "cpu")


def copies(
    step_s: float, numel: int, every: int = 5, micro_batches: int = 1, asynchronous: bool = True, freed: int = 0
) -> int:
    """Of a disk of 0.5 GB/s; `step_s`: of forward and backward passes of one micro-batch."""
    config = planned_config(LLAMA, checkpoint={"every": every, "async": asynchronous})
    each = MicroBatchTime((step_s / 4, 0.0), (step_s / 2, step_s / 4), (0.0, 0.0))
    return snapshot_bytes(config, PAIR, 10, Saving(numel, 12 * numel, 0.5e9), each, micro_batches, freed)


def test_save_shorter_than_a_step_needs_no_snapshot() -> None:
    of_100_million = 12 * 100_000_000 // 2  # bytes of a rank: 4.8 s at half the disk's rate
    assert copies(5.0, 100_000_000) == copies(1.25, 100_000_000, micro_batches=4) == 0
    assert 0.5 * 256 * MIB < copies(3.6, 100_000_000) < 0.3 * of_100_million
    assert copies(0.1, 100_000_000) == 256 * MIB, "checkpoint.buffer_bytes bounds them"
    assert copies(0.1, 100_000_000, every=10) == 0, "nothing follows the only save"
    assert copies(0.1, 100_000_000, asynchronous=False) == 0
    each, sections = (
        MicroBatchTime((0.1, 0.0), (0.1, 0.1), (0.0, 0.0)),
        {"train": {"eval_steps": 5}, "data": {"eval_fraction": 0.1}},
    )
    config = planned_config(LLAMA, checkpoint={"every": 0, "best": True}, **sections)
    assert snapshot_bytes(config, PAIR, 10, Saving(10**8, 12 * 10**8, 0.5e9), each, 1, 0) == 256 * MIB


def test_snapshot_beyond_freed_activations_adds_to_the_peak() -> None:
    at_update = copies(3.6, 100_000_000)  # 4.8 s to write, the next forward pass takes 0.9 of the last 1.2
    assert copies(3.6, 100_000_000, freed=1 << 30) == at_update // 4
    assert copies(3.6, 100_000_000, freed=50 * MIB) == at_update - 50 * MIB, "more than they leave free"
    assert copies(4.0, 100_000_000, freed=1 << 30) == 0
    assert copies(0.1, 100_000_000, freed=1 << 30) == 256 * MIB


def test_measured_disk_needs_smaller_snapshot() -> None:
    config, each = planned_config(LLAMA, checkpoint={"every": 5}), MicroBatchTime((0.25, 0.0), (0.5, 0.25), (0.0, 0.0))
    assumed, measured = (
        snapshot_bytes(config, PAIR, 10, Saving(10**8, 12 * 10**8, 1e9, known), each, 2, 0) for known in (False, True)
    )
    assert measured == 0 < assumed


def test_int8_moments_save_slowly_on_fast_disks() -> None:
    """Of 20 M parameters two ranks encode 10 M in a second; a run needed 230 MiB where none were planned."""
    each = MicroBatchTime((0.25, 0.0), (0.5, 0.25), (0.0, 0.0))
    for states, expected in (("fp32", 0), ("int8", 12 * 10_000_000 // 2)):
        config = planned_config(LLAMA, checkpoint={"every": 5}, train={"optimizer_states": states})
        assert snapshot_bytes(config, PAIR, 10, Saving(20_000_000, 1, 0.5e9), each, 1, 0) == expected


@given(st.floats(1e-3, 100), st.floats(1e-3, 100), st.integers(1, 10**9))
def test_longer_steps_never_need_more(one_s: float, other_s: float, numel: int) -> None:
    short, long = sorted((one_s, other_s))
    assert 256 * MIB >= copies(short, numel) >= copies(long, numel) >= 0
    assert copies(short, numel) <= 12 * numel
