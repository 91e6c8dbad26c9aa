"""What goes wrong around ranks that are forked: in their start, in their imports, in the process they come from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.tools import warm

# One node, which begins at once, and ends when it has failed twice.
NODE = """
import os, signal, sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from aliquot.config.schema import LaunchSection
from aliquot.distributed import forked_rank
from aliquot.distributed.elastic import start_elastic_ranks
from aliquot.distributed.launcher import prepare_log_directory
from aliquot.distributed.local_group import RankProgram
from aliquot.distributed.membership import ElasticRun

module, folder = sys.argv[1], Path.cwd()
sys.path.insert(0, str(folder))
start = ForkServerProcess.start
{changed}
run = ElasticRun("", lambda: (0, 0), print, lambda: True)
launch = LaunchSection(device="cpu", ranks={ranks}, nodes="1:1")
program = RankProgram(["-m", module], prepare_log_directory(folder / "logs"), 5, (module,))
sys.exit(start_elastic_ranks(launch, program, folder, False, run))
"""


def node(
    folder: Path, module: str, changed: str = "", ranks: int = 2, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Of ranks that run `module`, which the process that they are forked from imports before."""
    (folder / "module.py").write_text(module)
    try:
        return warm.run("-c", NODE.format(changed=changed, ranks=ranks), "module", cold=cold, cwd=folder, timeout_s=60)
    finally:
        left = [each for each in psutil.process_iter() if _is_in(folder, each)]
        for each in left:
            each.kill()
        assert not left


def _is_in(folder: Path, process: psutil.Process) -> bool:
    try:
        return Path(process.cwd()) == folder
    except (psutil.Error, OSError):
        return False


def test_launcher_stopped_during_start_ends_its_ranks(tmp_path: Path) -> None:
    told = """
def told(process):
    is_rank = process._args  # the first of two
    start(process)
    if is_rank:
        os.kill(os.getpid(), signal.SIGTERM)
ForkServerProcess.start = told
"""
    ended = node(tmp_path, "import time\nif __name__ == '__main__': time.sleep(99)", told)
    # Before it a rank may say that the launcher's semaphores, which it was to be given, are gone.
    assert ended.returncode == 143 and ended.stderr.endswith("aliquot: stopped by SIGTERM\n"), ended.stderr


def test_error_of_a_forked_rank_before_training_is_reported(tmp_path: Path) -> None:
    ended = node(tmp_path, "raise ValueError('no such import')")
    assert ended.returncode == 1
    assert "failed: ValueError: no such import [crash]" in ended.stderr, ended.stderr
    assert any("module.py" in file.read_text() for file in (tmp_path / "logs").glob("rank-*.error.json"))


@pytest.mark.long
def test_unwritable_log_is_reported(tmp_path: Path) -> None:
    (tmp_path / "logs" / "rank-1.log").mkdir(parents=True)
    ended = node(tmp_path, "import time\nif __name__ == '__main__': time.sleep(99)")
    assert ended.returncode == 1 and "IsADirectoryError" in ended.stderr, ended.stderr


def test_fork_server_that_dies_in_imports_is_reported(tmp_path: Path) -> None:
    ended = node(tmp_path, "import os\nos._exit(9)")
    line = "aliquot: the process that ranks are forked from has ended (out of memory?) [training]\n"
    assert (ended.returncode, ended.stderr) == (1, line)


ENDS_ITS_SERVER = """
import os, signal, sys, time
from pathlib import Path

if __name__ == "__main__":
    if not Path("again").exists():
        Path("again").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(99)
    status = Path(f"/proc/{os.getppid()}/status").read_text().splitlines()
    blocked = int(next(line.split()[1] for line in status if line.startswith("SigBlk")), 16)
    sys.exit(0 if blocked >> (signal.SIGTERM - 1) & 1 else 3)
"""


@pytest.mark.long
def test_dead_fork_server_is_replaced_and_blocks_signals(tmp_path: Path) -> None:
    ended = node(tmp_path, ENDS_ITS_SERVER, "forked_rank._IMPORTED = ()", ranks=1, cold=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "again").exists()


@pytest.mark.long
def test_program_that_the_server_has_imported_starts_without_a_warning(tmp_path: Path) -> None:
    """As with the script `aliquot`, which the server imports, and with it `aliquot.__main__`."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__init__.py").write_text("from program import __main__")
    (tmp_path / "program" / "__main__.py").write_text("if __name__ == '__main__': print('trained')")
    ended = node(tmp_path, "", "module, forked_rank._IMPORTED = 'program', ()", ranks=1, cold=True)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
