"""Every moment of a step belongs to one part; slow ranks are named; profiles that cannot be written leave nothing.

Speed with a clock that the test moves, operation counts, the remaining time, and bytes through interfaces.
"""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.schema import RunConfig
from aliquot.core.errors import StorageError
from aliquot.core.number_format import duration, gib, rate, short
from aliquot.observe import step_clock
from aliquot.observe.step_clock import PARTS, HostMark, Profile, SlowRanks, StepClock, cuda_mark
from aliquot.observe.throughput import InterfaceTraffic, Meter, RemainingWork, attention_pairs, model_flops


class Machine:
    """A clock, and an engine that says how much of the time went into reducing and waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reduced: float | None = 0.0
        self.waited = 0.0

    def work(self, seconds: float, reducing: float = 0.0, waiting: float = 0.0) -> None:
        self.now += seconds + reducing + waiting
        self.waited += waiting
        if self.reduced is not None:
            self.reduced += reducing


def one_step(clock: StepClock, machine: Machine) -> None:
    clock.enter("data")
    machine.work(1)
    clock.enter("forward")
    for _ in range(2):  # micro-batches
        machine.work(2)
        clock.ended("forward")
        machine.work(3, reducing=0.5, waiting=0.25)
        clock.ended("backward")
    clock.enter("wait")
    machine.work(0.125)
    clock.enter("optimizer")
    machine.work(4, waiting=1)
    clock.leave()


def test_step_parts_add_up() -> None:
    machine = Machine()
    clock = StepClock(lambda: (machine.reduced, machine.waited), lambda: HostMark(lambda: machine.now))
    one_step(clock, machine)
    machine.work(100)  # between steps
    assert clock.seconds() == {
        "data": 1, "forward": 4, "backward": 6, "reduce": 1, "optimizer": 4, "checkpoint": 0, "wait": 1.625,
    }  # fmt: skip
    assert sum(clock.seconds().values()) == machine.now - 100
    assert clock.reduce_known


def test_engine_without_separate_reduce_time() -> None:
    machine = Machine()
    machine.reduced = None
    clock = StepClock(lambda: (machine.reduced, machine.waited), lambda: HostMark(lambda: machine.now))
    one_step(clock, machine)
    assert clock.seconds()["reduce"] == 0 and clock.seconds()["backward"] == 7
    assert not clock.reduce_known


class Stream:
    """A GPU: kernels run one after another, each from when it was launched on, or the one before has ended."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.free_at = machine, 0.0

    def launch(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.machine.now) + seconds

    def event(self, enable_timing: bool = False) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    """As torch.cuda.Event."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, float("nan")

    def record(self) -> None:
        self.at = max(self.stream.free_at, self.stream.machine.now)

    def query(self) -> bool:
        return self.at <= self.stream.machine.now

    def synchronize(self) -> None:
        self.stream.machine.now = max(self.stream.machine.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "torch raises where an event has not been passed"
        return 1e3 * (end.at - self.at)


def test_step_clock_times_kernels_with_one_synchronisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    stream = Stream(machine)
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    clock = StepClock(lambda: (None, 0.0), cuda_mark)
    for step in range(2):
        before = clock.seconds()
        clock.enter("data")
        machine.work(0.5)  # the host alone, while the GPU still updates
        clock.enter("forward")
        machine.work(0.25)  # launching
        stream.launch(2)
        clock.ended("forward")
        stream.launch(4)
        clock.ended("backward")
        launched = machine.now
        stream.event(True).record()
        machine.now = max(machine.now, stream.free_at)  # the losses have come
        assert machine.now > launched + 4
        there = machine.now
        clock.enter("wait")
        now = clock.synchronized_seconds()
        assert machine.now == there, "the step has waited already"
        assert now["forward"] - before["forward"] == 2 + (0.25 if step == 0 else 0)
        assert now["backward"] - before["backward"] == 4
        machine.work(1)
        clock.enter("optimizer")
        stream.launch(3)
        clock.leave()
        assert clock.seconds()["wait"] == step + 1  # and of the update nothing is known yet
        assert clock.seconds()["optimizer"] == 3 * step
        assert machine.now == there + 1
    assert clock.synchronized_seconds()["optimizer"] == 6
    assert sum(clock.synchronized_seconds().values()) == machine.now


def test_phases_outside_of_a_step_are_not_counted() -> None:
    machine = Machine()
    clock = StepClock(lambda: (machine.reduced, machine.waited), lambda: HostMark(lambda: machine.now))
    clock.ended("forward")  # a self-test of the engine
    machine.work(5)
    assert clock.seconds() == dict.fromkeys(PARTS, 0.0)


def test_step_parts_are_profiler_ranges() -> None:
    machine, open_ranges, seen = Machine(), [], []
    clock = StepClock(lambda: (machine.reduced, machine.waited), lambda: HostMark(lambda: machine.now))

    @contextmanager
    def annotate(part: str) -> Iterator[None]:
        open_ranges.append(part)
        seen.append(part)
        yield
        assert open_ranges.pop() == part

    clock.annotate = annotate
    one_step(clock, machine)
    assert open_ranges == []
    assert seen[:4] == ["data", "forward", "backward", "forward"] and seen[-2:] == ["wait", "optimizer"]


def test_the_slow_rank_is_named_when_the_window_is_full() -> None:
    slow = SlowRanks(window_steps=20)
    for step in range(20):
        assert slow.slowdowns() == {}
        slow.add([(1.0, 100), (1.0, 100), (1.0, 100), (1.5 if step % 2 else 1.3, 100)])
    assert slow.slowdowns() == {3: pytest.approx(1.4)}
    for _ in range(20):
        slow.add([(1.0, 100)] * 4)
    assert slow.slowdowns() == {}


@pytest.mark.parametrize(
    ("step", "slow"),
    [
        ([(1.0, 10), (1.25, 10)], [1]),  # of two ranks, the faster one is the measure
        ([(1.0, 10), (1.15, 10)], []),
        ([(3.0, 300), (2.0, 200), (0.1, 0)], []),  # a rank with more to do is not slow
    ],
)
def test_slow_ranks_of_a_single_step(step: list[tuple[float, int]], slow: list[int]) -> None:
    ranks = SlowRanks(window_steps=1)
    ranks.add(step)
    assert list(ranks.slowdowns()) == slow


@pytest.mark.parametrize("full", ["rank-0.json.gz", "rank-0.txt"])
def test_a_full_disk(tmp_path: Path, full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if full == "rank-0.txt":
        monkeypatch.setattr(step_clock, "publish_text", write)
    else:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", write)
    profile = Profile(tmp_path, 0, 1, StepClock(lambda: (0.0, 0.0)))
    for _ in range(3):
        profile.step()
    with pytest.raises(StorageError, match="No space left on device") as told:
        profile.step()
    assert full in str(told.value)
    assert not list(tmp_path.iterdir())
    profile.step()
    profile.finish()
    assert not list(tmp_path.iterdir()) and not profile.missed


def test_profile_directory_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("mine")
    profile = Profile(tmp_path / "profile", 0, 1, StepClock(lambda: (0.0, 0.0)))
    for _ in range(3):
        profile.step()
    with pytest.raises(StorageError, match="File exists"):
        profile.step()
    assert (tmp_path / "profile").read_text() == "mine"


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
    config = RunConfig.model_validate(
        {"model": {"config": {"model_type": "llama"}}, "data": {"path": "x"}, "checkpoint": {"every": 0}}
    )
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
