"""The leader of the rounds of a run whose nodes come and go: who is here, who trains, what follows when that changes.

It lives in the launcher of one node, which is its member as the others are. A member says `hello`, then `beat` again
and again, `ended` when its ranks have, `leave` when it was told to stop. The leader says `start`, `stop` (finish the
step, save), `kill`, `wait`, `end` (of the run), and `leave` when its own node was told to stop: another one leads then.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import NodesDifferError, RendezvousError, StorageError, UserError
from aliquot.distributed.config_consistency import differences
from aliquot.distributed.json_lines import Message, Peer
from aliquot.distributed.leader_lease import Claim, Claims

BEAT_S = 1.0
SILENT_S = 6.0  # without a word for so long, a node is taken for lost
ENDING_S = 15.0  # ranks that have not ended so long after the first of them are stuck
_SETTLE_S = 3.0  # nodes that come within it begin together
_MINORITY_S = 15.0  # longer than claims.DEAD_S: the larger part of nodes that lost each other claims first
_POLL_S = 0.1
_FAREWELL_S = 2.0
_MOST_STRANGERS = 64  # connections that have not said the nonce
_FATAL = ("[diverged]", "[engine-check]")  # with all of the same input and state they would come again
_AGAIN = ("[rendezvous]", "[cut-off]")


@dataclass(frozen=True)
class Run:
    """What the leader must know of the run."""

    mark: str  # JSON of settings and versions: the same on nodes that do the same
    progress: Callable[[], tuple[int, int]]  # steps of the newest checkpoint, and steps done
    tell: Callable[[str], None]  # the person
    whole: Callable[[], bool]  # whether all is there that it leaves when it is finished

    def finish_mark(self) -> str:
        """Of the run with the checkpoint that it has now: another one, or none, is not the end of it."""
        return f"{self.mark} {self.progress()[0]}"


@dataclass
class Member:
    peer: Peer
    heard: float
    id: str = ""
    ranks: int = 0
    automatic: bool = False
    name: str = ""  # for the person
    ended: Message | None = None  # of the present round

    @property
    def finished(self) -> bool:
        """Its ranks are done with the whole run: the others can do without it."""
        return self.ended is not None and self.ended["code"] == 0


@dataclass
class _Round:
    """The present round, or between two the last one, and what has happened since it began."""

    members: list[Member]  # those that train and have not gone
    running: bool
    size: int  # nodes that it began with, but those that left by will
    expected: frozenset[str] | None  # of those of the last round that live; None: it is not known who will come
    reasons: list[str] = field(default_factory=list)  # for another round
    ending: float | None = None  # since when its ranks end
    killed: bool = False
    came: float | None = None  # when a node did that could take part


class Leader:
    """Leads from round `claim.number` on, in a thread, until the run ends or another node leads a newer round."""

    def __init__(
        self, claims: Claims, claim: Claim, listeners: Sequence[socket.socket], own: str, launch: LaunchSection,
        run: Run, expected: frozenset[str] | None, reasons: list[str],
    ) -> None:  # fmt: skip
        """`own`: the id of this node; `expected`: those of the last round that live as far as is known, None: none;
        `reasons`: why it leads.
        """
        self._claims, self._claim, self._listeners, self._own = claims, claim, listeners, own
        self._launch, self._run = launch, run
        self._members: list[Member] = []
        self._round = _Round([], False, len(expected or ()), expected, reasons)
        self._claim_used = False  # by a round
        self._changed = self._said = self._waiting_since = time.monotonic()
        self._failed_at: int | None = None  # steps saved at the last failure
        self._proven = set(expected or ())  # ids of those that have trained
        self._over = threading.Event()
        self._superseded = self._enough = False
        self._claiming = threading.Lock()  # an own claim is not another node's
        self._thread = threading.Thread(target=self._lead, name="aliquot-leader", daemon=True)
        self._thread.start()
        threading.Thread(target=self._keep, name="aliquot-claim", daemon=True).start()

    def leads(self, claim: Claim) -> bool:
        return claim.nonce == self._claim.nonce and not self._over.is_set()

    def leave(self) -> None:
        """This node was told to stop, or has failed: another one leads from here on."""
        self._over.set()
        self._thread.join()

    def _keep(self) -> None:
        """In a thread of its own, which a file system that hangs keeps from nothing else."""
        while not self._over.wait(BEAT_S):
            with suppress(OSError, StorageError):
                if self._enough:
                    self._claims.beat(self._claim.number)
                with self._claiming:
                    newest = self._claims.newest_number()
                    self._superseded = newest is not None and newest > self._claim.number

    def _lead(self) -> None:
        try:
            self._rounds()
        except (OSError, UserError) as error:  # of the run directory; a node that can write it leads from here on
            self._run.tell(f"{self._claim.name} leads no longer: {error}")
        finally:
            self._over.set()
            for listener in self._listeners:
                listener.close()
            until = time.monotonic() + _FAREWELL_S
            for member in self._members:
                member.peer.send("leave")
            for member in self._members:
                member.peer.see_off(until)

    def _rounds(self) -> None:
        while not self._over.is_set():
            self._listen()
            for member in [each for each in self._members if time.monotonic() - each.heard > SILENT_S]:
                self._lost(member, f"was not heard of for {SILENT_S:g} s")
            if self._superseded:
                self._run.tell(f"round {self._claim.number} is over: another node has begun a newer one")
                self._kill()
                break
            if time.monotonic() - self._said > BEAT_S:
                self._said = time.monotonic()
                for member in self._members:
                    member.peer.send("beat")
            if self._round.running:
                self._watch()
            else:
                self._gather()

    # Who is here

    def _listen(self) -> None:
        with selectors.PollSelector() as selector:
            for connection in (*self._listeners, *(member.peer.socket for member in self._members)):
                selector.register(connection, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(_POLL_S)}
        for listener in [each for each in self._listeners if each in ready]:
            with suppress(OSError):
                self._members.append(Member(Peer(listener.accept()[0]), time.monotonic()))
        for member in [each for each in self._members if each.peer.socket in ready]:
            try:
                for message in member.peer.receive():
                    member.heard = time.monotonic()
                    self._heard(member, message)
            except (KeyError, TypeError, ValueError) as error:  # of a message that none of ours sends
                self._lost(member, f"sent a message that cannot be read ({type(error).__name__}: {error})")
            if member.peer.closed and member in self._members:
                self._lost(member, "was lost")
        strangers = [member for member in self._members if not member.id]
        for member in strangers[:-_MOST_STRANGERS]:  # the oldest: a node says at once who it is
            self._remove(member)

    def _heard(self, member: Member, message: Message) -> None:
        what = message.get("what")
        if what == "hello":
            self._welcome(member, message)
        elif not member.id:
            self._remove(member)  # a stranger
        elif what == "ended" and message["round"] == self._claim.number:
            member.ended = message
            if message["code"]:
                self._round.ending = self._round.ending or time.monotonic()
        elif what == "leave":
            if member in self._round.members and not member.finished:
                self._round.reasons.append(f"{member.name} was told to stop")
                self._round.size -= 1
                self._round.ending = self._round.ending or time.monotonic()
            self._remove(member)

    def _welcome(self, member: Member, message: Message) -> None:
        if not hmac.compare_digest(str(message.get("nonce")).encode(), self._claim.nonce.encode()):
            self._remove(member)
            return
        address = self._claim.addresses[0] if message["id"] == self._own else member.peer.address
        member.name = f"{message['host']} ({address})"
        member.ranks, member.automatic = message["ranks"], message["automatic"]
        member.id, member.peer.is_known = message["id"], True
        member.peer.send("hello", nonce=self._claim.nonce)
        if message["mark"] != self._run.mark:
            words = differences(json.loads(self._run.mark), json.loads(message["mark"]))
            error = NodesDifferError(f"{member.name} does not train what {self._claim.name} does: {words}")
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
                "wait", text=f"{self._launch.most_nodes} nodes train, the most: this one waits for a place"
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
        self._round.members = [each for each in self._round.members if each is not member]
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
            # Those that trained go on to; of the others who came first.
            here.sort(key=lambda member: (member.id != self._own, member not in self._round.members))
            self._start(here[:most], here[most:])
        elif now - self._waiting_since > self._launch.join_timeout_s:
            names = ", ".join(member.name for member in here)
            told = "; ".join(self._round.reasons)
            error = RendezvousError(
                f"{len(here)} of at least {fewest} nodes (launch.nodes {self._launch.nodes}) came within"
                f" {self._launch.join_timeout_s:g} s (launch.join_timeout_s): {names}{'; ' * bool(told)}{told}; they"
                f" find each other by the run directory {self._claims.directory}, which all must share"
            )
            self._end(1, f"aliquot: {error.line}")  # not 2, as for bad input: where pods are replaced, others may come

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
            # Without a common directory each would be the first of a run of its own.
            may = "1 more node may come: one" if more == 1 else f"{more} more nodes may come: those"
            self._run.tell(f"{may} with the same run directory, {self._claims.directory}")
        ranks = min(member.ranks for member in members) if all(member.automatic for member in members) else None
        with socket.socket(self._listeners[0].family) as probe:
            probe.bind((self._listeners[0].getsockname()[0], 0))  # it does not listen
            port = probe.getsockname()[1]
        address = members[1].peer.own_address if len(members) > 1 else "127.0.0.1"
        for node, member in enumerate(members):
            member.ended = None
            member.peer.send(
                "start", round=number, node=node, nodes=len(members), address=address if node == 0 else None,
                port=port, ranks=ranks or member.ranks, ids=[each.id for each in members],
            )  # fmt: skip
        for member in spare:
            member.peer.send("wait", text=f"{_nodes(len(members))}, the most: this one waits for a place")
        self._round = _Round(members, True, len(members), frozenset())

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
            for member in left:
                member.peer.send("stop")

    def _kill(self) -> None:
        """Ranks that have lost one have nothing to save, and may wait for it for long."""
        self._round.killed = True
        for member in self._round.members:
            member.peer.send("kill")

    def _judge(self, ended: list[Message]) -> None:
        """What follows, once all ranks that are left have ended."""
        causes = [each for each in ended if each["code"] and each["kind"] != "peer_lost"] or ended
        worst = next((each for each in causes if _is_final(each)), None)
        if ended and not any(each["code"] for each in ended):
            self._claims.finish(self._run.finish_mark())
            self._end(0)
        elif worst is not None and worst["code"] == 2 and (new := self._new_beside_proven()):
            self._send_away(new, worst["lines"])
            self._next_round()
        elif worst is not None:
            self._end(worst["code"], *worst["lines"])
        elif not self._round.reasons and causes[0]["code"] > 2:  # a signal to ranks, not to a launcher
            self._end(causes[0]["code"], *causes[0]["lines"])
        elif not self._round.reasons and self._failed_at == self._run.progress()[0]:
            self._end(causes[0]["code"], *causes[0]["lines"], "  twice since the last checkpoint: the run ends")
        else:
            if not self._round.reasons:
                self._failed_at = self._run.progress()[0]
                self._round.reasons.append(causes[0]["lines"][0].removeprefix("aliquot: "))
            else:  # it would have gone on
                self._proven |= {member.id for member in self._round.members}
            self._next_round()

    def _next_round(self) -> None:
        self._round.running, self._round.ending = False, None
        self._changed = self._waiting_since = time.monotonic()

    def _new_beside_proven(self) -> list[Member]:
        """Of the members of a round, at whose input it must lie that those who have trained together do so no more."""
        new = [member for member in self._round.members if member.id not in self._proven]
        return new if len(new) < len(self._round.members) else []

    def _send_away(self, members: list[Member], lines: list[str]) -> None:
        """Nodes with other data, or without some: the others go on without them."""
        names = ", ".join(member.name for member in members)
        self._round.reasons = [f"{names} cannot take part: {lines[0].removeprefix('aliquot: ')}"]
        self._round.size -= len(members)
        for member in members:
            member.peer.send("end", code=2, lines=lines)
            self._remove(member)

    def _end(self, code: int, *lines: str) -> None:
        for member in self._members:
            member.peer.send("end", code=code, lines=lines)
        self._over.set()


def _is_final(ended: Message) -> bool:
    """Whether it would come again: bad input, and what follows from input and state alone."""
    told = " ".join(ended["lines"])
    return (ended["code"] == 2 and not any(each in told for each in _AGAIN)) or any(each in told for each in _FATAL)


def _nodes(count: int) -> str:
    return f"{count} node{'s train' if count > 1 else ' trains'}"
