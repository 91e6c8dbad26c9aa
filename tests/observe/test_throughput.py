"""Speed with a clock that the test moves, and operation counts against a count by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.observe.number_format import duration, gib, rate, short
from aliquot.observe.throughput import Meter, attention_pairs, model_flops


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


def test_steps_to_come_do_not_wait_for_the_save_that_a_step_waited_for() -> None:
    """RemainingWork counts the saves that are left."""
    now = [0.0]
    meter = Meter(None, warmup_steps=0, clock=lambda: now[0])
    for saving_s in (0.0, 150.0):
        meter.begin()
        now[0] += 10.0 + saving_s
        meter.end(100, 0, saving_s)
    assert meter.steps_s(5) == pytest.approx(50.0)
    assert meter.overall().tokens_per_s == pytest.approx(200 / 170)


def test_without_a_ceiling_there_is_no_mfu() -> None:
    clock = Clock()
    meter = Meter(None, clock=clock)
    do_step(meter, clock, 1.0, 1)
    assert meter.overall().mfu is None


def test_a_step_that_beats_the_ceiling_shows_that_it_was_measured_too_low() -> None:
    clock = Clock()
    meter = Meter(ceiling_flops_per_s=5.0, clock=clock)
    do_step(meter, clock, 1.0, 1)
    assert meter.beats_ceiling
    meter.raise_ceiling(2.0)  # lower than before: the machine is busier now
    assert meter.recent().mfu == 2.0
    meter.raise_ceiling(20.0)
    assert meter.recent().mfu == 0.5 and not meter.beats_ceiling


@given(st.lists(st.integers(1, 40), max_size=20), st.none() | st.integers(1, 50))
def test_attention_pairs_are_those_of_a_causal_mask(lengths: list[int], window: int | None) -> None:
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


def test_numbers_that_are_rounded_to_the_next_prefix() -> None:
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
