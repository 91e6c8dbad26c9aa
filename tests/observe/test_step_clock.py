"""Every moment of a step belongs to one part; slow ranks are named; profiles that cannot be written leave nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from aliquot.core.errors import StorageError
from aliquot.observe import step_clock
from aliquot.observe.step_clock import PARTS, HostMark, Profile, SlowRanks, StepClock, cuda_mark


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


def test_of_two_ranks_the_faster_is_the_measure() -> None:
    slow = SlowRanks(window_steps=1)
    slow.add([(1.0, 10), (1.25, 10)])
    assert list(slow.slowdowns()) == [1]
    slow.add([(1.0, 10), (1.15, 10)])
    assert slow.slowdowns() == {}


def test_a_rank_with_more_to_do_is_not_slow() -> None:
    slow = SlowRanks(window_steps=1)
    slow.add([(3.0, 300), (2.0, 200), (0.1, 0)])
    assert slow.slowdowns() == {}


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
