"""The order of copies between host memory and a GPU, by recorded calls: no GPU is needed for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from aliquot.engines.host import compute_device
from aliquot.engines.host.compute_device import DeviceGradients, DeviceWeights
from aliquot.engines.host.host_gradients import HostGradients
from aliquot.engines.host.shared_weights import SharedWeights
from aliquot.machine import device_copies

CPU = torch.device("cpu")


class Stream:
    """A stream that notes what is put into it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} wait for {other.name}")

    def record_event(self) -> int:
        self.notes.append(f"event {len(self.notes)} in {self.name}")
        return len(self.notes) - 1

    def wait_event(self, event: int) -> None:
        self.notes.append(f"{self.name} wait for event {event}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order. Copies happen at once, in the stream that is current."""
    done: list[str] = []
    current = [Stream("kernels", done)]

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking  # a rank that spins would take a core from the sums

        def record(self) -> None:
            done.append(f"event in {current[-1].name}")

        def synchronize(self) -> None:
            done.append("synchronize")

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    copy, empty = Tensor.copy_, torch.empty

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        done.append(f"copy in {current[-1].name}" + ("" if non_blocking else ", waiting"))
        return copy(target, source)

    def pageable(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty(*shape, **options)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("synchronize"))
    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(Tensor, "copy_", copy_)
    for name in ("pin", "unpin"):
        monkeypatch.setattr(compute_device, name, lambda memory, name=name: done.append(f"{name} {memory.nbytes}"))
    for module in (compute_device, device_copies):
        monkeypatch.setattr(module, "copy_stream", lambda _: Stream("copies", done))
    return done


class Shared:
    """Weights in the memory of the host."""

    def __init__(self, *sizes: int) -> None:
        self.memory = torch.zeros(24, dtype=torch.uint8)
        self.values = [torch.ones(size) for size in sizes]

    def views(self) -> list[Tensor]:
        return self.values


def test_weights_are_copied_once_and_kernels_wait_for_them(notes: list[str]) -> None:
    shared = Shared(2, 4)
    on_device = DeviceWeights(cast(SharedWeights, shared), CPU)
    on_device.refresh([0, 1])
    on_device.refresh([0])
    assert notes == ["pin 24", "copy in copies", "copy in copies", "kernels wait for copies"]
    notes.clear()
    shared.values[1].fill_(3)
    on_device.outdate([1])  # kernels of an evaluation may still use the old weights
    on_device.refresh([0, 1])
    assert notes == ["copies wait for kernels", "copy in copies", "kernels wait for copies"]
    assert on_device.tensors[1].tolist() == [3, 3, 3, 3]
    notes.clear()
    on_device.close()
    assert notes == ["synchronize", "unpin 24"]


def test_a_copy_waits_until_the_layer_in_its_slot_is_computed(notes: list[str]) -> None:
    on_device = DeviceWeights(cast(SharedWeights, Shared(1, 1, 1, 1)), CPU, [(nn.Identity(), [at]) for at in range(4)])
    on_device._has_backward = [True] * 4
    for layer in range(4):
        on_device._use(layer)
    first_end = next(index for index, note in enumerate(notes) if note.startswith("event"))
    assert notes[-3:] == [f"copies wait for event {first_end}", "copy in copies", "kernels wait for copies"]
    assert notes.count("copy in copies") == 4
    notes.clear()
    for layer in (3, 2, 1):
        on_device._use_in_backward(layer)
    # The next copy begins before the kernels of layer 1, after those of layer 3, and nothing waits for it yet.
    assert notes[1] == "event 1 in kernels" and notes[-2:] == ["copies wait for event 1", "copy in copies"]
    assert notes.count("copy in copies") == 1


def test_gradients_are_staged_in_order_after_their_copies(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Staging:
        def stage(self, index: int, gradient: Tensor) -> None:
            notes.append(f"stage {index} {gradient.tolist()}")

        def end_micro_batch(self) -> None:
            notes.append("end")

    monkeypatch.setattr(compute_device, "IN_FLIGHT_BYTES", 20)
    gradients = DeviceGradients(cast(HostGradients, Staging()), [], CPU)
    begun = ["copies wait for kernels", "copy in copies", "event in copies"]
    for index, values in enumerate(([1.0, 2.0], [3.0], [4.0, 5.0, 6.0])):
        gradients.stage(index, torch.tensor(values))
        # The third gradient is too large while the first is being copied.
        assert notes == (["synchronize", "stage 0 [1.0, 2.0]"] if index == 2 else []) + begun
        notes.clear()
    gradients.end_micro_batch()
    assert notes == ["synchronize", "stage 1 [3.0]", "synchronize", "stage 2 [4.0, 5.0, 6.0]", "end"]


def test_memory_that_cannot_be_locked_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> Any:
            return 2

    def check(status: int) -> None:
        raise RuntimeError(f"out of memory ({status})")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    with pytest.raises(device_copies.DeviceError, match=r"cannot lock 24 bytes of host memory .*shard\.engine: fsdp"):
        device_copies.pin(torch.zeros(24, dtype=torch.uint8))
