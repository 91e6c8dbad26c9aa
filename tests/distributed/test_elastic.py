"""Nodes that come and go: who leads, who trains, what is published; and two real nodes, of which one is killed."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from aliquot.config.read_config import read_config
from aliquot.config.schema import LaunchSection
from aliquot.core.errors import CutOffError, UserError
from aliquot.distributed import elastic, leader_lease, membership
from aliquot.distributed.elastic import _Node
from aliquot.distributed.json_lines import Message, Peer
from aliquot.distributed.launcher import apply_environment, launch_mode
from aliquot.distributed.leader_lease import (
    Claim,
    Claims,
    check_round,
    follows_earlier_round,
    is_finished,
    newest_round,
)
from aliquot.distributed.membership import ElasticRun, Leader, Round
from aliquot.distributed.rank_errors import Ended, Verdict, judge
from aliquot.observe.metrics import last_point
from aliquot.observe.run_directory import RunDirectory
from tests.runs import command, curve, refused, trained, wait_until, write_config
from tests.tools import warm

CLAIM = Claim(1, "host", "127.0.0.1", 0, "word")


def test_nodes_are_a_number_or_a_range(tmp_path: Path) -> None:
    launch = LaunchSection(nodes="2:4")
    assert (launch.fewest_nodes, launch.most_nodes, launch.is_elastic) == (2, 4, True)
    assert (LaunchSection(nodes=3).fewest_nodes, LaunchSection(nodes=3).is_elastic) == (3, False)
    assert launch_mode(LaunchSection(nodes="1:1"), {}) == "launcher"
    file = write_config(tmp_path)
    assert read_config(file, ["launch.nodes=2:4"]).launch.nodes == "2:4"  # in YAML 1.1 it is 124
    file.write_text(file.read_text().replace("launch:\n", "launch:\n  nodes: 2:4\n"))
    assert read_config(file).launch.nodes == "2:4"
    for wrong in ("4:2", "0:2", "2:4:6"):
        with pytest.raises(UserError, match=r"launch.nodes is .*MIN:MAX"):
            read_config(file, [f"launch.nodes={wrong}"])
    with pytest.raises(UserError, match=r"launch.nodes 2:4: .* give train.global_batch_size"):
        read_config(file, ["train.global_batch_size=null"])
    with pytest.raises(UserError, match=r"leave checkpoint\.resume"):
        read_config(file, ["checkpoint.resume=never"])


def test_train_job_sets_the_maximum_of_elastic_nodes() -> None:
    job = {"PET_NNODES": "4", "PET_NODE_RANK": "3"}
    assert apply_environment(LaunchSection(nodes="2:9"), job).nodes == "2:4"
    assert apply_environment(LaunchSection(), job).nodes == 4
    assert apply_environment(LaunchSection(), {"PET_NNODES": "2:4"}).nodes == "2:4"


def test_one_of_many_nodes_claims_a_round(tmp_path: Path) -> None:
    won: list[int] = []
    ready = threading.Barrier(8)

    def node(number: int) -> None:
        own = Claims(tmp_path)
        ready.wait()
        for round in range(1, 21):
            if own.make(replace(CLAIM, number=round, port=number)):
                won.append(round)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(node, range(8)))
    # 12 and below are removed once 20 is there: who comes late could make them again, and they mean nothing.
    assert [won.count(round) for round in range(13, 21)] == [1] * 8
    newest = Claims(tmp_path).newest()
    assert newest is not None and newest.number == 20


def test_only_the_first_round_starts_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(leader_lease.ROUND, raising=False)
    assert not follows_earlier_round()
    for number in (1, 2, 11):
        monkeypatch.setenv(leader_lease.ROUND, str(number))
        assert follows_earlier_round() == (number > 1)


def test_rank_of_an_older_round_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_round(tmp_path)  # of no round
    monkeypatch.setenv(leader_lease.ROUND, "3")
    for number in (1, 2, 3):
        Claims(tmp_path).make(replace(CLAIM, number=number))
        check_round(tmp_path)
    Claims(tmp_path).make(replace(CLAIM, number=4))
    with pytest.raises(CutOffError, match="round 4 of the run has begun without it, so nothing of round 3 is saved"):
        check_round(tmp_path)


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_cut_off_node_saves_nothing(tmp_path: Path, on_error: str) -> None:
    config = write_config(tmp_path, train={"max_steps": 2}, checkpoint={"every": 1, "on_error": on_error})
    Claims(tmp_path / "run").make(replace(CLAIM, number=8))
    result = command("train", config, environment={leader_lease.ROUND: "7"})
    assert result.returncode == 1, result.stderr
    assert "this node was cut off: round 8 of the run has begun without it" in result.stderr
    assert "[cut-off]" in result.stderr
    assert not (tmp_path / "run" / "export").exists()
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_lock_of_an_older_round_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = RunDirectory(tmp_path / "run")
    monkeypatch.setenv(leader_lease.ROUND, "1")
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with first.lock.hold(), second.lock.hold():
        assert (tmp_path / "run" / ".lock").read_text() == "round"
        monkeypatch.delenv(leader_lease.ROUND)
        with pytest.raises(UserError, match="another process is training"), alone.lock.hold():
            pass
    with alone.lock.hold(), pytest.raises(UserError, match="another process is training"), second.lock.hold():
        pass


MARK = '{"train.global_batch_size": 8, "version of torch": "2.13"}'


SENT = bytearray()  # all that nodes have sent


class RecordedSocket(socket.socket):
    def sendall(self, data: bytes) -> None:  # type: ignore[override]
        SENT.extend(data)
        super().sendall(data)


class Nodes:
    """A leader, and nodes that are connections only."""

    def __init__(self, folder: Path, nodes: str, **launch: Any) -> None:
        self.folder, self.told, self.saved = folder, list[str](), 0
        self.peers: list[Peer] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.claim = replace(CLAIM, port=listener.getsockname()[1])
        Claims(folder).make(self.claim)
        run = ElasticRun(MARK, lambda: (self.saved, 9), self.told.append, lambda: True)
        section = LaunchSection(nodes=nodes, **launch)
        self.leader = Leader(Claims(folder), self.claim, listener, "a", section, run, Round())

    def come(self, name: str, mark: str = MARK) -> Peer:
        connection = socket.create_connection(("127.0.0.1", self.claim.port))
        peer = Peer(RecordedSocket(fileno=connection.detach()), "word")
        self.peers.append(peer)
        assert peer.receive(10) == []  # the leader's nonce
        peer.send("hello", id=name, host=name, ranks=1, automatic=False, mark=mark)
        assert self.next(peer) == {"what": "hello"}
        return peer

    def started(self, names: str) -> list[Peer]:
        """A node of each letter of `names`; they begin a round."""
        peers = [self.come(name) for name in names]
        assert self.whats(*peers) == ["start"] * len(peers)
        return peers

    def next(self, peer: Peer) -> Message:
        """What the leader says next, beats left out."""
        if not hasattr(peer, "rest"):
            peer.rest = []  # type: ignore[attr-defined]
        until = time.monotonic() + 10
        while time.monotonic() < until:
            peer.send("beat")
            peer.rest += peer.receive(0.1)  # type: ignore[attr-defined]
            while peer.rest:  # type: ignore[attr-defined]
                if (message := peer.rest.pop(0))["what"] != "beat":  # type: ignore[attr-defined]
                    return dict(message)
        raise TimeoutError

    def leave(self) -> None:
        for peer in self.peers:
            peer.close()
        self.leader.leave()

    def whats(self, *peers: Peer) -> list[str]:
        return [self.next(peer)["what"] for peer in peers]


def end(peers: Sequence[Peer], round: int, code: int = 0, kind: str = "done", line: str = "") -> None:
    for peer in peers:
        peer.send("ended", round=round, report=asdict(Ended(code, (line,), kind)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_SETTLE_S", 0.3)
    monkeypatch.setattr(membership, "_MINORITY_S", 0.5)
    monkeypatch.setattr(membership, "SILENT_S", 2.0)


@pytest.fixture
def nodes(tmp_path: Path, quick: None, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = Nodes(tmp_path, getattr(request, "param", "2:3"))
    yield made
    made.leave()


def test_rounds_follow_new_and_lost_nodes(nodes: Nodes) -> None:
    a, b = nodes.come("a"), nodes.come("b")
    first = [nodes.next(a), nodes.next(b)]
    assert [(each["what"], each["round"], each["node"], each["nodes"]) for each in first] == [
        ("start", 1, 0, 2), ("start", 1, 1, 2),
    ]  # fmt: skip
    assert nodes.told[-1] == f"1 more node may come: one with the same run directory, {nodes.folder}"
    c = nodes.come("c")
    assert nodes.whats(a, b) == ["stop", "stop"]
    end((a, b), 1, 143, "training")
    assert [nodes.next(each)["nodes"] for each in (a, b, c)] == [3, 3, 3]
    assert "because c (127.0.0.1) has come" in nodes.told[-1]
    d = nodes.come("d")
    assert nodes.next(d) == {"what": "wait", "text": "3 nodes train, the maximum: this node waits for a place"}
    b.close()
    assert nodes.whats(a, c) == ["kill", "kill"]
    end([a], 2, 1, "killed")
    end([c], 2, 1, "peer_lost")
    assert [nodes.next(each)["round"] for each in (a, c, d)] == [3, 3, 3]
    assert nodes.told[-1].endswith("from step 0, 9 of 9 are done again, because b (127.0.0.1) was lost")
    assert newest_round(nodes.folder) == 3
    end((a, c, d), 3)
    assert [nodes.next(each)["code"] for each in (a, c, d)] == [0, 0, 0]
    assert is_finished(nodes.folder, f"{MARK} 0")


@pytest.mark.parametrize(
    "packet",
    [
        b"[" * 60_000 + b"\n",
        b"{" * 100_000,
        b"0" * 32 + b'\n{"what": "hello"}\n',
        b"0" * 32 + b"\n" + b"\xff" * 100 + b"\n",
        b'{"what": "ended", "round": 1, "report": {"code": 2, "lines": ["evil"]}}\n',
        b'{"what": ' + b"9" * 5000 + b"}\n",
        os.urandom(5000) + b"\n",
        SENT,
    ],
    ids=range(8),
)
def test_stranger_packet_ends_no_round(nodes: Nodes, packet: bytes) -> None:
    SENT.clear()
    a, b = nodes.started("ab")
    with socket.create_connection(("127.0.0.1", nodes.claim.port)) as stranger:
        stranger.settimeout(10)
        with suppress(ConnectionError):
            stranger.sendall(packet)
            while stranger.recv(1 << 10):  # until the leader has closed the connection
                pass
    end((a, b), 1)
    assert [nodes.next(each)["code"] for each in (a, b)] == [0, 0]


def test_node_with_invalid_messages_is_lost_alone(nodes: Nodes) -> None:
    a, b, c = nodes.started("abc")
    c.send("ended", code=0)  # of which round?
    assert nodes.whats(a, b) == ["kill"] * 2
    end((a, b), 1, 1, "killed")
    assert [nodes.next(each)["nodes"] for each in (a, b)] == [2, 2]
    assert "c (127.0.0.1) sent a message that cannot be read (KeyError" in nodes.told[-1]


def test_idle_connections_do_not_block_nodes(nodes: Nodes) -> None:
    """More than the leader takes at once, and more descriptors than select() can wait for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with ExitStack() as open_files:
        open_files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            open_files.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        idle = [socket.create_connection(("127.0.0.1", nodes.claim.port)) for _ in range(100)]
        for each in idle:
            open_files.enter_context(each)
            each.settimeout(10)
        for each in idle[:30]:  # the oldest are closed
            with suppress(ConnectionError):
                while each.recv(1 << 10):
                    pass
        a, b = nodes.started("ab")
        a.close()
        b.close()
        nodes.leave()


def test_lease_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    Claims(tmp_path).make(CLAIM)
    (file,) = (tmp_path / leader_lease.ROUNDS).glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert CLAIM.nonce not in CLAIM.run_id(1) != CLAIM.run_id(2), "keys of the store contain the id of a round"


def test_larger_part_of_split_nodes_leads_first(nodes: Nodes) -> None:
    a, b, c = nodes.started("abc")
    b.close()
    c.close()
    assert nodes.next(a)["what"] == "kill"
    end([a], 1, 1, "killed")
    Claims(nodes.folder).make(replace(CLAIM, number=2))  # by b and c, who have found each other
    while nodes.next(a)["what"] != "leave":  # after one more `kill`, of c
        pass
    assert "another node has begun a newer one" in nodes.told[-1]


def test_silent_node_counts_as_lost(nodes: Nodes) -> None:
    a, b, _ = nodes.started("abc")
    told: list[str] = []
    while not told:
        b.send("beat")
        told = [each["what"] for each in a.receive(0.1) if each["what"] != "beat"]
        a.send("beat")
    assert told == ["kill"]
    end((a, b), 1, 1, "peer_lost")
    assert nodes.next(a)["nodes"] == 2
    assert "c (127.0.0.1) was not heard of for 2 s" in nodes.told[-1]


def test_recurring_failure_ends_the_run_on_all_nodes(nodes: Nodes) -> None:
    a, b = nodes.come("a"), nodes.come("b")
    other = nodes.come("c", mark='{"train.global_batch_size": 16, "version of torch": "2.13"}')
    sent_away = nodes.next(other)
    words = "differs from host (127.0.0.1): train.global_batch_size is 8 there and 16 here"
    assert sent_away["code"] == 2 and f"c (127.0.0.1) {words} [nodes-differ]" in sent_away["lines"][0]
    assert any(words in told for told in nodes.told), "the person at the other nodes reads it, too"
    assert nodes.whats(a, b) == ["start"] * 2
    end([a], 1, 1, "crash", "aliquot: rank 0 failed: X [crash]")
    end([b], 1, 1, "peer_lost")
    assert nodes.whats(a, b) == ["start"] * 2  # once more
    nodes.saved = 5
    end([a], 2, 1, "crash", "aliquot: rank 0 failed: X [crash]")
    end([b], 2, 1, "peer_lost")
    assert nodes.whats(a, b) == ["start"] * 2  # it has come further
    end([a], 3, 1, "peer_lost")
    end([b], 3, 1, "crash", "aliquot: rank 1 failed: Y [crash]")
    ended = nodes.next(a)
    assert (ended["code"], ended["lines"][0]) == (1, "aliquot: rank 1 failed: Y [crash]")


@pytest.mark.parametrize(
    ("reports", "changed", "newcomers", "again", "verdict"),
    [
        ([Ended(0), Ended(0)], True, True, True, "finish"),
        ([Ended(1, ("OSError: /runs/[diverged]/x",), "crash")], False, False, False, "retry"),
        ([Ended(2, ("[cut-off].jsonl: no such file [data]",), "user", "data")], True, False, False, "end"),
        ([Ended(1, kind="peer_lost"), Ended(1, kind="training", id="diverged")], True, True, False, "end"),
        ([Ended(1, kind="training", id="engine-check")], False, False, False, "end"),
        ([Ended(1, id="cut-off"), Ended(2, kind="user", id="data")], True, True, True, "send away"),
        ([Ended(143, kind="training", id="terminated")], False, False, False, "end"),
        ([Ended(143, kind="training", id="terminated")], True, False, False, "retry"),
        ([Ended(1, kind="crash")], False, False, True, "end"),
        ([Ended(1, kind="crash")], True, False, True, "retry"),
        ([], True, False, True, "retry"),
    ],
)  # fmt: skip
def test_verdict_about_a_round(
    reports: list[Ended], changed: bool, newcomers: bool, again: bool, verdict: Verdict
) -> None:
    assert judge(reports, changed, newcomers, again)[0] == verdict


def test_new_node_with_bad_input_ends_alone(nodes: Nodes) -> None:
    a, b = nodes.started("ab")
    c = nodes.come("c")
    assert nodes.whats(a, b) == ["stop"] * 2
    end((a, b), 1, 143, "training")
    assert nodes.whats(a, b, c) == ["start"] * 3
    differs = "aliquot: node 2 (rank 2) differs from node 0: data (hash of the tokens) is x there and y here"
    end((a, b, c), 2, 2, "user", differs)
    assert nodes.next(c) == {"what": "end", "code": 2, "lines": [differs]}
    assert [nodes.next(each)["nodes"] for each in (a, b)] == [2, 2]
    assert "because c (127.0.0.1) cannot take part: node 2 (rank 2) differs from node 0" in nodes.told[-1]
    end([a], 3, 2, "user", "aliquot: data.txt: no such file [data]")  # of what has trained nobody is to blame
    end([b], 3, 1, "peer_lost")
    assert [nodes.next(each)["code"] for each in (a, b)] == [2, 2]


def test_too_few_nodes_end_with_their_names(tmp_path: Path, quick: None) -> None:
    few = Nodes(tmp_path, "2:3", join_timeout_s=1)
    told = few.next(few.come("a"))
    assert told["code"] == 1  # no bad input: a pod is replaced
    assert told["lines"][0].startswith("aliquot: 1 of at least 2 nodes (launch.nodes 2:3) came within 1 s")
    assert "a (127.0.0.1)" in told["lines"][0] and f"by the run directory {tmp_path}, which all" in told["lines"][0]
    few.leave()


def test_only_a_dead_leader_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "DEAD_S", 0.6)
    monkeypatch.setattr(elastic, "_SEEN_S", 0.2)
    monkeypatch.setattr(membership, "_SETTLE_S", 0.1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        unreachable = replace(CLAIM, port=nobody.getsockname()[1])
        Claims(tmp_path).make(unreachable)
        node = _Node(
            LaunchSection(nodes="1:2", join_timeout_s=30),
            Claims(tmp_path),
            False,
            ElasticRun("", lambda: (0, 0), print, lambda: True),
        )
        found = threading.Thread(target=node.next_order, daemon=True)
        found.start()
        for _ in range(6):
            Claims(tmp_path).beat(1)
            time.sleep(0.2)
        assert newest_round(tmp_path) == 1
        found.join(20)
        assert newest_round(tmp_path) == 2
        node.leave()


def start(config: Path) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return warm.popen(
        "-m", "aliquot", "train", config, env={**os.environ, "OMP_NUM_THREADS": "1"}, **streams, start_new_session=True
    )


def wait_for_step(directory: Path, step: int) -> None:
    wait_until(lambda: last_point(directory / "metrics.jsonl", "step")[0] >= step)


def test_run_continues_without_its_leader(tmp_path: Path) -> None:
    settings = {"shard": {"engine": "host"}, "train": {"max_steps": 14}, "checkpoint": {"every": 2, "export": False}}
    trained(write_config(tmp_path, "whole", **settings))
    launch = {"ranks": 1, "nodes": "1:2", "device": "cpu"}
    config = write_config(tmp_path, "left", **settings, launch=launch)
    leads, follows = start(config), None
    try:
        wait_until(lambda: newest_round(tmp_path / "left") is not None)
        follows = start(config)
        wait_for_step(tmp_path / "left", 4)
        own = psutil.Process(leads.pid).children(recursive=True)  # the server, a rank of it
        os.kill(leads.pid, signal.SIGKILL)
        assert len(own) > 1 and not psutil.wait_procs(own, timeout=20)[1], "ranks outlive their launcher"
        told = follows.communicate(timeout=90)[0]
        assert follows.returncode == 0, told
        assert "round 2: 1 node trains" in told and ", which led, has gone" in told
        late = command("train", config)
        assert (late.returncode, late.stderr) == (0, "aliquot: the run is finished: nothing to do here\n")
    finally:
        for node in (leads, follows):
            if node is not None:
                node.kill()
                node.communicate()
    # Sums over hosts are made in another order: see tests/multinode/test_namespaces.py.
    assert curve(tmp_path / "left") == pytest.approx(curve(tmp_path / "whole"), rel=1e-5)


@pytest.mark.long
def test_a_second_start_takes_no_words_from_the_first(tmp_path: Path) -> None:
    """Its ranks write theirs into the same directory before it is refused."""
    config = write_config(tmp_path, "run", train={"max_steps": 5000}, checkpoint={"every": 0}, launch={"ranks": 2})
    # Not from a process that was forked for it: of what that one starts, psutil sees another's environment.
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    first = subprocess.Popen([sys.executable, "-m", "aliquot", "train", config], **streams)
    try:
        wait_for_step(tmp_path / "run", 2)
        assert "another process is training into this run directory" in refused(config)
        ranks = psutil.Process(first.pid).children(recursive=True)
        next(rank for rank in ranks if rank.environ().get("RANK") == "0").kill()
        told = first.communicate(timeout=60)[0]
        assert first.returncode == 1 and "rank 0 was killed by SIGKILL" in told, told
    finally:
        first.kill()
        first.communicate()


@pytest.mark.long
def test_stopped_node_leaves_without_lost_steps(tmp_path: Path) -> None:
    settings = {"shard": {"engine": "host"}, "train": {"max_steps": 60}, "checkpoint": {"export": False}}
    launch = {"ranks": 1, "nodes": "1:2", "device": "cpu"}
    config = write_config(tmp_path, "run", **settings, launch=launch)
    for leader_leaves in (False, True):
        first = start(config)
        wait_until(lambda: newest_round(tmp_path / "run") is not None)
        second = start(config)
        wait_for_step(tmp_path / "run", last_point(tmp_path / "run" / "metrics.jsonl", "step")[0] + 3)
        leaves, stays = (first, second) if leader_leaves else (second, first)
        os.killpg(leaves.pid, signal.SIGTERM)  # as `timeout` and a terminal do: its ranks save all the same
        told = leaves.communicate(timeout=60)[0]
        assert leaves.returncode == 143, told
        wait_for_step(tmp_path / "run", last_point(tmp_path / "run" / "metrics.jsonl", "step")[0] + 3)
        stays.send_signal(signal.SIGTERM)
        told += stays.communicate(timeout=60)[0]
        assert stays.returncode == 143, told
        assert "done again" not in told


@pytest.mark.long
def test_removed_export_is_written_again(tmp_path: Path) -> None:
    launch = {"ranks": 2, "nodes": "1:2", "device": "cpu"}
    config = write_config(tmp_path, "run", shard={"engine": "host"}, train={"max_steps": 2}, launch=launch)
    trained(config)
    shutil.rmtree(tmp_path / "run" / "export")
    again = command("train", config)
    assert again.returncode == 0 and "complete at step 2" in again.stdout, again.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()
    assert "nothing to do here" in command("train", config).stderr
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # which somebody has removed
    assert "no checkpoint is left to continue from" in command("train", config).stderr


@pytest.mark.long
def test_late_node_ends_if_run_is_finished_without_checkpoint(tmp_path: Path) -> None:
    launch, kept = {"ranks": 1, "nodes": "1:2", "device": "cpu"}, {"every": 0, "last": False}
    config = write_config(tmp_path, "run", train={"max_steps": 1, "eval_steps": 0}, checkpoint=kept, launch=launch)
    trained(config)
    late = command("train", config)
    assert (late.returncode, late.stderr) == (0, "aliquot: the run is finished: nothing to do here\n")
