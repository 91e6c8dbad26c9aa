"""How a run is started and how it ends, with real processes: deaths, errors, hangs, signals, nodes, torchrun.

Ranks are forked: faults in their start, in their imports, in their fork server; and no gloo thread outlives a rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import UserError
from aliquot.distributed.launcher import apply_environment, launch_mode, torchrun_advice
from aliquot.distributed.liveness.watchdog import describe_stuck_ranks
from tests.distributed.launcher import JOIN, environment, failure, run, start
from tests.runs import free_port, wait_until, write_config
from tests.tools import warm

RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "3",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("launch", "environ", "expected"),
    [
        (LaunchSection(device="cpu"), {}, "alone"),
        (LaunchSection(device="cpu", ranks=1), {}, "alone"),
        (LaunchSection(ranks=2), {}, "launcher"),
        (LaunchSection(device="cpu", nodes=2), {}, "launcher"),
        (LaunchSection(ranks=2), RANK, "rank"),
        (LaunchSection(device="cpu"), TRAIN_JOB, "launcher"),
        (LaunchSection(device="cpu"), TRAIN_JOB | RANK, "rank"),
        (LaunchSection(device="cpu"), {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, "alone"),
    ],
)
def test_mode(launch: LaunchSection, environ: dict[str, str], expected: str) -> None:
    assert launch_mode(launch, environ) == expected


def test_train_job_variables_win() -> None:
    launch = apply_environment(LaunchSection(ranks=8, threads_per_rank=4), TRAIN_JOB)
    assert launch == LaunchSection(
        ranks=3, threads_per_rank=4, nodes=2, node_rank=1, master_address="job-node-0-0", master_port=29400
    )
    for automatic in ("auto", "cpu"):
        assert apply_environment(LaunchSection(ranks=8), TRAIN_JOB | {"PET_NPROC_PER_NODE": automatic}).ranks == 8


def test_exported_torchrun_variables_apply_to_unset_keys() -> None:
    exported = {"WORLD_SIZE": "4", "MASTER_ADDR": "first", "MASTER_PORT": "29555"}
    launch = apply_environment(LaunchSection(), exported)
    assert (launch.ranks, launch.master_address, launch.master_port) == (4, "first", 29555)
    assert launch_mode(LaunchSection(device="cpu"), exported) == "launcher"
    assert apply_environment(LaunchSection(nodes=2), exported).ranks == 2
    own = LaunchSection(ranks=3, master_address="other", master_port=1234)
    assert apply_environment(own, exported) == own
    with pytest.raises(UserError, match="WORLD_SIZE is 4, which 3 nodes cannot share"):
        apply_environment(LaunchSection(nodes=3), exported)


@pytest.mark.parametrize(
    ("timeout", "command", "warns"),
    [
        ("", b"train.py", True),
        ("100", b"train.py", False),
        ("", b"--shutdown-timeout=100\0train.py", False),
        ("100", b"--shutdown_timeout\x0040", True),
    ],
)
def test_torchrun_that_kills_too_early_is_warned_of(timeout: str, command: bytes, warns: bool) -> None:
    assert warns == bool(
        torchrun_advice(
            {"TORCHELASTIC_RUN_ID": "none", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": timeout}, 90.0, b"torchrun\0" + command
        )
    )


def test_senseless_environment_is_an_error() -> None:
    with pytest.raises(UserError, match="PET_NNODES"):
        launch_mode(LaunchSection(), TRAIN_JOB | {"PET_NNODES": "2:1"})
    with pytest.raises(UserError, match="PET_NPROC_PER_NODE"):
        launch_mode(LaunchSection(), TRAIN_JOB | {"PET_NPROC_PER_NODE": "0"})
    with pytest.raises(UserError, match="MASTER_ADDR"):
        launch_mode(LaunchSection(), {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


def test_ranks_get_streams_arguments_and_environment(tmp_path: Path) -> None:
    body = """
        import os, sys
        print("rank", os.environ["RANK"], "says", sys.argv[1:], os.environ.get("OMP_NUM_THREADS"))
    """
    arguments = ["$HOME ${local_rank} $$", ""]
    code, out, err = run(tmp_path, body, *arguments, cold=True)
    assert (code, out, err) == (0, f"rank 0 says {arguments} None\n", "")
    assert (tmp_path / "logs/rank-1.log").read_text() == f"rank 1 says {arguments} None\n"


def test_killed_rank_is_named(tmp_path: Path) -> None:
    body = (
        JOIN
        + """
from aliquot.distributed.rank_errors import report_error
try:
    while True:
        ranks.barrier()
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
except Exception as error:
    sys.exit(report_error(error))
"""
    )
    lines = failure(tmp_path, body)
    assert lines[0] == "aliquot: rank 1 was killed by SIGKILL (out of memory?) [killed]"
    assert len(lines) == 2 and "rank-1.log" in lines[1]


def test_first_error_is_shown_and_the_echo_is_not(tmp_path: Path) -> None:
    body = (
        JOIN
        + """
from aliquot.distributed.rank_errors import report_error
try:
    ranks.barrier()
    if ranks.rank == 1:
        raise ValueError("the true cause\\nin two lines")
    ranks.barrier()
except Exception as error:
    # As it happens when the rank that failed is slow to say so and its peers are first to exit.
    if ranks.rank == 1:
        ranks.close()
        time.sleep(0.5)
    sys.exit(report_error(error))
"""
    )
    lines = failure(tmp_path, body)
    assert lines[0] == "aliquot: rank 1 failed: ValueError: the true cause [crash]"
    assert len(lines) == 2 and "rank-1.log" in lines[1]
    assert "Traceback" in (tmp_path / "logs/rank-1.log").read_text()
    echo = json.loads((tmp_path / "logs/rank-0.error.json").read_text())
    assert echo["kind"] == "peer_lost"


def test_user_error_is_one_line_and_code_2(tmp_path: Path) -> None:
    body = """
        import sys
        from aliquot.core.errors import UserError
        from aliquot.distributed.rank_errors import report_error
        sys.exit(report_error(UserError("no such file; give another", "data.txt")))
    """
    code, out, err = run(tmp_path, body)
    assert (code, out, err) == (2, "", "aliquot: data.txt: no such file; give another [input]\n")


def test_hung_rank_leaves_stacks_of_all_ranks(tmp_path: Path) -> None:
    body = (
        JOIN
        + """
from aliquot.distributed.liveness.liveness import StepWatchdog
from aliquot.distributed.liveness.watchdog import WatchedRank
def stuck_in_this_function():
    time.sleep(600)
left = Path(sys.argv[1]) / "stacks-rank-7.txt"  # by an earlier attempt of more ranks
left.write_text('Thread 1:\\n  File "old.py", line 1 in <module>\\n')
os.utime(left, (1e9, 1e9))
ranks.barrier()
stacks = Path(sys.argv[1]) / f"stacks-rank-{ranks.rank}.txt"
watchdog = StepWatchdog(WatchedRank(topology, 1.0, lambda: "in step 3"), stacks, grace_s=1.0).__enter__()
if ranks.rank == 1:
    stuck_in_this_function()
ranks.barrier()
"""
    )
    line = failure(tmp_path, body, str(tmp_path))[0]
    assert "no progress for 1 s (launch.step_timeout_s) while in step 3; rank 1 stands" in line
    assert "; rank 1 stands still at rank.py:" in line
    assert " in stuck_in_this_function, and the others wait for it; where every rank was: " in line
    assert "stacks-rank-*.txt" in line
    assert "stuck_in_this_function" in (tmp_path / "stacks-rank-1.txt").read_text()
    assert "barrier" in (tmp_path / "stacks-rank-0.txt").read_text()


def test_rank_without_a_stack_report_is_named(tmp_path: Path) -> None:
    """Its process is stopped: of the others all wait for it."""
    waits = 'Thread 1:\n  File "/torch/distributed/distributed_c10d.py", line 1 in all_gather\n'
    # The last is of an earlier attempt of more ranks.
    own, stopped, left = (tmp_path / f"stacks-rank-{rank}.txt" for rank in (1, 0, 7))
    own.write_text(waits)
    for file in (stopped, left):
        file.touch()
    os.utime(stopped, (1e9, 1e9))  # clocks are set, and those of file servers are others
    assert describe_stuck_ranks(own, 2).startswith("; no answer from rank 0: its process is stopped, or")
    stopped.write_text(waits)
    assert describe_stuck_ranks(own, 2) == ""
    polls = '  File "/aliquot/engines/host/gradient_exchange.py", line 9 in _wait_for_space\n'
    stopped.write_text(f"Thread 1:\n{polls}")  # for the counters of other ranks
    assert describe_stuck_ranks(own, 2) == ""
    stopped.write_text(f"Thread 1:\n{polls.replace(' _wait_for_space', ' _update')}")
    assert "; rank 0 stands still at gradient_exchange.py:9 in _update" in describe_stuck_ranks(own, 2)


@pytest.mark.long
def test_watchdog_that_is_beaten_lets_the_run_go_on(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from aliquot.distributed.liveness.liveness import StepWatchdog
from aliquot.distributed.liveness.watchdog import WatchedRank
from aliquot.distributed.topology import Topology
rank = WatchedRank(Topology(0, 1, 0, 1, 0, 1, "cpu", 1, ()), 1.0, lambda: "in step 3")
with StepWatchdog(rank, Path(sys.argv[1]), grace_s=0.2) as watchdog:
    for _ in range(30):
        time.sleep(0.05)
        watchdog.beat()
time.sleep(1.5)
"""
    stacks = tmp_path / "stacks.txt"
    done = warm.run("-c", program, stacks)
    assert (done.returncode, done.stderr) == (0, "") and not stacks.exists()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_their_launcher(tmp_path: Path, ending: signal.Signals) -> None:
    body = """
        import os, sys, time
        from pathlib import Path
        (Path(sys.argv[1]) / f"beside-{os.environ['RANK']}").write_text(str(os.getpid()))
        (Path(sys.argv[1]) / f"beside-{os.environ['RANK']}").rename(Path(sys.argv[1]) / f"pid-{os.environ['RANK']}")
        time.sleep(600)
    """
    launcher = start(tmp_path, body, str(tmp_path), cold=ending == signal.SIGKILL)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    wait_until(lambda: all(file.exists() for file in files))
    ranks = [int(file.read_text()) for file in files]
    launcher.send_signal(ending)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == (-ending if ending == signal.SIGKILL else 128 + ending)
    wait_until(lambda: not any(running(rank) for rank in ranks))
    if ending != signal.SIGKILL:
        # A rank that was in Python code may show its KeyboardInterrupt; the last word is the launcher's.
        assert err.splitlines()[-1] == f"aliquot: stopped by {ending.name}"


def test_two_nodes_of_a_train_job(tmp_path: Path) -> None:
    port = str(free_port())
    body = (
        JOIN
        + """
told = ranks.gather([topology.rank, topology.node_rank, topology.local_rank, topology.nodes, topology.world_size])
print(told, flush=True)
ranks.close()
"""
    )
    nodes = []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        job = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node)}
        job |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "ALIQUOT_SECRET": "a word of the job"}
        nodes.append(start(tmp_path / str(node), body, **job))
    try:
        outputs = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    told = "[[0, 0, 0, 2, 2], [1, 1, 0, 2, 2]]\n"
    assert [node.returncode for node in nodes] == [0, 0], outputs
    meeting = [f"aliquot: node {node} of 2 meets the others at 127.0.0.1:{port}\n" for node in range(2)]
    assert outputs == [(told, meeting[0]), ("", meeting[1])]
    assert (tmp_path / "1/logs/rank-1.log").read_text() == told


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        JOIN
        + """
from aliquot.machine.matmul import matmul_rate
import torch
pinned = sorted(os.sched_getaffinity(0)) == list(topology.cores)
seen = ranks.gather([ranks.rank, torch.get_num_threads(), text, pinned])
assert all(rate > 1e6 for rate in ranks.gather(matmul_rate("cpu", "fp32", ranks.barrier)))
value = ranks.broadcast({"sch\\u00f6n": [1.5, None, ranks.rank]})
if ranks.rank == 1:
    import json
    Path(sys.argv[1]).write_text(json.dumps([seen, value]))
ranks.close()
"""
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    told = warm.run(*torchrun, script, tmp_path / "seen.json", env=environment(), timeout_s=120)
    assert told.returncode == 0, told.stderr
    seen, value = json.loads((tmp_path / "seen.json").read_text())
    assert value == {"schön": [1.5, None, 0]}
    cores = len(os.sched_getaffinity(0))
    for rank, (told_rank, threads, text, pinned) in enumerate(seen):
        assert told_rank == rank and "OMP_NUM_THREADS" not in text
        assert threads >= 1 and pinned == ("not pinned" not in text) and threads * 2 <= max(2, cores)


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


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
        # On a busy machine, a process may need a moment to end after its launcher.
        _, left = psutil.wait_procs([each for each in psutil.process_iter() if _is_in(folder, each)], timeout=5)
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


USES_CUDA_IN_ITS_IMPORT = """
import os, sys
from pathlib import Path
user = Path("user")
user.touch() if __name__ != "__main__" else sys.exit(user.exists())
"""


@pytest.mark.parametrize("has_gpus", [False, True])
def test_nothing_is_imported_before_the_fork_of_a_rank_with_a_gpu(tmp_path: Path, has_gpus: bool) -> None:
    """No fork can use CUDA after a module, for example torchao, has used CUDA in its import."""
    ended = node(tmp_path, USES_CUDA_IN_ITS_IMPORT, f"forked_rank.has_gpus = lambda: {has_gpus}", ranks=1)
    assert (ended.returncode == 0) is has_gpus, ended.stderr


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
