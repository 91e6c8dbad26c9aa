"""Saving from a GPU, without one: which stream each copy is in and what that waits for, with streams that only say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aliquot.checkpoint.background_task import SaveEvents
from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.live_parts import CpuCopier, GpuCopier, copier_for
from aliquot.checkpoint.save import Saver
from aliquot.config.schema import CheckpointSection
from aliquot.core.on_rank_0 import SingleRank
from aliquot.tensor_io.parts import Part
from tests.checkpoint.saving import PROGRESS
from tests.checkpoint.test_save import TENSORS, Store, assert_saved, poll


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
