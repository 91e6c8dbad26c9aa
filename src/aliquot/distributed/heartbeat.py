"""A heartbeat between nodes, so that a run ends when a node becomes unreachable, whatever the run is doing.

A collective may wait very long for peers that are working, for example tokenising a corpus or writing an export. An
unreachable peer sends nothing, not even the end of its connection. So the first rank of each node writes heartbeats
into the rendezvous store, in a separate thread. Node 0 watches all nodes, and all nodes watch node 0.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable
from typing import Any, Self, cast

# Public, but not re-exported for type checkers.
from torch.distributed import Store  # type: ignore[attr-defined]

from aliquot.distributed.rank_errors import RankError, end_rank
from aliquot.distributed.topology import Topology

_INTERVAL_S = 1.0
_FAREWELL_S = 1.0
_LATE_BEATS = 3  # intervals without a heartbeat of a node after which its silence explains why this node hangs


class Heartbeat:
    """A context manager of every rank that ends this process when another node is lost.

    If another node sends no heartbeat for `timeout_s`, this process ends with code 1. Its error line names the activity
    of both nodes. If another node announces its end, this process ends at once.
    """

    def __init__(self, topology: Topology, store: Store | None, timeout_s: float, activity: Callable[[], str]) -> None:
        """`store`: the rendezvous store; None for a single rank. `activity` returns what this node is doing."""
        self._topology = topology
        self._timeout_s = timeout_s
        self._activity = activity
        self._interval_s = min(_INTERVAL_S, timeout_s / 4)
        self._is_over = threading.Event()
        self._failure: Exception | None = None  # error of the last exchange with the store
        self._store: Store | None = None
        if store is None or topology.nodes == 1 or topology.local_rank > 0:
            return
        watched = range(1, topology.nodes) if topology.node_rank == 0 else [0]
        self._heard_at = dict.fromkeys(watched, time.monotonic())
        self._last_beats: dict[int, dict[str, str | int]] = {}
        # The clone has a separate connection, because other threads block the store's connection while they wait. The
        # type stubs lack clone(). A request to an unreachable node may never return, so another thread checks the time.
        clone: Store = cast(Any, store).clone()
        self._store = clone
        for work in (lambda: self._exchange_beats(clone), self._watch_clock):
            threading.Thread(target=work, name="aliquot-heartbeat", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop sending and watching heartbeats. Further calls have no effect."""
        self._is_over.set()

    def announce_end(self, reason: str) -> None:
        """Tell the other nodes why this node ends, for example `stopped by SIGTERM`.

        Returns after the other nodes have had time to read the reason; otherwise they would report lost connections.
        """
        if self._topology.nodes == 1 or self._is_over.is_set():
            return
        if (store := self._store) is not None:
            self.stop()
            beat = json.dumps(self._beat(0) | {"left": reason})
            # The request runs in a thread, because a request to an unreachable node may never return.
            request = threading.Thread(target=store.set, args=(self._key(self._topology.node_rank), beat), daemon=True)
            request.start()
            request.join(_FAREWELL_S)
        time.sleep(2 * self._interval_s)

    def explain_hang(self) -> None:
        """End this process as `peer_lost` if another node is silent; return if this node hangs for another reason.

        A watchdog calls this when it finds a hang. The watchdog's timeout may have started before the other node became
        silent, so the watchdog may act before the heartbeat does.
        """
        if self._topology.nodes == 1 or self._is_over.is_set():
            return
        if self._store is None:  # only the first rank of this node watches; if that rank ends, this rank ends as well
            time.sleep(_LATE_BEATS * self._interval_s)
        else:
            self._end_if_silent(_LATE_BEATS * self._interval_s)

    def _beat(self, count: int) -> dict[str, str | int]:
        return {"beats": count, "doing": self._activity(), "host": platform.node()}

    @staticmethod
    def _key(node: int) -> str:
        return f"heartbeat/{node}"

    def _exchange_beats(self, store: Store) -> None:
        count = 0
        while not self._is_over.wait(self._interval_s if count else 0):
            count += 1
            try:
                store.set(self._key(self._topology.node_rank), json.dumps(self._beat(count)))
                for node in self._heard_at:
                    if not store.check([self._key(node)]):
                        continue
                    beat = json.loads(store.get(self._key(node)))
                    if beat != self._last_beats.get(node):
                        self._last_beats[node], self._heard_at[node] = beat, time.monotonic()
                        if reason := beat.get("left"):
                            self._end(f"node {node} ({beat['host']}) was {reason} while {beat['doing']}")
            except Exception as error:
                # Node 0 has ended or is unreachable. The thread must go on after any other error as well: without its
                # heartbeats the other nodes would end the run, although this node works.
                self._failure = error
                time.sleep(self._interval_s)
            else:
                self._failure = None

    def _watch_clock(self) -> None:
        while not self._is_over.wait(self._interval_s):
            self._end_if_silent(self._timeout_s)

    def _end_if_silent(self, longest_s: float) -> None:
        for node, heard_at in self._heard_at.items():
            if (silent_s := time.monotonic() - heard_at) > longest_s:
                self._end(self._describe_silence(node, silent_s))

    def _describe_silence(self, node: int, silent_s: float) -> str:
        beat = self._last_beats.get(node)
        name = f"node {node} ({beat['host']}, {beat['doing']})" if beat else f"node {node}"
        return (
            f"no word from {name} for {silent_s:.0f} s (launch.step_timeout_s), while node"
            f" {self._topology.node_rank} was {self._activity()}: is it gone, or is the network between them cut?"
        )

    def _end(self, message: str) -> None:
        failure = "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}\n"
        end_rank(RankError(self._topology.rank, "peer_lost", message, f"{message}\n{failure}", time.time()))
