"""Saving beside training: what reaches the disk is what was there when the save began, whatever training does next.

Saving from a GPU, without one: which stream each copy is in, with streams that only record.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aliquot.checkpoint.background_task import SaveEvents
from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.directories import complete_directories
from aliquot.checkpoint.live_parts import CpuCopier, GpuCopier, LiveParts, copier_for
from aliquot.checkpoint.restore import restore
from aliquot.checkpoint.save import Saver
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import UserError
from aliquot.core.on_rank_0 import SingleRank
from aliquot.tensor_io.parts import Part
from tests.checkpoint.saving import PROGRESS
from tests.tensor_io.world import FakeStore, Tensors
from tests.tools import warm

TENSORS: Tensors = [("a.weight", (7, 3)), ("b.weight", (5,)), ("c.weight", (40, 10))]


class Store(FakeStore):
    """All of a small model on one rank; reading waits for `gate`, as a slow disk would make it."""

    def __init__(self) -> None:
        super().__init__(TENSORS)
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    def read(self, part: Part, start: int, out: Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(30)
        if self.failure is not None:
            raise self.failure
        super().read(part, start, out)

    def update(self) -> None:
        for values in self.values.values():
            values += 1.0


def saver_of(
    root: Path,
    store: Store,
    warnings: list[str] | None = None,
    beat: Callable[[], None] = lambda: None,
    **settings: object,
) -> Saver:
    section = CheckpointSection.model_validate(settings)
    warn = ([] if warnings is None else warnings).append
    return Saver(root, store, CheckpointSpec(TENSORS), SingleRank(), section, SaveEvents(warn, heartbeat=beat))


def poll(saver: Saver) -> None:
    saver.poll([saver.report()])


def assert_saved(root: Path, step: int, expected: dict[Part, Tensor]) -> None:
    restored = FakeStore(TENSORS, zeros=True)
    state = restore(root / f"step-{step:08d}", restored, CheckpointSpec(TENSORS), SingleRank())
    assert state == PROGRESS | {"step": step}
    for key, values in expected.items():
        assert torch.equal(restored.values[key], values), key


def test_save_writes_values_of_its_start(tmp_path: Path) -> None:
    store = Store()
    expected = {key: values.clone() for key, values in store.values.items()}
    saver = saver_of(tmp_path, store)
    store.gate.clear()
    saver.start(1, PROGRESS | {"step": 1})
    poll(saver)  # a step's forward and backward: nothing is done yet
    assert saver.report() == {"done": False, "error": None, "kind": None}
    threading.Timer(0.1, store.gate.set).start()
    saver.before_update()  # waits for the piece that is being read; all else fits into checkpoint.buffer_bytes
    store.update()
    saver.finish()
    assert saver.report() is None
    assert_saved(tmp_path, 1, expected)


def test_update_waits_for_unwritten_parts(tmp_path: Path) -> None:
    store = Store()
    expected = {key: values.clone() for key, values in store.values.items()}
    saver = saver_of(tmp_path, store, buffer_bytes=4 * 5 * 3)  # room for the three smallest parts
    store.gate.clear()
    saver.start(1, PROGRESS | {"step": 1})
    opener = threading.Timer(0.2, store.gate.set)
    opener.start()
    saver.before_update()
    assert store.gate.is_set()
    store.update()
    saver.finish()
    assert_saved(tmp_path, 1, expected)


def test_many_saves_amid_updates(tmp_path: Path) -> None:
    store = Store()
    saver = saver_of(tmp_path, store, keep=20, buffer_bytes=200)
    expected = {}
    for step in range(1, 11):
        poll(saver)
        saver.before_update()
        store.update()
        expected[step] = {key: values.clone() for key, values in store.values.items()}
        saver.start(step, PROGRESS | {"step": step})
    saver.finish()
    for step, values in expected.items():
        assert_saved(tmp_path, step, values)


def test_save_duration_excludes_idle_time(tmp_path: Path) -> None:
    """It is noticed when ranks meet next, after an evaluation perhaps."""
    told: list[tuple[int, float, float]] = []
    section, store = CheckpointSection(), Store()
    events = SaveEvents([].append, on_saved=lambda *saved: told.append(saved))
    saver = Saver(tmp_path, store, CheckpointSpec(TENSORS), SingleRank(), section, events)
    saver.start(1, PROGRESS | {"step": 1})
    time.sleep(0.05)
    saver.finish()
    ((step, seconds, stall_s),) = told
    assert step == 1 and seconds == max(saver.worked_s, stall_s)


def test_synchronous(tmp_path: Path) -> None:
    store = Store()
    saver = saver_of(tmp_path, store, **{"async": False})
    saver.start(3, PROGRESS | {"step": 3})
    assert saver.report() is None
    assert_saved(tmp_path, 3, store.values)


@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_failing_save(tmp_path: Path, policy: str) -> None:
    store, warnings = Store(), []
    saver = saver_of(tmp_path, store, warnings, on_error=policy)
    saver.start(1, PROGRESS | {"step": 1})
    saver.finish()
    store.failure = OSError(28, "No space left on device")
    saver.start(2, PROGRESS | {"step": 2})
    if policy == "stop":
        with pytest.raises(UserError, match="No space left"):
            saver.finish()
    else:
        saver.finish()
        assert len(warnings) == 1 and "No space left" in warnings[0]
    saver.before_update()  # nothing to wait for
    assert [path.name for path in complete_directories(tmp_path)] == ["step-00000001"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    store.failure = None
    saver.start(3, PROGRESS | {"step": 3})
    saver.finish()
    assert_saved(tmp_path, 3, store.values)


def test_live_parts_end_an_abandoned_drain() -> None:
    store = Store()
    live = LiveParts(store, 0, CpuCopier())
    live.stop()
    with pytest.raises(Exception, match="abandoned"):
        live.read(store.parts()[0], 0, torch.empty(1))
    began = time.monotonic()
    live.release()
    assert time.monotonic() - began < 10


SLOW = """
import sys, time
from pathlib import Path
from aliquot.checkpoint import background_task
from aliquot.distributed.liveness.liveness import StepWatchdog
from aliquot.distributed.liveness.watchdog import WatchedRank
from aliquot.distributed.topology import Topology
from tests.checkpoint.test_save import Store, TENSORS, saver_of

class Slow(Store):
    def read(self, part, start, out):
        time.sleep(float(sys.argv[2]))
        super().read(part, start, out)

background_task._PROGRESS_INTERVAL_S = 0.05
folder = Path(sys.argv[1])
store, rank = Slow(), WatchedRank(Topology(0, 1, 0, 1, 0, 1, "cpu", 1, ()), 1.2, lambda: "saving step 5")
watchdog = StepWatchdog(rank, folder / "stacks.txt", grace_s=0.1).__enter__()
saver = saver_of(folder, store, beat=watchdog.beat, buffer_bytes=0)
saver.start(1, {"step": 1})
saver.before_update()
saver.start(2, {"step": 2})  # waits for the first
saver.finish()
watchdog.stop()
"""


@pytest.mark.parametrize(("each_s", "ends"), [(0.17, 0), (30, 1)])
def test_watchdog_tells_slow_saves_from_hanging_saves(tmp_path: Path, each_s: float, ends: int) -> None:
    """Nine parts, each far quicker than the watchdog, all of them far slower; then one that takes longer alone."""
    done = warm.run("-c", SLOW, tmp_path, str(each_s), cwd=warm.REPOSITORY)
    assert done.returncode == ends, done.stderr
    assert ("no progress for 1.2 s (launch.step_timeout_s) while saving step 5" in done.stderr) == (ends == 1)
    assert len(complete_directories(tmp_path)) == (2 if ends == 0 else 0)


class Cuda:
    """Streams as torch.cuda has them: one is current in each thread, and an event is of the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda, self.current = self, threading.local()
        self.launched = 0  # kernels of training

        class Event:
            def record(self) -> None:
                assert cuda.stream is None, "of the stream of kernels"
                self.behind = cuda.launched

        class Stream:
            behind = -1

            def wait_event(self, event: Event) -> None:
                self.behind = event.behind

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            self.current.stream = chosen
            yield
            self.current.stream = None

        for real, stand_in in (("Event", Event), ("Stream", Stream), ("stream", stream)):
            assert hasattr(torch.cuda, real)
            monkeypatch.setattr(torch.cuda, real, stand_in)
        pinned = self.pinned = []
        empty = torch.empty

        def room(*size: int, pin_memory: bool = False, **options: object) -> Tensor:
            if pin_memory:
                pinned.append(size[0])
            return empty(*size, **options)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(torch, "empty", room)

    @property
    def stream(self) -> object:
        return getattr(self.current, "stream", None)


class OnGpu(Store):
    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.copied: list[tuple[str, int]] = []
        self.behind_gate = threading.Event()

    def read(self, part: Part, start: int, out: Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.behind_gate.set()
        super().read(part, start, out)
        stream = self.cuda.stream
        assert stream is not None, "beside the kernels, not among them"
        self.copied.append((threading.current_thread().name, stream.behind))  # type: ignore[attr-defined]


def test_copies_wait_for_earlier_kernels_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    store = OnGpu(cuda)
    events = SaveEvents(lambda _: None)
    saver = Saver(tmp_path, store, CheckpointSpec(TENSORS), SingleRank(), CheckpointSection(), events, GpuCopier)
    expected = {key: values.clone() for key, values in store.values.items()}
    store.gate.clear()
    cuda.launched = 7
    saver.start(3, PROGRESS | {"step": 3})
    cuda.launched = 99  # the next forward and backward pass
    assert store.behind_gate.wait(30)  # else the training thread may have copied all before it
    threading.Timer(0.2, store.gate.set).start()
    saver.before_update()
    store.update()
    saver.finish()
    poll(saver)
    assert_saved(tmp_path, 3, expected)
    assert {behind for _, behind in store.copied} == {7}
    assert {name == threading.current_thread().name for name, _ in store.copied} == {True, False}
    assert len(cuda.pinned) >= len(TENSORS)  # what the training thread copied


def test_only_a_rank_on_a_gpu_has_streams() -> None:
    assert copier_for("cpu") is CpuCopier and copier_for("cuda") is GpuCopier
