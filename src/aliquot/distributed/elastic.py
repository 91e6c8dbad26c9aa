"""The launcher of one node of an elastic run: it finds or becomes the leader, and runs the node's ranks in each round.

When a node leaves or joins, the round ends on all nodes. The next round resumes from the newest checkpoint with the
nodes that are present then. The leader (membership.py) decides when a round ends and which nodes take part in the next
round. The lease (leader_lease.py) decides which node may lead.
"""

from __future__ import annotations

import os
import platform
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import RendezvousError, TrainingError
from aliquot.distributed.forked_rank import live_forked_ranks, start_server, wait_for_server
from aliquot.distributed.gloo_interface import group_address
from aliquot.distributed.json_lines import Message, Peer
from aliquot.distributed.leader_lease import DEAD_S, Claim, Claims, is_finished
from aliquot.distributed.local_group import RankProgram, run_local_ranks
from aliquot.distributed.membership import BEAT_S, ENDING_S, SILENT_S, ElasticRun, Leader, Round
from aliquot.distributed.rank_errors import Ended
from aliquot.distributed.rendezvous import meet_round
from aliquot.distributed.run_secret import common_secret
from aliquot.distributed.signals import STOP_SIGNALS, first_and_second_signal, raise_on_stop_signals
from aliquot.distributed.store_server import UNSERVED, Deadline, connection_failure, open_port

_POLL_S = 0.1
_CONNECT_S = 2.0
_SEEN_S = 2.0  # an expired lease must also be unchanged for this long by the clock of this node, because clocks differ
_MEET_S = 60.0  # timeout of a round's rendezvous: all its members are alive and start together


def start_elastic_ranks(
    launch: LaunchSection, program: RankProgram, run_directory: Path, automatic: bool, run: ElasticRun
) -> int:
    """Run the program as the ranks of this node, round after round, and return the exit code as `start_ranks` does.

    Args:
        launch: the settings as `apply_environment` returns them.
        automatic: whether launch.ranks was auto.
    """
    start_server(program.log_directory, program.modules)
    claims = Claims(run_directory)
    node = _Node(launch, claims, automatic, run)
    with first_and_second_signal(node.told_to_stop, node.told_again):
        return _all_rounds(node, claims, launch, program, run)


def _all_rounds(node: _Node, claims: Claims, launch: LaunchSection, program: RankProgram, run: ElasticRun) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        secret = common_secret(os.environ, claims.directory)
        raise_on_stop_signals()
        if not _is_finished(claims, run):
            wait_for_server()  # now, because the other nodes will end their round as soon as this node joins
        while True:
            raise_on_stop_signals()
            order = node.next_order()
            if order["what"] == "end":
                _print(order["lines"])
                return int(order["code"])
            start_server(program.log_directory, program.modules)  # if the server has ended
            ended = _run_round(node, order, launch, program, secret)
            if ended.kind == "stopped":
                _print(ended.lines)
                return ended.code
            node.report(order["round"], ended)
    except SignalException as stopped:
        _print([f"aliquot: stopped by {signal.Signals(stopped.sigval).name}"])
        return 128 + stopped.sigval
    except (RendezvousError, TrainingError) as error:
        # Exit code 1: other nodes have caused the error, not the input, so a replacement of this pod may succeed.
        _print([f"aliquot: {error.line}"])
        return 1
    finally:
        for number in STOP_SIGNALS:  # this node is leaving already
            signal.signal(number, signal.SIG_IGN)
        node.leave()


def _run_round(node: _Node, order: Message, launch: LaunchSection, program: RankProgram, secret: str) -> Ended:
    assert node.link is not None
    round_launch = launch.model_copy(
        update={
            "node_rank": order["node"],
            "master_address": order["address"] or node.link.peer.address,
            "master_port": order["port"],
            "ranks": order["ranks"],
        }
    )
    if order["node"]:
        where = f"node {order['node']} of {order['nodes']}, led by {node.link.claim.name}"
        _print([f"aliquot: round {order['round']}: {where}"])
    try:
        wait_for_server()
        node.link.in_round.set()
        group = meet_round(round_launch, order["nodes"], node.link.claim.run_id(order["round"]), secret, _MEET_S)
        return run_local_ranks(order["ranks"], group, program, order["round"])
    except (RendezvousError, TrainingError) as error:
        return Ended(1, (f"aliquot: {error.line}",), "crash", error.id)
    finally:
        node.link.in_round.clear()


class _Link(threading.Thread):
    """The connection of this node to the leader; forwards the leader's signals to the ranks."""

    def __init__(self, claim: Claim, peer: Peer, greeting: list[Message]) -> None:
        """`greeting`: messages that arrived together with the leader's answer to `hello`."""
        super().__init__(name="aliquot-member", daemon=True)
        self.claim, self.peer = claim, peer
        self.orders: queue.Queue[Message] = queue.Queue()
        self.in_round = threading.Event()
        self.lost = threading.Event()
        self.dismissed = False  # whether the leader has sent `leave`
        self._pending: signal.Signals | None = None  # a signal not yet sent to the ranks
        for message in greeting:
            self._obey(message)
        self.start()

    def run(self) -> None:
        heard = sent = time.monotonic()
        while not self.lost.is_set():
            for message in self.peer.receive(_POLL_S):
                heard = time.monotonic()
                self._obey(message)
            if time.monotonic() - sent > BEAT_S:
                sent = time.monotonic()
                self.peer.send("beat")
            if self.peer.closed or time.monotonic() - heard > SILENT_S:
                self.lost.set()
            self._signal_ranks()
        # Before a leader leaves on request, all ranks save, including the ranks of this node: give them time to end.
        until = time.monotonic() + (ENDING_S if self.dismissed else 0)
        while self.in_round.is_set():
            if time.monotonic() > until:
                self._pending = signal.SIGKILL
            self._signal_ranks()
            time.sleep(_POLL_S)
        self.peer.close()

    def kill(self) -> None:
        self._pending = signal.SIGKILL

    def _obey(self, message: Message) -> None:
        what = message["what"]
        if what in ("start", "end"):
            self._pending = None
            self.orders.put(message)
        elif what == "wait":
            _print([f"aliquot: {message['text']}"])
        elif what == "kill":
            self._pending = signal.SIGKILL
        elif what == "stop" and self._pending is None:
            self._pending = signal.SIGTERM
        elif what == "leave":
            self.dismissed = True

    def _signal_ranks(self) -> None:
        """Send the pending signal; repeat SIGKILL until the round ends, because ranks may still be starting."""
        if self._pending is None or not self.in_round.is_set():
            return
        ranks = live_forked_ranks()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(self._pending)
        if ranks and self._pending == signal.SIGTERM:
            self._pending = None


class _Node:
    """The state of this node: its link to the leader, and whether this node leads."""

    def __init__(self, launch: LaunchSection, claims: Claims, automatic: bool, run: ElasticRun) -> None:
        self.link: _Link | None = None
        self._id = secrets.token_hex(8)
        self._launch, self._claims, self._automatic, self._run = launch, claims, automatic, run
        self._leader: Leader | None = None
        self._last: frozenset[str] | None = None  # ids of the nodes of the last round, without its leader
        self._renewal = (0, 0.0)  # the last renewal of a lease: its round, and its time by the clock of the file system
        self._renewal_seen_at = 0.0  # when this node first saw this renewal, by its monotonic clock

    def next_order(self) -> Message:
        """Return the next `start` or `end` message of a living leader. Raises RendezvousError."""
        while True:
            if self.link is None or (self.link.lost.is_set() and self.link.orders.empty()):
                link = self._find_leader()
                if link is None:
                    return {"what": "end", "code": 0, "lines": ["aliquot: the run is finished: nothing to do here"]}
                self.link = link
            with suppress(queue.Empty):
                order = self.link.orders.get(timeout=_POLL_S)
                if order["what"] == "end":
                    return order
                if not self.link.lost.is_set():
                    self._last = frozenset(order["ids"][1:])
                    return order

    def report(self, round: int, ended: Ended) -> None:
        assert self.link is not None
        self.link.peer.send("ended", round=round, report=asdict(ended))

    def told_to_stop(self, signal_name: str) -> None:
        if self.link is not None and self.link.in_round.is_set():
            _print([f"aliquot: {signal_name}: a second signal ends this node's ranks at once, saved or not"])

    def told_again(self, signal_name: str) -> None:
        if self.link is not None and self.link.in_round.is_set():
            _print([f"aliquot: {signal_name}, told to stop again: this node's ranks are ended, saved or not"])
            self.link.kill()

    def leave(self) -> None:
        if self._leader is not None:
            self._leader.leave()
        elif self.link is not None:
            self.link.peer.send("leave")
        if self.link is not None:
            self.link.lost.set()
            self.link.join()

    def _find_leader(self) -> _Link | None:
        """Return a link to the leader, which may be this node; None if the run is finished."""
        deadline = Deadline(self._launch.join_timeout_s)
        while True:
            newest = self._claims.newest()
            if _is_finished(self._claims, self._run):
                return None
            if newest is not None and (link := self._reach(newest)) is not None:
                return link
            if (newest is None or self._is_gone(newest)) and (link := self._lead(newest)) is not None:
                return link
            where = f"{newest.name}, which leads round {newest.number}," if newest is not None else "a leader"
            if deadline.has_passed:
                raise RendezvousError(
                    f"{where} was not reached within {self._launch.join_timeout_s:g} s (launch.join_timeout_s):"
                    " nodes must reach each other on all ports, by the interface in GLOO_SOCKET_IFNAME if set"
                )
            deadline.report(where)
            time.sleep(_POLL_S)

    def _reach(self, claim: Claim) -> _Link | None:
        with suppress(OSError):
            peer = Peer(socket.create_connection((claim.address, claim.port), timeout=_CONNECT_S), claim.nonce)
            peer.receive(_CONNECT_S)  # the nonce of the leader, without which a message cannot be signed
            peer.send(
                "hello", id=self._id, host=platform.node(), ranks=self._launch.ranks, automatic=self._automatic,
                mark=self._run.mark,
            )  # fmt: skip
            if answer := peer.receive(_CONNECT_S):  # otherwise another program listens there
                return _Link(claim, peer, answer[1:])
            peer.close()
        return None

    def _is_gone(self, claim: Claim) -> bool:
        """Whether the leader that made `claim` has ended, so that another node may lead."""
        link = self.link if self.link is not None and self.link.claim.nonce == claim.nonce else None
        if link is not None and (link.dismissed or connection_failure(link.peer.address, claim.port) == UNSERVED):
            return True
        then, ago_s = self._claims.beaten(claim.number)
        if self._renewal != (claim.number, then):
            self._renewal, self._renewal_seen_at = (claim.number, then), time.monotonic()
        return ago_s > DEAD_S and time.monotonic() - self._renewal_seen_at > _SEEN_S

    def _lead(self, newest: Claim | None) -> _Link | None:
        """Become the leader of the next round; None if another node was first."""
        listener = open_port(group_address())
        address, port = listener.getsockname()[:2]
        number = 1 if newest is None else newest.number + 1
        claim = Claim(number, platform.node(), address, port, secrets.token_hex(16))
        if not self._claims.make(claim):
            listener.close()
            return None
        # If this node has been in no round yet, the user may have restarted the run: then no leader was lost.
        reasons = [] if newest is None or self._last is None else [f"{newest.name}, which led, has gone"]
        previous = Round(len(self._last or ()), self._last, reasons=reasons)
        self._leader = Leader(self._claims, claim, listener, self._id, self._launch, self._run, previous)
        return self._reach(claim)


def _is_finished(claims: Claims, run: ElasticRun) -> bool:
    return run.whole() and is_finished(claims.directory, run.finish_mark())


def _print(lines: list[str] | tuple[str, ...]) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)
