"""The memory ledger: the measured memory of each rank at the end of each phase, and the sizes of its known tensors.

Here and in plans, the memory of a rank is its PSS: its private memory, plus its share of memory that several processes
share. The PSS of all ranks of a node adds up to the memory that the ranks use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from aliquot.core.errors import writing
from aliquot.core.small_files import publish_text
from aliquot.distributed.ranks import Ranks
from aliquot.machine.memory import Gpu, memory_use, peak_pss, reset_peak_rss

STEADY_PEAK = "steady peak"
PHASES = (
    "process start",
    # The phases up to "after ZeRO init" exist only with engine deepspeed.
    "after load",
    "after bf16 partitions",
    "after fp32 master",
    "after optimizer state",
    "after ZeRO init",
    "model built",
    "weights loaded",
    "optimizer state",
    "first forward",
    "first backward",
    "first step",
    STEADY_PEAK,
)

OFFLOADED = ("weights", "gradients", "moments", "shared")
_MIN_GIB_BYTES = 10_000 << 20  # from this size on, the table is in GiB

Row = dict[str, Any]


class Ledger:
    """Measures the memory of one rank: a row of bytes per phase.

    Each phase is recorded once, except for the steady peak, of which the last mark counts.
    """

    def __init__(self, rank: int, gpu: Gpu | None = None, offloads: bool = False) -> None:
        """Args: offloads: weights, gradients and moments are in host memory although the rank computes on `gpu`."""
        self.gpu = gpu
        self.offloads = offloads
        self._rank = rank
        # The plan of the run. `peak_bytes` has the planned peak of each phase, of GPU memory if the rank computes on a
        # GPU. Then `host_peak_bytes` has the planned peaks of host memory.
        self.plan: Mapping[str, Any] = {}
        self._rows: dict[str, Row] = {}

    def mark(self, phase: str, accounted: Mapping[str, int] | Callable[[], Mapping[str, int]]) -> bool:
        """Record the memory at the end of `phase` and the peak since the previous mark.

        Return False, and record nothing, if the phase was recorded before. A mark of the steady peak does not reset the
        peak, so that the last mark covers every step after the first.

        Args:
            accounted: bytes of known tensors by category, or a function that is called only if the mark is recorded.
        """
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is not a phase of the ledger")
        if phase in self._rows and phase != STEADY_PEAK:
            return False
        now, sizes = memory_use(), dict(accounted() if callable(accounted) else accounted)
        row: Row = {
            "rank": self._rank,
            "phase": phase,
            **asdict(now),
            "peak_bytes": peak_pss(now),
            "accounted_bytes": sizes,
        }
        if self.gpu is not None:
            on_host = OFFLOADED if self.offloads else ()
            row["accounted_bytes"] = {name: sizes.pop(name) for name in on_host if name in sizes}
            row["gpu"] = {**asdict(self.gpu.memory()), "accounted_bytes": sizes}
        self._rows[phase] = row
        if phase != STEADY_PEAK:
            reset_peak_rss()  # without permission to reset, peaks are since the start of the process
            if self.gpu is not None:
                self.gpu.reset_peak()
        return True

    def rows(self) -> list[Row]:
        planned = self.plan.get("peak_bytes", {})
        if self.gpu is None:
            return [row | {"planned_bytes": planned.get(phase)} for phase, row in self._rows.items()]
        host_planned = self.plan.get("host_peak_bytes", {})
        return [
            row | {"planned_bytes": host_planned.get(phase), "gpu": row["gpu"] | {"planned_bytes": planned.get(phase)}}
            for phase, row in self._rows.items()
        ]

    def publish(self, path: Path, ranks: Ranks, about: Mapping[str, Any]) -> list[Row]:
        """Gather the rows of all ranks, write them with `about` and the plan to `path`, and return them. Collective."""
        rows = [row for rank_rows in ranks.gather(self.rows()) for row in rank_rows]
        if ranks.rank == 0:
            with writing(path):
                publish_text(path, json.dumps({**about, "plan": self.plan, "rows": rows}, indent=1) + "\n")
        return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    """Build a table of host memory with a line for each phase and, if ranks compute on GPUs, a table of GPU memory.

    Each number is the maximum over ranks, so the numbers of a line need not add up. The last columns are the sizes of
    known tensors at the end of the phase.
    """
    gpu_rows = [{"phase": row["phase"], **row["gpu"]} for row in rows if "gpu" in row]
    host = _table(rows, "memory")
    return [_table(gpu_rows, "GPU memory"), host] if gpu_rows else [host]


def _table(rows: Sequence[Row], memory: str) -> Table:
    used = (category for row in rows for category, size in row["accounted_bytes"].items() if size)
    categories = list(dict.fromkeys(used))
    largest = max(max(row["peak_bytes"], row.get("planned_bytes") or 0) for row in rows)
    unit, divisor, form = ("GiB", 2**30, ",.1f") if largest >= _MIN_GIB_BYTES else ("MiB", 2**20, ",.0f")
    # Without a frame, the table fits 80 columns.
    result = Table(title=f"{memory} of the largest rank in {unit}", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    result.add_column("phase")
    for column in ("planned", "peak", *categories):
        result.add_column(column, justify="right", no_wrap=True)
    for phase in sorted({row["phase"] for row in rows}, key=PHASES.index):
        phase_rows = [row for row in rows if row["phase"] == phase]
        peak, planned = max(row["peak_bytes"] for row in phase_rows), phase_rows[0].get("planned_bytes")
        accounted = [max(row["accounted_bytes"].get(category, 0) for row in phase_rows) for category in categories]
        sizes = [f"{size / divisor:{form}}" if size is not None else "" for size in (planned, peak, *accounted)]
        result.add_row(phase, *sizes)
    return result
