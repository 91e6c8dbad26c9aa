"""The memory ledger measures this process and keeps the right mark of each phase."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest

from aliquot.core.on_rank_0 import SingleRank
from aliquot.machine.memory import reset_peak_rss
from aliquot.observe.ledger import Ledger, tables
from tests.tools.console_text import console_text

MIB = 1 << 20


def occupy(size: int) -> None:
    """Hold `size` bytes for a moment."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * size)


def test_peak_belongs_to_its_phase() -> None:
    if not reset_peak_rss():
        pytest.skip("this kernel does not permit resetting the peak")
    ledger = Ledger(0)
    ledger.mark("process start", {})
    occupy(128 * MIB)
    ledger.mark("model built", {})
    ledger.mark("weights loaded", {})
    start, built, loaded = ledger.rows()
    assert built["peak_bytes"] > start["pss_bytes"] + 100 * MIB
    assert loaded["peak_bytes"] < built["peak_bytes"] - 50 * MIB


def test_steady_peak_covers_all_steps() -> None:
    ledger = Ledger(1)
    ledger.mark("first step", {"weights": 1})
    ledger.mark("first step", {"weights": 2})
    occupy(128 * MIB)
    ledger.mark("steady peak", {"weights": 3})
    high = _over_now(ledger.rows()[1])
    ledger.mark("steady peak", {"weights": 4})
    first, steady = ledger.rows()
    assert first["accounted_bytes"] == {"weights": 1} and steady["accounted_bytes"] == {"weights": 4}
    assert _over_now(steady) >= high - MIB and high > 100 * MIB
    assert first["rank"] == 1


def _over_now(row: dict[str, Any]) -> int:
    """Independent of how what is shared is divided, which other processes change by beginning and ending."""
    return int(row["peak_bytes"] - row["pss_bytes"])


def test_unknown_phase_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="lunch"):
        Ledger(0).mark("lunch", {})


def test_file_and_table_show_the_largest_over_the_ranks(tmp_path: Path) -> None:
    rows = []
    for rank in range(2):
        ledger = Ledger(rank)
        ledger.mark("first step", {"weights": (rank + 1) << 30, "gradients": 1 << 20})
        rows += ledger.rows()
    rows[0]["peak_bytes"] = 7 << 30
    told: Any = Ledger(0)
    told.plan = {"fits": True}
    told.mark("first step", {})
    told.publish(tmp_path / "ledger.json", SingleRank(), {"engine": "host", "machine": {"cpu": "some"}})
    written = json.loads((tmp_path / "ledger.json").read_text())
    assert written == {
        "engine": "host", "machine": {"cpu": "some"}, "plan": {"fits": True}, "rows": told.rows(),
    }  # fmt: skip
    text = console_text(*tables(rows))
    assert "first step" in text and "7,168" in text and "2,048" in text and "gradients" in text
    assert "model built" not in text


@pytest.mark.parametrize(("mib", "number"), [(800, "800"), (9_000, "9,000"), (12_345, "12.1"), (700_000, "683.6")])
@pytest.mark.parametrize("last", ["shared", "gathered"])  # no engine has both
def test_ledger_fits_80_columns(mib: int, number: str, last: str) -> None:
    ledger = Ledger(0)
    named = ["weights", "gradients", "moments", "activations", last]
    ledger.mark("optimizer state", dict.fromkeys(named, mib * MIB))
    row = ledger.rows()[0]
    row |= dict.fromkeys(("peak_bytes", "planned_bytes"), mib * MIB)
    text = console_text(*tables([row]), width=80)
    assert all(head in text for head in (*named, "planned", "peak")) and "…" not in text
    assert text.count(number) == 2 + len(named) and max(map(len, text.splitlines())) <= 80
