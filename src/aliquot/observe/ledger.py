"""The memory ledger: what each rank held at the end of each phase of a run, measured, beside what we account for.

The memory of a rank is, here and wherever a run or a plan states it, what it has alone and its share of what it has in
common with others (PSS). All ranks of a host together have as much as the host has lost to them.
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
from aliquot.machine.gpu_memory import Gpu
from aliquot.machine.memory import memory_use, peak_pss, reset_peak_rss

STEADY_PEAK = "steady peak"
PHASES = (
    "process start",
    # Only DeepSpeed tells what it builds.
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

OFFLOADED = ("weights", "gradients", "moments")
_SHORT = {  # the table fits 80 columns
    "weights": "weig.", "gradients": "grad.", "moments": "mom.", "activations": "activ.", "gathered": "gath.",
}  # fmt: skip
_LARGE_BYTES = 10_000 << 20  # from which on they are told in GiB

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], int]]

_OF_HOST: Columns = {
    "own": lambda row: row["private_bytes"],
    "share": lambda row: row["pss_bytes"] - row["private_bytes"],
}
_OF_GPU: Columns = {
    "tensors": lambda row: row["allocated_bytes"],
    "reserved": lambda row: row["reserved_bytes"],
    "beside": lambda row: row["beside_bytes"],
}


class Ledger:
    """One rank's rows, in bytes. A phase marked twice keeps the first mark, the steady peak the last."""

    def __init__(self, rank: int, gpu: Gpu | None = None, offloads: bool = False) -> None:
        """`gpu`: on which the rank computes; its memory is measured beside that of the process. `offloads`: what the
        model keeps from step to step lies in the machine's memory all the same."""
        self.gpu = gpu
        self._offloads = offloads
        self._rank = rank
        # `peak_bytes`: phase -> the most that a rank was foreseen to hold of the memory that it computes in; on a GPU
        # `host_peak_bytes` is of the machine's.
        self.plan: Mapping[str, Any] = {}
        self._rows: dict[str, Row] = {}

    def mark(self, phase: str, accounted: Mapping[str, int] | Callable[[], Mapping[str, int]]) -> bool:
        """`phase` ends now, with `accounted` bytes by category live, asked for only where they are kept. The peak is
        the one since the mark before.

        The steady peak does not restart the peak, so that its last mark covers every step after the first. False: the
        first mark stays.
        """
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is not a phase of the ledger")
        if phase in self._rows and phase != STEADY_PEAK:
            return False
        now, kept = memory_use(), dict(accounted() if callable(accounted) else accounted)
        of_gpu = {}
        if self.gpu is not None:
            on_host = {name: kept.pop(name) for name in OFFLOADED if name in kept} if self._offloads else {}
            of_gpu = {"gpu": {**asdict(self.gpu.memory()), "accounted_bytes": kept}}
            kept = on_host
        self._rows[phase] = {
            "rank": self._rank,
            "phase": phase,
            **asdict(now),
            "peak_bytes": peak_pss(now),
            "accounted_bytes": kept,
            **of_gpu,
        }
        if phase != STEADY_PEAK:
            reset_peak_rss()  # where that is not permitted the peaks are those since the process began
            if self.gpu is not None:
                self.gpu.reset_peak()
        return True

    def rows(self) -> list[Row]:
        planned = self.plan.get("peak_bytes", {})
        if self.gpu is None:
            return [row | {"planned_bytes": planned.get(phase)} for phase, row in self._rows.items()]
        of_host = self.plan.get("host_peak_bytes", {})
        return [
            row | {"planned_bytes": of_host.get(phase), "gpu": row["gpu"] | {"planned_bytes": planned.get(phase)}}
            for phase, row in self._rows.items()
        ]

    def publish(self, path: Path, ranks: Ranks, about: Mapping[str, Any]) -> list[Row]:
        """Write what all ranks have marked so far, the plan and what the run is made of; returns it. Collective."""
        rows = [row for of_rank in ranks.gather(self.rows()) for row in of_rank]
        if ranks.rank == 0:
            with writing(path):
                publish_text(path, json.dumps({**about, "plan": self.plan, "rows": rows}, indent=1) + "\n")
        return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    """Of GPU memory, where ranks compute on GPUs, and of the machine's.

    A line a phase, each number the largest over the ranks, so that they need not add up. The plan is of the
    peak, and its error is signed: positive where less was needed than planned.
    """
    of_gpus = [{"phase": row["phase"], **row["gpu"]} for row in rows if "gpu" in row]
    how = "the largest of all; peak within a phase, the rest at its end"
    of_host = _table(rows, f"of a rank, {how}\nown: what it has alone; share: its part of what is shared", _OF_HOST)
    return [_table(of_gpus, f"of a rank's GPU, {how}", _OF_GPU), of_host] if of_gpus else [of_host]


def _table(rows: Sequence[Row], title: str, columns: Columns) -> Table:
    found = (category for row in rows for category, size in row["accounted_bytes"].items() if size)
    categories = list(dict.fromkeys(found))
    most = max(max(row["peak_bytes"], row.get("planned_bytes") or 0) for row in rows)
    unit, divisor, form = ("GiB", 2**30, ",.1f") if most >= _LARGE_BYTES else ("MiB", 2**20, ",.0f")
    # No frame: with one, a terminal of 80 columns cuts the words.
    result = Table(
        title=f"{unit} {title}",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    result.add_column("phase", no_wrap=True)
    for column in ("plan", "peak", "err. %", *columns, *categories):
        result.add_column(_SHORT.get(column, column), justify="right", no_wrap=True)
    for phase in PHASES:
        of_phase = [row for row in rows if row["phase"] == phase]
        if not of_phase:
            continue
        measured = [max(map(size_of, of_phase)) for size_of in columns.values()]
        peak, planned = max(row["peak_bytes"] for row in of_phase), of_phase[0].get("planned_bytes")
        foreseen = ("", f"{peak / divisor:{form}}", "")
        if planned:
            foreseen = (f"{planned / divisor:{form}}", foreseen[1], f"{100 * (planned / peak - 1):+.1f}")
        accounted = [max(row["accounted_bytes"].get(category, 0) for row in of_phase) for category in categories]
        result.add_row(phase, *foreseen, *(f"{size / divisor:{form}}" for size in (*measured, *accounted)))
    return result
