"""A script as the ranks of a real launcher process, and what came of it."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

from tests.tools import warm

LAUNCHER = """
import sys
from pathlib import Path
from aliquot.config.schema import LaunchSection
from aliquot.distributed.launcher import start_ranks
launch = LaunchSection(device="cpu", ranks=int(sys.argv[1]))
sys.exit(start_ranks(launch, sys.argv[3:], Path(sys.argv[2]), grace_s=5))
"""

JOIN = """
import os, signal, sys, time
from pathlib import Path
from aliquot.config.schema import LaunchSection
from aliquot.machine.cpu import read_cpu
from aliquot.distributed.topology import place_rank
from aliquot.distributed.ranks import Ranks
topology, text = place_rank(LaunchSection(), os.environ, read_cpu(), "cpu")
ranks = Ranks.join(topology, timeout_s=60)
"""


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what a launcher, a test run under one included, would have left in it."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")
    kept = {k: v for k, v in os.environ.items() if k not in left_out and not k.startswith(("PET_", "ALIQUOT_"))}
    return kept | variables


def start(
    folder: Path, body: str, *arguments: str, ranks: int = 2, cold: bool = False, **variables: str
) -> subprocess.Popen[str]:
    """A launcher whose ranks run `body`; their logs are in `folder`/logs. `cold`: all are interpreters of their own."""
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(body))
    command = ["-c", LAUNCHER, ranks, folder / "logs", script, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return warm.popen(*command, cold=cold, env=environment(**variables), **streams)


def run(folder: Path, body: str, *arguments: str, cold: bool = False, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of such a launcher."""
    launcher = start(folder, body, *arguments, cold=cold, **variables)
    try:
        out, err = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    return launcher.returncode, out, err


def failure(folder: Path, body: str, *arguments: str) -> list[str]:
    """The lines on stderr of such a launcher, which ends with exit code 1."""
    code, _, err = run(folder, body, *arguments)
    assert code == 1
    return err.splitlines()
