"""Which GPU the threads of a rank use, by recorded calls: no GPU is needed for that."""

from __future__ import annotations

import threading

import pytest
import torch

from aliquot.checkpoint.background_task import BackgroundTask
from aliquot.machine.device_copies import on_this_gpu


def test_saving_thread_uses_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: chosen.append((gpu, threading.current_thread().name)))
    task = BackgroundTask("aliquot-save", lambda: list(chosen))
    assert task.join(30) and task.result == [(3, "aliquot-save")]


def test_work_on_cpus_stays_as_it_is() -> None:
    work = threading.Event().set
    assert on_this_gpu(work) is work
