from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.config.read_config import read_config
from aliquot.core.errors import DoesNotFitError
from aliquot.machine import memory
from aliquot.planner.fit_check import check_start
from tests.runs import write_config


def test_check_start_refuses_too_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    check_start(read_config(config), 2, 1 << 30)
    with pytest.raises(DoesNotFitError, match=r"processes of 4 ranks need 0\.\d\d GiB .* has 0\.50 GiB\. Lower launch"):
        check_start(read_config(config), 4, 1 << 29)
    monkeypatch.setattr(memory, "memory_limit", lambda: 1 << 29)
    result = CliRunner().invoke(app, ["train", str(config), "launch.ranks=4"])
    assert result.exit_code == 2 and "Lower launch.ranks" in result.stderr and "[does-not-fit]" in result.stderr
    assert not (tmp_path / "run").exists()
