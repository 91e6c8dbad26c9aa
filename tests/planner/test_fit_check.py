from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.config.read_config import read_config
from aliquot.core.errors import DoesNotFitError
from aliquot.machine import memory
from aliquot.machine.cpu import read_cpu
from aliquot.planner.fit_check import check_start
from tests.runs import command, write_config


def test_check_start_refuses_too_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    check_start(read_config(config), 2, 1 << 30)
    with pytest.raises(DoesNotFitError, match=r"processes of 4 ranks need 0\.\d\d GiB .* has 0\.50 GiB\. Lower launch"):
        check_start(read_config(config), 4, 1 << 29)
    monkeypatch.setattr(memory, "memory_limit", lambda: 1 << 29)
    result = CliRunner().invoke(app, ["train", str(config), "launch.ranks=4"])
    assert result.exit_code == 2 and "Lower launch.ranks" in result.stderr and "[does-not-fit]" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(read_cpu().usable_cores < 2, reason="launch.ranks: auto starts one rank on one core")
def test_automatic_ranks_are_as_many_as_fit(tmp_path: Path) -> None:
    """Each of two ranks needs about 0.43 GiB, and a single one 0.48 GiB."""
    train = {"max_steps": 1, "global_batch_size": 4}
    config = write_config(tmp_path, "run", launch={"ranks": "auto"}, train=train, shard={"memory": 0.65})
    planned = command("plan", config, "--json")
    assert planned.returncode == 0 and json.loads(planned.stdout)["ranks_per_node"] == 1, planned.stderr
    result = command("train", config)
    assert result.returncode == 0 and "ranks do not fit into memory: starting 1" in result.stderr, result.stderr
