"""The next batch is laid out ahead and copied to a GPU while the current one is computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from aliquot.data.batch_prefetch import BatchCopier, BatchPrefetcher
from aliquot.data.batches import Batches, StepBatch
from tests.data.stores import numbered
from tests.data.test_batches import batches, facts


class Noted(Batches):
    """Tells which steps have been laid out."""

    def __init__(self, made: Batches, fails_at: int | None = None) -> None:
        vars(self).update(vars(made))
        self.laid_out = [threading.Event() for _ in range(10)]
        self.fails_at = fails_at

    def step_batch(self, step: int, rank: int, world_size: int) -> StepBatch:
        if step == self.fails_at:
            raise OSError(5, "Input/output error")
        batch = super().step_batch(step, rank, world_size)
        self.laid_out[step].set()
        return batch


def test_prefetched_batches_equal_direct_batches() -> None:
    made = Noted(batches(numbered([3, 17, 2, 9, 40, 5, 5, 8, 12, 31])))
    with BatchPrefetcher(made, 1, 2, first=3, stop=7) as ahead:
        for step in range(3, 7):
            taken, expected = ahead.take(step), batches(made.sources[0].store).step_batch(step, 1, 2)
            assert [micro and facts(micro) for micro in taken.micro_batches] == [
                micro and facts(micro) for micro in expected.micro_batches
            ]
            assert (taken.predicted, taken.tokens, taken.epoch) == (expected.predicted, expected.tokens, expected.epoch)
            if step < 6:  # nobody has asked for it yet
                assert made.laid_out[step + 1].wait(30)
    assert not made.laid_out[7].is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aliquot-batches")]


def test_prefetch_error_is_raised_at_its_step() -> None:
    with BatchPrefetcher(Noted(batches(numbered([16] * 20)), fails_at=1), 0, 1, first=0, stop=3) as ahead:
        ahead.take(0)
        with pytest.raises(OSError, match="Input/output"):
            ahead.take(1)


class Cuda:
    """As torch.cuda, and what was done in order. The GPU itself is the meta device: it has shapes alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, str]] = []  # what, in which thread
        self.pinned: list[Tensor] = []
        self.current = threading.local()
        cuda, to = self, Tensor.to

        class Event:
            def record(self) -> None:
                assert cuda.stream == "copies"
                cuda.note("event")

        class Stream:
            def __init__(self, name: str = "copies") -> None:
                self.name = name

            def wait_event(self, _: Event) -> None:
                assert self.name == "kernels"
                cuda.note("wait")

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            self.current.stream = chosen.name
            yield
            self.current.stream = "kernels"

        def pin_memory(tensor: Tensor) -> Tensor:
            self.pinned.append(tensor)
            return tensor

        def sent(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
            assert device == torch.device("cuda", 3) and non_blocking and self.stream == "copies"
            assert any(tensor is each for each in self.pinned), "from pageable memory it would be waited for"
            self.note("copy")
            return to(tensor, "meta")

        for name, stand_in in (
            ("Event", Event), ("Stream", Stream), ("stream", stream), ("current_device", lambda: 3),
            ("current_stream", lambda: Stream("kernels")),
        ):  # fmt: skip
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(Tensor, "to", sent)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.note("kept"))

    @property
    def stream(self) -> str:
        return getattr(self.current, "stream", "kernels")

    def note(self, what: str) -> None:
        self.done.append((what, threading.current_thread().name.partition("_")[0]))


def test_copies_are_made_ahead_and_kernels_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = batches(numbered([3, 17, 2, 9, 40, 5, 5, 8, 12, 31]))
    expected = [made.step_batch(step, 1, 2) for step in range(3)]
    cuda = Cuda(monkeypatch)
    with BatchPrefetcher(made, 1, 2, first=0, stop=3, gpu_copier=BatchCopier()) as ahead:
        taken = [ahead.take(step) for step in range(3)]
    here = [each for batch in expected for each in batch.micro_batches if each is not None]
    there = [each for batch in taken for each in batch.micro_batches if each is not None]
    assert len(here) == len(there) > 0
    rows = [each for each in cuda.pinned if each.dim() == 2]
    for before, after, row in zip(here, there, rows, strict=True):
        assert torch.equal(row, torch.stack([before.input_ids, before.labels, before.position_ids]))
        assert after.input_ids.is_meta and after.edges == before.edges
        assert after.chosen is not None and after.chosen.learned == before.predicted
    own, main = "aliquot-batches", threading.current_thread().name
    assert {name for what, name in cuda.done if what in ("copy", "event")} == {own}
    assert {name for what, name in cuda.done if what in ("wait", "kept")} == {main}
    assert [what for what, _ in cuda.done].count("wait") == 3
    order = [what for what, _ in cuda.done if what in ("event", "wait")]
    assert order[0] == "event" and all(order[:i].count("event") >= order[:i].count("wait") for i in range(7))
    assert [batch.predicted for batch in taken] == [batch.predicted for batch in expected]
