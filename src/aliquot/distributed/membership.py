"""The leader of an elastic run: it tracks the present nodes, starts rounds, and reacts when nodes join, leave or fail.

The leader runs in the launcher of one node; this node is a member like all other nodes. A member first sends `hello`,
then `beat` every second, `ended` when its ranks have ended, and `leave` when it has received a stop signal. The leader
sends `start` (a round), `stop` (save the last finished step), `kill`, `wait` and `end` (of the run). When the leader's
node has received a stop signal, the leader sends `leave`, and another node leads.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import NodesDifferError, RendezvousError, StorageError, UserError
from aliquot.distributed.config_consistency import describe_differences
from aliquot.distributed.gloo_interface import listening_address
from aliquot.distributed.json_lines import Message, Peer
from aliquot.distributed.leader_lease import Claim, Claims, newest_round
from aliquot.distributed.rank_errors import Ended, judge
from aliquot.distributed.store_server import serve_store

BEAT_S = 1.0
SILENT_S = 6.0  # a node that is silent for this long counts as lost
ENDING_S = 15.0  # ranks that still run this long after the first rank has ended are stuck
_SETTLE_S = 3.0  # a round starts this long after the last node joined, so that more nodes can join
# A minority of the nodes waits this long, longer than leader_lease.DEAD_S: after a network split, the majority then
# claims the next round first.
_MINORITY_S = 15.0
_POLL_S = 0.1
_FAREWELL_S = 2.0
_MOST_STRANGERS = 64  # limit of connections without a signed message


@dataclass(frozen=True)
class ElasticRun:
    """Facts and callbacks of the run that the leader needs."""

    mark: str  # JSON of settings and versions, equal on all nodes of one run
    progress: Callable[[], tuple[int, int]]  # steps of the newest checkpoint, and steps done
    tell: Callable[[str], None]  # shows a line on the console
    whole: Callable[[], bool]  # whether all results of a finished run exist

    def finish_mark(self) -> str:
        """Return a mark that identifies the finished run by its settings and by the step of its newest checkpoint."""
        return f"{self.mark} {self.progress()[0]}"


@dataclass
class Member:
    """A node that is connected to the leader."""

    peer: Peer
    heard: float
    id: str = ""
    ranks: int = 0
    automatic: bool = False
    name: str = ""  # for the console
    ended: Ended | None = None  # how the node's ranks have ended in the present round

    @property
    def finished(self) -> bool:
        """Whether the node's ranks have finished the whole run, so that other nodes no longer need this node."""
        return self.ended is not None and self.ended.code == 0


@dataclass
class Round:
    """The present round and the events since its start; between two rounds, the earlier round."""

    size: int = 0  # number of nodes at its start, without nodes that left on request
    expected: frozenset[str] | None = None  # ids of survivors of the last round; None: unknown, or there was no round
    members: list[Member] = field(default_factory=list)  # nodes that train and are still connected
    running: bool = False
    reasons: list[str] = field(default_factory=list)  # why the next round starts
    ending: float | None = None  # when the first ranks ended
    killed: bool = False
    came: float | None = None  # when a node joined that could take part


class Leader:
    """Leads from round `claim.number` on, in a thread, until the run ends or another node leads a newer round."""

    def __init__(
        self, claims: Claims, claim: Claim, listener: socket.socket, own_id: str, launch: LaunchSection,
        run: ElasticRun, previous: Round,
    ) -> None:  # fmt: skip
        """`previous`: the round before, as far as this node knows it, and why this node became the leader."""
        self._claims, self._claim, self._listener, self._own_id = claims, claim, listener, own_id
        self._launch, self._run = launch, run
        self._members: list[Member] = []
        self._round = previous
        self._claim_used = False  # whether a round has started with this claim
        self._changed = self._last_beat = self._waiting_since = time.monotonic()
        self._failed_at: int | None = None  # the newest checkpoint's step at the last failure
        self._proven = set(previous.expected or ())  # ids of nodes that have trained
        self._over = threading.Event()
        self._superseded = self._enough = False
        self._claiming = threading.Lock()  # `_keep` must not take a claim of this node for another node's
        self._thread = threading.Thread(target=self._lead, name="aliquot-leader", daemon=True)
        self._thread.start()
        threading.Thread(target=self._keep, name="aliquot-claim", daemon=True).start()

    def leave(self) -> None:
        """Stop leading, because this node has received a stop signal or has failed; another node leads afterwards."""
        self._over.set()
        self._thread.join()

    def _keep(self) -> None:
        """Renew the lease, in a separate thread, because a file system that hangs must not block the leader."""
        while not self._over.wait(BEAT_S):
            with suppress(OSError, StorageError):
                if self._enough:
                    self._claims.beat(self._claim.number)
                with self._claiming:
                    newest = newest_round(self._claims.directory)
                    self._superseded = newest is not None and newest > self._claim.number

    def _lead(self) -> None:
        try:
            self._rounds()
        except (OSError, UserError) as error:  # from the run directory; a node that can write to it leads next
            self._run.tell(f"{self._claim.name} leads no longer: {error}")
        finally:
            self._over.set()
            self._listener.close()
            until = time.monotonic() + _FAREWELL_S
            _send(self._members, "leave")
            for member in self._members:
                member.peer.see_off(until)

    def _rounds(self) -> None:
        while not self._over.is_set():
            self._listen()
            for member in [member for member in self._members if time.monotonic() - member.heard > SILENT_S]:
                self._lost(member, f"was not heard of for {SILENT_S:g} s")
            if self._superseded:
                self._run.tell(f"round {self._claim.number} is over: another node has begun a newer one")
                self._kill()
                break
            if time.monotonic() - self._last_beat > BEAT_S:
                self._last_beat = time.monotonic()
                _send(self._members, "beat")
            if self._round.running:
                self._watch()
            else:
                self._gather()

    # Connections and messages of members

    def _listen(self) -> None:
        with selectors.PollSelector() as selector:
            for connection in (self._listener, *(member.peer.socket for member in self._members)):
                selector.register(connection, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(_POLL_S)}
        if self._listener in ready:
            with suppress(OSError):
                self._members.append(Member(Peer(self._listener.accept()[0], self._claim.nonce), time.monotonic()))
        for member in [member for member in self._members if member.peer.socket in ready]:
            try:
                for message in member.peer.receive():
                    member.heard = time.monotonic()
                    self._heard(member, message)
            except (KeyError, TypeError, ValueError) as error:  # a message that no node of this run sends
                self._lost(member, f"sent a message that cannot be read ({type(error).__name__}: {error})")
            if member.peer.closed and member in self._members:
                self._lost(member, "was lost")
        strangers = [member for member in self._members if not member.id]
        for member in strangers[
            :-_MOST_STRANGERS
        ]:  # keep the newest: a node of the run sends its first message at once
            self._remove(member)

    def _heard(self, member: Member, message: Message) -> None:
        what = message.get("what")
        if what == "hello":
            self._welcome(member, message)
        elif what == "ended" and message["round"] == self._claim.number:
            member.ended = Ended(**message["report"])
            if member.ended.code:
                self._round.ending = self._round.ending or time.monotonic()
        elif what == "leave":
            if member in self._round.members and not member.finished:
                self._round.reasons.append(f"{member.name} was told to stop")
                self._round.size -= 1
                self._round.ending = self._round.ending or time.monotonic()
            self._remove(member)

    def _welcome(self, member: Member, message: Message) -> None:
        member.name = f"{message['host']} ({member.peer.address})"
        member.ranks, member.automatic = message["ranks"], message["automatic"]
        member.id = message["id"]
        member.peer.send("hello")
        if message["mark"] != self._run.mark:
            words = describe_differences(json.loads(self._run.mark), json.loads(message["mark"]))
            error = NodesDifferError(f"{member.name} differs from {self._claim.name}: {words}")
            self._run.tell(f"sent away: {error}")
            member.peer.send("end", code=error.exit_code, lines=[f"aliquot: {error.line}"])
            self._remove(member)
            return
        self._changed = time.monotonic()
        if not self._round.running:
            return
        if len(self._round.members) < self._launch.most_nodes:
            self._round.came = time.monotonic()
            self._round.reasons.append(f"{member.name} has come")
        else:
            member.peer.send(
                "wait", text=f"{self._launch.most_nodes} nodes train, the maximum: this node waits for a place"
            )

    def _lost(self, member: Member, how: str) -> None:
        trained = self._round.running and member in self._round.members and not member.finished
        self._remove(member)
        if trained:
            self._round.reasons.append(f"{member.name} {how}")
            self._kill()

    def _remove(self, member: Member) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        self._round.members = [node for node in self._round.members if node is not member]
        if member.id:
            self._changed = time.monotonic()
        member.peer.close()

    # Between rounds

    def _gather(self) -> None:
        here = [member for member in self._members if member.id]
        fewest, most, now = self._launch.fewest_nodes, self._launch.most_nodes, time.monotonic()
        minority = 2 * len(here) < self._round.size and now - self._changed < _MINORITY_S
        self._enough = len(here) >= fewest and not minority
        expected = self._round.expected
        all_here = expected is not None and expected <= {member.id for member in here}
        if self._enough and (len(here) >= most or all_here or now - self._changed > _SETTLE_S):
            # Nodes of the last round take precedence, then nodes that joined earlier.
            here.sort(key=lambda member: (member.id != self._own_id, member not in self._round.members))
            self._start(here[:most], here[most:])
        elif now - self._waiting_since > self._launch.join_timeout_s:
            names = ", ".join(member.name for member in here)
            reasons = "; ".join(self._round.reasons)
            error = RendezvousError(
                f"{len(here)} of at least {fewest} nodes (launch.nodes {self._launch.nodes}) came within"
                f" {self._launch.join_timeout_s:g} s (launch.join_timeout_s): {names}{'; ' * bool(reasons)}{reasons};"
                f" they find each other by the run directory {self._claims.directory}, which all must share"
            )
            self._end(
                1, f"aliquot: {error.line}"
            )  # code 1, not 2 as for bad input: in a cluster that replaces pods, other nodes may join later

    def _start(self, members: list[Member], spare: list[Member]) -> None:
        number = self._claim.number + self._claim_used
        claim = replace(self._claim, number=number)
        with self._claiming:
            if self._claim_used and not self._claims.make(claim):
                self._superseded = True
                return
            self._claim, self._claim_used = claim, True
        saved, done = self._run.progress()
        names = ", ".join(member.name for member in members)
        why = f", because {'; '.join(self._round.reasons)}" if self._round.reasons else ""
        again = f", {done - saved} of {done} are done again" if done > saved else ""
        self._run.tell(f"round {number}: {_nodes(len(members))} ({names}) from step {saved}{again}{why}")
        if number == 1 and (more := self._launch.most_nodes - len(members)):
            # Name the directory: without a common directory, every node would start a separate run.
            may = "1 more node may come: one" if more == 1 else f"{more} more nodes may come: those"
            self._run.tell(f"{may} with the same run directory, {self._claims.directory}")
        ranks = min(member.ranks for member in members) if all(member.automatic for member in members) else None
        address = members[1].peer.own_address if len(members) > 1 else "127.0.0.1"
        # The ranks of this node, which is node 0 of the round, find the store in this process by its port.
        self._store = serve_store(listening_address(address), 0)
        for node, member in enumerate(members):
            member.ended = None
            member.peer.send(
                "start", round=number, node=node, nodes=len(members), address=address if node == 0 else None,
                port=self._store.port, ranks=ranks or member.ranks, ids=[node.id for node in members],
            )  # fmt: skip
        _send(spare, "wait", text=f"{_nodes(len(members))}, the maximum: this node waits for a place")
        self._round = Round(len(members), frozenset(), members, running=True)

    # During a round

    def _watch(self) -> None:
        round, now = self._round, time.monotonic()
        left = [member for member in round.members if member.ended is None]
        if not left:
            self._judge([member.ended for member in round.members if member.ended is not None])
        elif round.ending is not None and now - round.ending > ENDING_S and not round.killed:
            self._kill()
        elif round.came is not None and round.ending is None and now - round.came > _SETTLE_S:
            round.came = None
            _send(left, "stop")

    def _kill(self) -> None:
        """Kill the ranks: after the loss of a node they cannot save, and would wait long for the lost ranks."""
        self._round.killed = True
        _send(self._round.members, "kill")

    def _judge(self, reports: list[Ended]) -> None:
        """Obey the verdict after all remaining ranks have ended."""
        reasons, saved, new = self._round.reasons, self._run.progress()[0], self._new_beside_proven()
        verdict, cause = judge(reports, bool(reasons), bool(new), self._failed_at == saved)
        if verdict == "finish":
            self._claims.finish(self._run.finish_mark())
            self._end(0)
        elif verdict == "end":
            self._end(cause.code, *cause.lines)
        else:
            if verdict == "send away":
                self._send_away(new, cause.lines)
            elif not reasons:
                self._failed_at = saved
                reasons.append(cause.lines[0].removeprefix("aliquot: "))
            else:  # without the change of nodes, the round would have continued: its members work
                self._proven |= {member.id for member in self._round.members}
            self._round.running, self._round.ending = False, None
            self._changed = self._waiting_since = time.monotonic()

    def _new_beside_proven(self) -> list[Member]:
        """Return the members that have never trained, if other members have: then a new member caused the failure."""
        new = [member for member in self._round.members if member.id not in self._proven]
        return new if len(new) < len(self._round.members) else []

    def _send_away(self, members: list[Member], lines: Sequence[str]) -> None:
        """End the run on nodes whose data differ or are missing; the remaining nodes continue."""
        names = ", ".join(member.name for member in members)
        self._round.reasons = [f"{names} cannot take part: {lines[0].removeprefix('aliquot: ')}"]
        self._round.size -= len(members)
        _send(members, "end", code=2, lines=lines)
        for member in members:
            self._remove(member)

    def _end(self, code: int, *lines: str) -> None:
        _send(self._members, "end", code=code, lines=lines)
        self._over.set()


def _send(members: Sequence[Member], what: str, **fields: Any) -> None:
    for member in members:
        member.peer.send(what, **fields)


def _nodes(count: int) -> str:
    return f"{count} node{'s train' if count > 1 else ' trains'}"
