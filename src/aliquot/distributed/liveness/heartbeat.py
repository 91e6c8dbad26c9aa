"""A heartbeat between nodes, so that a run ends when a node becomes unreachable, whatever the run is doing.

A collective may wait very long for peers that are working, for example tokenising a corpus or writing an export. An
unreachable peer sends nothing, not even the end of its connection. So the first rank of each node writes heartbeats
into the rendezvous store, in a separate thread. Node 0 watches all nodes, and all nodes watch node 0. A rank that ends
by an error writes the reason into the store, so that the other nodes need not wait for a timeout.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self, cast

# Public, but not re-exported for type checkers.
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from aliquot.core.errors import UserError
from aliquot.distributed.liveness.watchdog import Watchdog
from aliquot.distributed.rank_errors import RankError, bounded_call, classify, end_rank
from aliquot.distributed.topology import Topology

SILENT_S = 60.0  # without a heartbeat, a node is lost: longer than any native call holds Python's lock
_INTERVAL_S = 1.0
_FAREWELL_S = 1.0
_END = "heartbeat/end"  # the key under which the first rank that ends early writes its reason
_LATE_BEATS = 3  # intervals without a heartbeat of a node after which its silence explains why this node hangs


class Heartbeat(Watchdog):
    """A context manager of every rank that ends this process when another node is lost.

    If another node sends no heartbeat for `timeout_s`, this process ends with code 1. Its error line names the activity
    of both nodes. If a rank of another node announces its end, this process ends at once.
    """

    def __init__(self, topology: Topology, store: Store | None, timeout_s: float, activity: Callable[[], str]) -> None:
        """`store`: the rendezvous store; None for a single rank. `activity` returns what this node is doing."""
        super().__init__(min(_INTERVAL_S, timeout_s / 4))
        self._topology = topology
        self._timeout_s = timeout_s
        self._activity = activity
        self._failure: Exception | None = None  # error of the last exchange with the store
        # The clone has a separate connection, because other threads block the store's connection while they wait. The
        # type stubs lack clone().
        self._store: Store | None = cast(Any, store).clone() if store is not None and topology.nodes > 1 else None
        watched = range(1, topology.nodes) if topology.node_rank == 0 else [0]
        self._heard_at = dict.fromkeys(watched, time.monotonic())
        self._last_beats: dict[int, dict[str, str | int]] = {}
        self._count = 0  # of the heartbeats of this node

    def __enter__(self) -> Self:
        if self._store is not None and self._topology.local_rank == 0:
            # A request to an unreachable node may never return, so another thread checks the time.
            self.repeat(partial(self._exchange_beats, self._store))
            self.repeat(self.check)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # All ranks raise the same UserError, and each reports the error itself.
        if error is not None and not isinstance(error, UserError):
            text = str(error).strip().partition("\n")[0]
            reason = f"ended by {type(error).__name__}{f': {text}' if text else ''}"
            self.announce_end(reason, waits=classify(error) != "peer_lost")
        self.stop()

    def announce_end(self, reason: str, waits: bool = True) -> None:
        """Tell the other nodes why this rank ends, for example `stopped by SIGTERM`.

        With `waits`, returns after the other nodes have had time to read the reason; otherwise they would report lost
        connections.
        """
        if self._store is None or self.is_over.is_set():
            return
        self.stop()
        bounded_call(partial(self._write_end, self._store, reason), _FAREWELL_S)
        if waits:
            time.sleep(2 * self.interval_s)

    def _write_end(self, store: Store, reason: str) -> None:
        # Later ends only follow from the first. An error means that node 0 has ended, and so has the run.
        with suppress(DistError):
            if not store.check([_END]):
                store.set(_END, json.dumps(self._beat(0) | {"node": self._topology.node_rank, "reason": reason}))

    def explain_hang(self) -> None:
        """End this process as `peer_lost` if another node is silent; return if this node hangs for another reason.

        A watchdog calls this when it finds a hang. The watchdog's timeout may have started before the other node became
        silent, so the watchdog may act before the heartbeat does.
        """
        if self._topology.nodes == 1 or self.is_over.is_set():
            return
        if self._topology.local_rank:  # if the first rank of this node ends, this rank ends as well
            time.sleep(_LATE_BEATS * self.interval_s)
        else:
            self.check(_LATE_BEATS * self.interval_s)

    def _beat(self, count: int) -> dict[str, str | int]:
        return {"beats": count, "doing": self._activity(), "host": platform.node()}

    def _exchange_beats(self, store: Store) -> None:
        self._count += 1
        try:
            if store.check([_END]):
                end = json.loads(store.get(_END))
                # A rank of this node reports its error to the launcher itself.
                if end["node"] != self._topology.node_rank and not self.is_over.is_set():
                    self._end(f"node {end['node']} ({end['host']}) was {end['reason']} while {end['doing']}")
            store.set(f"heartbeat/{self._topology.node_rank}", json.dumps(self._beat(self._count)))
            for node in self._heard_at:
                if not store.check([f"heartbeat/{node}"]):
                    continue
                beat = json.loads(store.get(f"heartbeat/{node}"))
                if beat["beats"] > self._last_beats.get(node, {"beats": 0})["beats"]:
                    self._last_beats[node], self._heard_at[node] = beat, time.monotonic()
        except Exception as error:
            # Node 0 has ended or is unreachable. The thread must go on after any other error as well: without its
            # heartbeats the other nodes would end the run, although this node works.
            self._failure = error
        else:
            self._failure = None

    def check(self, longest_s: float | None = None) -> None:
        """End this process if another node has been silent for longer than `longest_s`, by default the timeout."""
        for node, heard_at in self._heard_at.items():
            if (silent_s := time.monotonic() - heard_at) > (self._timeout_s if longest_s is None else longest_s):
                beat = self._last_beats.get(node)
                name = f"node {node} ({beat['host']}, {beat['doing']})" if beat else f"node {node}"
                self._end(
                    f"no word from {name} for {silent_s:.0f} s, while node {self._topology.node_rank} was"
                    f" {self._activity()}: is it gone, or is the network between them cut?"
                )

    def _end(self, message: str) -> None:
        failure = "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}\n"
        end_rank(RankError(self._topology.rank, "peer_lost", message, f"{message}\n{failure}", time.time()))
