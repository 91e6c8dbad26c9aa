"""Speed with a clock that the test moves, operation counts, the remaining time, and bytes through interfaces."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.schema import RunConfig
from aliquot.core.number_format import duration, gib, rate, short
from aliquot.observe.throughput import InterfaceTraffic, Meter, RemainingWork, attention_pairs, model_flops


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def do_step(meter: Meter, clock: Clock, seconds: float, tokens: int, pause: float = 0.0) -> None:
    meter.begin()
    clock.now += seconds
    meter.end(tokens, flops=10 * tokens)
    clock.now += pause


def test_warm_up_and_pauses_are_not_counted() -> None:
    clock = Clock()
    meter = Meter(ceiling_flops_per_s=2000.0, window_steps=2, clock=clock)
    assert meter.steps_s(5) is None and math.isnan(meter.recent().tokens_per_s)
    do_step(meter, clock, 100.0, 100)
    assert meter.recent().tokens_per_s == meter.overall().tokens_per_s == 1.0
    for seconds in (1.0, 2.0, 2.0):
        do_step(meter, clock, seconds, 100, pause=50.0)
    assert meter.overall().tokens_per_s == pytest.approx(300 / 5)
    assert meter.recent().tokens_per_s == pytest.approx(200 / 4)
    assert meter.recent().flops_per_s == pytest.approx(500)
    assert meter.recent().mfu == pytest.approx(0.25)
    assert meter.steps_s(5) == pytest.approx(10.0)


def test_remaining_steps_exclude_time_of_past_saves() -> None:
    """RemainingWork counts the saves that are left."""
    now = [0.0]
    meter = Meter(None, warmup_steps=0, clock=lambda: now[0])
    for saving_s in (0.0, 150.0):
        meter.begin()
        now[0] += 10.0 + saving_s
        meter.end(100, 0, saving_s)
    assert meter.steps_s(5) == pytest.approx(50.0)
    assert meter.overall().tokens_per_s == pytest.approx(200 / 170)


def test_mfu_needs_a_ceiling() -> None:
    clock = Clock()
    meter = Meter(None, clock=clock)
    do_step(meter, clock, 1.0, 1)
    assert meter.overall().mfu is None


def test_step_above_the_ceiling_raises_the_ceiling() -> None:
    clock = Clock()
    meter = Meter(ceiling_flops_per_s=5.0, clock=clock)
    do_step(meter, clock, 1.0, 1)
    assert meter.beats_ceiling
    meter.raise_ceiling(2.0)  # lower than before: the machine is busier now
    assert meter.recent().mfu == 2.0
    meter.raise_ceiling(20.0)
    assert meter.recent().mfu == 0.5 and not meter.beats_ceiling


@given(st.lists(st.integers(1, 40), max_size=20), st.none() | st.integers(1, 50))
def test_attention_pairs_equal_a_causal_mask(lengths: list[int], window: int | None) -> None:
    seen = [min(query + 1, window or query + 1) for length in lengths for query in range(length)]
    assert attention_pairs(lengths, window) == sum(seen)


def test_model_flops_of_two_layers_by_hand() -> None:
    # 3 tokens in one document: 6 (query, key) pairs, of which a window of one key leaves 3. A weight: multiply and add,
    # forward and twice backward. A pair and head dimension: score and value, each multiply and add, forward and twice
    # backward.
    widths = {None: 2 * 4, 1: 2 * 4}
    assert model_flops(matmul_flops=30, tokens=3, lengths=[3], attention_widths=widths) == (
        5 * 3 * 2 * 3 + (6 + 3) * 2 * 4 * 2 * 2 * 3
    )


def test_rounding_moves_to_the_next_prefix() -> None:
    assert (rate(999.7e9, "B"), rate(999.4e9, "B"), rate(0.0, "B")) == ("1 TB", "999 GB", "0 B")
    assert (short(17_300.4), short(1_234.0), short(42.34)) == ("17,300", "1,234", "42.3")


def test_numbers_for_a_person() -> None:
    assert gib(1.25 * 2**30) == "1.25 GiB"
    assert [rate(value, "FLOP/s") for value in (1.234e12, 5e8, 12.0)] == ["1.23 TFLOP/s", "500 MFLOP/s", "12 FLOP/s"]
    assert [duration(s) for s in (59.4, 59.6, 187, 3599.6, 7500)] == [
        "59 s",
        "1 min 00 s",
        "3 min 07 s",
        "1 h 00 min",
        "2 h 05 min",
    ]


def remaining(eval_steps: int, every: int, total: int, **checkpoint: object) -> RemainingWork:
    config = RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"path": "x", "eval_fraction": 0.1},
            "train": {"eval_steps": eval_steps},
            "checkpoint": {"every": every, **checkpoint},
        }
    )
    return RemainingWork(config, total, {"evaluation_s": 10.0, "save_s": 3.0, "export_s": 1.0})


def test_remaining_seconds_of_evaluations_and_saves() -> None:
    left = remaining(eval_steps=10, every=0, total=25)  # evaluations after 10, 20 and 25; a save after 25
    assert [left.seconds(done) for done in (0, 10, 11, 20, 21, 25)] == [34, 34, 24, 24, 14, 14]
    left.evaluation_s = 2.0  # as it took
    assert left.seconds(0) == 3 * 2 + 3 + 1
    assert remaining(eval_steps=0, every=0, total=25).seconds(24) == 14  # at the end alone
    assert remaining(eval_steps=5, every=0, total=25).seconds(24) == 14  # the last is due anyway: once


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saves_count_by_blocked_training_time(asynchronous: bool) -> None:
    left = remaining(eval_steps=0, every=5, total=20, **{"async": asynchronous})
    assert left.seconds(1) == 10 + (0 if asynchronous else 9) + 3 + 1  # the last is waited for
    left.saved(4.0, 0.5)
    assert left.seconds(1) == 10 + 1.5 + 4 + 1


def test_final_export_alone_adds_no_save_time() -> None:
    assert remaining(eval_steps=0, every=0, total=20, last=False).seconds(1) == 10 + 1
    assert remaining(eval_steps=0, every=5, total=20, last=False, **{"async": False}).seconds(1) == 10 + 4 * 3 + 1
    assert remaining(eval_steps=0, every=6, total=20, last=False, **{"async": False}).seconds(7) == 10 + 2 * 3 + 1


def test_remaining_time_is_unknown_without_a_plan() -> None:
    config = RunConfig.model_validate({"model": {"config": {"model_type": "llama"}}, "data": {"path": "x"}})
    assert RemainingWork(config, 10, {}).seconds(0) == 0


def test_keeping_the_best_counts_a_save_per_evaluation() -> None:
    kept = {"best": True, "last": False, "async": False}
    left = remaining(eval_steps=4, every=6, total=13, **kept)  # saves after 4, 6, 8, 12, and 13, which is evaluated
    assert [left.seconds(done) for done in (0, 5, 13)] == [4 * 10 + 5 * 3 + 1, 3 * 10 + 4 * 3 + 1, 10 + 3 + 1]


def test_traffic_counts_active_interfaces_since_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*rows: tuple[str, int, int]) -> None:
        lines = ["Inter-|   Receive", " face |bytes packets"]
        lines += [f"{name}: {got} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0" for name, got, sent in rows]
        (tmp_path / "net" / "dev").write_text("\n".join(lines) + "\n")

    (tmp_path / "net").mkdir()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    write(("    lo", 100, 100), ("  eth0", 5, 7), (" eth1", 1, 1))
    traffic = InterfaceTraffic()
    assert traffic.readings() == {"interface_bytes": {}}
    write(("    lo", 350, 350), ("  eth0", 5, 9), (" eth1", 1, 1), ("new", 3, 0))
    assert traffic.readings() == {
        "interface_bytes": {
            "lo": {"received": 250, "sent": 250},
            "eth0": {"received": 0, "sent": 2},
            "new": {"received": 3, "sent": 0},
        }
    }
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "absent"))
    assert InterfaceTraffic().readings() == {"interface_bytes": {}}


def test_loopback_traffic_is_counted() -> None:
    traffic = InterfaceTraffic()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            client.sendall(b"x" * 50_000)
            while len(connection.recv(50_000, socket.MSG_PEEK)) < 50_000:
                pass
    assert traffic.readings()["interface_bytes"]["lo"]["sent"] >= 50_000
