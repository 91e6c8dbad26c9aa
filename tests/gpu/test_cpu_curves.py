"""cpu_curves.json is what this CPU trains: no GPU is needed for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.cpu_curves import CASES, expected, trained


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_curve_in_the_file_is_current(tmp_path: Path, name: str) -> None:
    tolerance = 1e-4 if CASES[name].precision == "fp32" else 2e-2
    assert trained(tmp_path, name) == pytest.approx(expected(name), rel=tolerance)
