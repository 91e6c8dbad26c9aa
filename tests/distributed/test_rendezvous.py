"""Nodes and ranks that do not find each other: real processes, and the one line that each of them ends with."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.launcher import JOIN, environment
from tests.multinode.namespaces import INTERFACE, switched_hosts, why_not
from tests.runs import free_port
from tests.tools import warm

NODE = """
import sys
from pathlib import Path
from aliquot.config.schema import LaunchSection
from aliquot.core.errors import UserError
from aliquot.distributed.launcher import start_ranks
own, nodes, address, port, limit, ranks, script = sys.argv[1:8]
launch = LaunchSection(device="cpu", ranks=int(ranks), nodes=int(nodes), node_rank=int(own), master_address=address,
                       master_port=int(port), join_timeout_s=float(limit))
try:
    logs = Path(script).parent / f"logs-{own}"
    shared = Path(script).parent
    sys.exit(start_ranks(launch, [script], logs, 5, automatic="automatic" in sys.argv, run_directory=shared))
except UserError as error:
    sys.exit(str(error))
"""
RANK = """
import os, sys
from aliquot.config.schema import LaunchSection
from aliquot.core.errors import UserError
from aliquot.machine.cpu import read_cpu
from aliquot.distributed.rendezvous import infer_local_ranks
from aliquot.distributed.topology import place_rank
from aliquot.distributed.ranks import Ranks
print("joins", flush=True)
if len(sys.argv) > 2:
    os.sched_setaffinity(0, {int(sys.argv[2])})
try:
    with infer_local_ranks(os.environ, float(sys.argv[1])) as bound:
        topology = place_rank(LaunchSection(), os.environ, read_cpu(), "cpu", bound)[0]
        ranks = Ranks.join(topology, 60, float(sys.argv[1]))
    own = [topology.local_rank, topology.local_world_size, topology.node_rank, topology.nodes]
    own += [bound, topology.cores] if len(sys.argv) > 2 else []
    print(ranks.gather(own), os.environ["GLOO_SOCKET_IFNAME"])
    ranks.close()
except UserError as error:
    sys.exit(str(error))
"""


@contextmanager
def started(commands: Sequence[tuple[list[str], dict[str, str]]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of `python COMMAND`, ended with the block."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [warm.popen(*command, env=environ, **streams) for command, environ in commands]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def last_lines(commands: Sequence[tuple[list[str], dict[str, str]]]) -> list[str]:
    """The last line of stderr of each, all of which must fail without a traceback."""
    with started(commands) as processes:
        texts = [process.communicate(timeout=240)[1] for process in processes]
    assert all(process.returncode not in (0, None) for process in processes), texts
    assert not any("Traceback" in text for text in texts), texts
    return [text.splitlines()[-1] for text in texts]


def node(own: int, nodes: int, port: int, limit_s: float, folder: Path, address: str = "127.0.0.1", *more: str,
         ranks: int = 1) -> tuple[list[str], dict[str, str]]:  # fmt: skip
    script = folder / "rank.py"
    script.write_text(JOIN + "print(ranks.gather(topology.local_world_size), flush=True)\nranks.close()\n")
    command = ["-c", NODE, str(own), str(nodes), address, str(port), str(limit_s), str(ranks), str(script)]
    return [*command, *more], environment()


def rank(own: int, count: int, port: int, limit_s: float, **more: str) -> tuple[list[str], dict[str, str]]:
    variables = {"RANK": str(own), "WORLD_SIZE": str(count), "LOCAL_RANK": str(own), "LOCAL_WORLD_SIZE": str(count)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return ["-c", RANK, str(limit_s)], environment(**variables, **more)


def test_missing_node_is_named_by_all_present_nodes(tmp_path: Path) -> None:
    port = free_port()
    with started([node(2, 3, port, 200, tmp_path)]) as (early,):
        assert early.stderr is not None
        assert "meets the others" in early.stderr.readline()  # it is ready, and finds node 0 as soon as there is one
        (first,) = last_lines([node(0, 3, port, 2, tmp_path)])
        text = early.communicate(timeout=240)[1]
    assert first.startswith("node 1 did not come within 2 s (launch.join_timeout_s); 2 of 3 nodes are here: 0 (")
    assert text.splitlines()[-1] == first


@pytest.mark.parametrize("own", [0, 1])
def test_waiting_node_ends_at_once_on_sigterm(tmp_path: Path, own: int) -> None:
    """Also as the first process of a container, where a signal without a handler does nothing."""
    with started([node(own, 2, free_port(), 200, tmp_path)]) as (waiting,):
        assert waiting.stderr is not None
        assert "meets the others" in waiting.stderr.readline()
        waiting.terminate()
        assert waiting.wait(timeout=20) == 128 + signal.SIGTERM
        assert waiting.stderr.read() == "aliquot: stopped by SIGTERM before the nodes had met\n"


@pytest.mark.long
def test_a_missing_rank_is_named() -> None:
    port = free_port()
    with started([rank(3, 4, port, 200)]) as (early,):
        assert early.stdout is not None
        assert early.stdout.readline() == "joins\n"
        (first,) = last_lines([rank(0, 4, port, 2)])
        text = early.communicate(timeout=240)[1]
    host = platform.node()
    assert first.startswith("ranks 1, 2 did not come within 2 s")
    assert first.endswith(f"2 of 4 ranks are here: 0 ({host}), 3 ({host})")
    assert text.splitlines()[-1] == first


def test_absent_node_0_is_reported(tmp_path: Path) -> None:
    port = free_port()
    (line,) = last_lines([node(1, 2, port, 1, tmp_path)])
    assert line.startswith(
        f"node 0 was not found at 127.0.0.1:{port} within 1 s (launch.join_timeout_s): nobody listens"
    )
    (line,) = last_lines([node(1, 2, port, 1, tmp_path, "no-such-host.invalid")])
    assert "the name no-such-host.invalid does not resolve" in line


def test_address_that_does_not_lead_to_node_0(tmp_path: Path) -> None:
    (line,) = last_lines([node(0, 2, free_port(), 60, tmp_path, "203.0.113.1")])  # for documentation: leads nowhere
    assert line.startswith(f"launch.master_address 203.0.113.1 does not lead to {platform.node()}, which is node 0: ")


@pytest.mark.parametrize("own", [0, 1])
def test_invalid_master_address_fails_at_once(tmp_path: Path, own: int) -> None:
    (line,) = last_lines([node(own, 2, free_port(), 600, tmp_path, "a..b")])
    assert line.startswith("'a..b' cannot be the name of a host: set launch.master_address (MASTER_ADDR)")


def test_taken_port_names_its_owner(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = last_lines([node(0, 2, port, 200, tmp_path)])
    name = Path("/proc/self/comm").read_text().strip()
    assert line.startswith(f"port {port} cannot be opened at 127.0.0.1: the port is taken by {name} ")
    assert f"(process {os.getpid()})" in line and "launch.master_port" in line


@pytest.mark.long
def test_answer_of_another_program_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = last_lines([node(1, 2, port, 200, tmp_path)])
    assert line.startswith(f"the program at 127.0.0.1:{port} is not node 0 of this run")


def test_two_nodes_with_one_number(tmp_path: Path) -> None:
    port = free_port()
    # Node 2 never comes, so that none of the twins ends well.
    nodes = [node(1, 3, port, 200, tmp_path), node(1, 3, port, 200, tmp_path), node(0, 3, port, 200, tmp_path)]
    with started(nodes) as (*twins, _):
        while all(twin.poll() is None for twin in twins):
            time.sleep(0.05)
        (refused,) = [twin for twin in twins if twin.poll() is not None]
        text = refused.communicate(timeout=240)[1]
    assert text.splitlines()[-1].startswith(f"node 1 has joined twice, from {platform.node()}"), text


def test_unknown_interface_is_reported(tmp_path: Path) -> None:
    (line,) = last_lines([rank(0, 2, free_port(), 200, GLOO_SOCKET_IFNAME="eth77")])
    assert line.startswith("GLOO_SOCKET_IFNAME is eth77, but the interfaces of this machine with an address are ")


def test_automatic_ranks_are_the_minimum_over_nodes(tmp_path: Path) -> None:
    port = free_port()
    nodes = [node(0, 2, port, 200, tmp_path, "127.0.0.1", "automatic", ranks=2),
             node(1, 2, port, 200, tmp_path, "127.0.0.1", "automatic", ranks=1)]  # fmt: skip
    with started(nodes) as processes:
        outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == "[1, 1]\n"


def by_number_only(own: int, count: int, port: int, address: str, **more: str) -> tuple[list[str], dict[str, str]]:
    variables = {"RANK": str(own), "WORLD_SIZE": str(count), "MASTER_ADDR": address, "MASTER_PORT": str(port), **more}
    return ["-c", RANK, "60"], environment(**variables)


def test_ranks_of_a_shell_loop_infer_their_host() -> None:
    """As `for i in 0 1; do RANK=$i WORLD_SIZE=2 MASTER_ADDR=... aliquot train ... & done`; one has LOCAL_RANK, too."""
    port = free_port()
    commands = [by_number_only(0, 2, port, "127.0.0.1"), by_number_only(1, 2, port, "127.0.0.1", LOCAL_RANK="0")]
    with started(commands) as processes:
        outputs = [process.communicate(timeout=240) for process in processes]
    assert [out.splitlines()[-1] for out, _ in outputs] == ["[[0, 2, 0, 1], [1, 2, 0, 1]] lo"] * 2, outputs


@pytest.mark.long
@pytest.mark.parametrize("apart", [True, False])
def test_ranks_bound_by_srun_use_all_their_cores(apart: bool) -> None:
    """And what is exported of SLURM_LOCALID and SLURM_NTASKS_PER_NODE says nothing of where a rank is."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("there is one CPU")
    port, wrong = free_port(), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    commands = []
    for rank in range(2):
        command, environ = by_number_only(rank, 2, port, "127.0.0.1", **wrong)
        commands.append(([*command, str(cpus[rank if apart else 0])], environ))
    with started(commands) as processes:
        outputs = [process.communicate(timeout=240) for process in processes]
    each = [[rank, 2, 0, 1, apart, [cpus[rank]] if apart else []] for rank in range(2)]
    assert [out.splitlines()[-1] for out, _ in outputs] == [f"{each} lo"] * 2, outputs


@pytest.mark.parametrize(
    "variables, told",
    [
        ({"MASTER_ADDR": "http://node0"}, "'http://node0' cannot be the name of a host"),
        ({"MASTER_ADDR": ""}, "'' cannot be the name of a host"),
        ({"MASTER_PORT": "29500/tcp"}, "the environment variable MASTER_PORT is '29500/tcp': set it to a whole number"),
        ({"RANK": "2"}, "the environment says rank 2 of 2"),
        ({"MASTER_PORT": "99999"}, "the environment variable MASTER_PORT is 99999: ports are 1 to 65535"),
        ({"MASTER_PORT": "99999", "RANK": "0"}, "the environment variable MASTER_PORT is 99999: ports are"),
        ({"MASTER_ADDR": "a..b", "RANK": "0"}, "'a..b' cannot be the name of a host"),  # it would wait for the others
    ],
)
def test_bad_environment_variable_is_one_line(variables: dict[str, str], told: str) -> None:
    command, environ = by_number_only(1, 2, free_port(), "127.0.0.1")
    (line,) = last_lines([(command, environ | variables)])
    assert line.startswith(told)


@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_of_two_hosts_infer_their_places() -> None:
    """Dealt out like cards, as `srun --distribution=cyclic` does."""
    port = free_port()
    with switched_hosts(2) as hosts:
        processes = []
        for number in range(4):
            command, environ = by_number_only(number, 4, port, hosts[0].address)
            inside = hosts[number % 2].command(sys.executable, *command)
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(subprocess.Popen(inside, env=environ, text=True, **streams))
        outputs = [process.communicate(timeout=240) for process in processes]
    expected = f"[[0, 2, 0, 2], [0, 2, 1, 2], [1, 2, 0, 2], [1, 2, 1, 2]] {INTERFACE}"
    assert [out.splitlines()[-1] for out, _ in outputs] == [expected] * 4, outputs


@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_hosts_that_meet_but_cannot_pass_gradients(tmp_path: Path) -> None:
    """The store is reached by one interface, and gloo is told to use another, which leads nowhere."""
    port = free_port()
    with switched_hosts(2) as hosts:
        processes = []
        for number, host in enumerate(hosts):
            command, environ = node(number, 2, port, 200, tmp_path, hosts[0].address)
            inside, environ = host.command(sys.executable, *command), environ | {"GLOO_SOCKET_IFNAME": "lo"}
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(subprocess.Popen(inside, env=environ, text=True, **streams))
        texts = [process.communicate(timeout=240) for process in processes]
    assert all(process.returncode for process in processes), texts
    told = " ".join(file.read_text() for file in tmp_path.glob("logs-*/*"))
    assert f"{platform.node()} cannot reach {platform.node()} at 127.0.0.1: nobody listens there; nodes must" in told
