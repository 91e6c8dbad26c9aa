"""The start-up check of fsdp looks at the path that carries its collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_ranks

WORKER = Path(__file__).parent / "fsdp_collectives_worker.py"


@pytest.mark.parametrize("kind", ["gloo", "sound"])
def test_check_passes_working_collectives(tmp_path: Path, kind: str) -> None:
    run_ranks(WORKER, 2, tmp_path, kind)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["passed", "passed"]


def test_check_fails_if_shared_memory_shows_nothing(tmp_path: Path) -> None:
    run_ranks(WORKER, 2, tmp_path, "deaf")
    for rank in range(2):
        assert "a reduce-scatter of known numbers gave" in (tmp_path / f"{rank}.txt").read_text()
