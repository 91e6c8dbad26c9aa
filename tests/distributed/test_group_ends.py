"""A finished rank has no gloo thread: a thread that drops a tensor at the end of the interpreter would abort."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import write_config
from tests.tools import warm

SCRIPT = """
import sys
from pathlib import Path
from aliquot.config.read_config import read_config
from aliquot.run.trainer import train

def name_of(task):
    try:
        return (task / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return ""

def gloo_threads():
    names = [name_of(task) for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]

import torch.distributed as dist
destroy = dist.destroy_process_group
before = []
dist.destroy_process_group = lambda: (before.extend(gloo_threads()), destroy())
train(read_config(Path(sys.argv[1])))
assert before, "gloo's threads have other names now"
assert not gloo_threads(), gloo_threads()
"""


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.long)])  # one that really ends
def test_host_engine_leaves_no_gloo_thread(tmp_path: Path, cold: bool) -> None:
    config = write_config(tmp_path, shard={"engine": "host"}, train={"max_steps": 2})
    run = warm.run("-c", SCRIPT, config, cold=cold)
    assert run.returncode == 0, run.stdout + run.stderr
