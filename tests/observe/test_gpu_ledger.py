"""A rank on a GPU: its GPU's memory beside the machine's, each compared with what was foreseen of it."""

from __future__ import annotations

from typing import Any

import pytest

from aliquot.machine.memory import Gpu, GpuMemory
from aliquot.observe import ledger
from aliquot.observe.ledger import Ledger, tables
from tests.tools.console_text import console_text

MIB = 1 << 20


class Recorded(Gpu):
    """Each phase a GiB more than the one before."""

    def __init__(self) -> None:
        self.asked = self.resets = 0

    def memory(self) -> GpuMemory:
        self.asked += 1
        held = self.asked << 30
        return GpuMemory(held - 100 * MIB, held, beside_bytes=600 * MIB, peak_bytes=held + 700 * MIB)

    def reset_peak(self) -> None:
        self.resets += 1


@pytest.fixture(autouse=True)
def _host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "peak_pss", lambda now: 300 * MIB)


def marked(offloads: bool) -> tuple[Recorded, list[dict[str, Any]]]:
    gpu = Recorded()
    record = Ledger(0, gpu, offloads)
    record.plan = {"peak_bytes": {"first step": 2 << 30}, "host_peak_bytes": {"first step": 900 * MIB}}
    record.mark("model built", {"weights": 7 * MIB})
    record.mark("first step", {"weights": 7 * MIB, "moments": 14 * MIB, "activations": 5 * MIB})
    record.mark("steady peak", {})
    return gpu, record.rows()


def test_plan_and_measurement_are_of_the_same_memory() -> None:
    gpu, rows = marked(offloads=False)
    step = rows[1]
    assert step["gpu"]["planned_bytes"] == 2 << 30 and step["planned_bytes"] == 900 * MIB
    assert step["gpu"]["peak_bytes"] == (2 << 30) + 700 * MIB and step["peak_bytes"] == 300 * MIB
    assert gpu.resets == 2  # the last mark of the steady peak covers every step after the first


def test_offloaded_states_count_as_machine_memory() -> None:
    for offloads in (False, True):
        _, rows = marked(offloads)
        on_host = {"weights": 7 * MIB, "moments": 14 * MIB} if offloads else {}
        assert rows[1]["accounted_bytes"] == on_host
        assert rows[1]["gpu"]["accounted_bytes"]["activations"] == 5 * MIB
        assert ("weights" in rows[1]["gpu"]["accounted_bytes"]) != offloads


def test_both_are_shown() -> None:
    on_gpu, on_host = (console_text(table, width=120) for table in tables(marked(offloads=True)[1]))
    assert "GPU memory" in on_gpu and "activations" in on_gpu and "2,748" in on_gpu
    assert "GPU" not in on_host and "moments" in on_host and "900" in on_host and "activations" not in on_host
