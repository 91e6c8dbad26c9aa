"""Nodes say again and again that they are there, so that a cut cable ends a run in whatever it is doing.

A collective waits for its peers as long as they may work: to tokenise a corpus, to write an export. A peer that is out
of reach sends nothing, not even that its connection is closed. So one rank of each node writes into the store in which
they have met, beside all work; node 0 watches the others, and they watch node 0.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from typing import Any, Self, cast

# Public, but not re-exported for type checkers.
from torch.distributed import Store  # type: ignore[attr-defined]

from aliquot.distributed.rank_errors import RankError, end_rank
from aliquot.distributed.topology import Topology

_EVERY_S = 1.0
_LAST_WORD_S = 1.0


class Presence:
    """A context, of every rank. `doing`, in words, is what the other nodes will say of this one if it is lost.

    Without a word from a node for `timeout_s` this process ends with code 1, and its line says what was going on; so it
    does at once where a node says that it ends.
    `store` None: there is nobody else.
    """

    def __init__(self, topology: Topology, store: Store | None, timeout_s: float) -> None:
        self.doing = "beginning"
        self._topology = topology
        self._timeout_s = timeout_s
        self._every_s = min(_EVERY_S, timeout_s / 4)
        self._over = threading.Event()
        self._failure: Exception | None = None  # of the last attempt to say or hear something
        self._store: Store | None = None
        if store is None or topology.nodes == 1 or topology.local_rank > 0:
            return
        others = range(1, topology.nodes) if topology.node_rank == 0 else [0]
        self._heard_at = dict.fromkeys(others, time.monotonic())
        self._told: dict[int, dict[str, str | int]] = {}
        # A connection of its own, because others wait in the store's. Whoever talks to what a cut cable leads to may
        # never get an answer, so another thread looks at the clock.
        own: Store = cast(Any, store).clone()  # which type checkers are not told of
        self._store = own
        for work in (lambda: self._talk(own), self._watch):
            threading.Thread(target=work, name="aliquot-presence", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """From here on no node waits for another. May be called again."""
        self._over.set()

    def leave(self, why: str) -> None:
        """Say that this node's part in the run ends, `stopped by SIGTERM` for example, unless that takes too long.

        Returns when the others have had time to hear it, who would else be told of lost connections alone.
        """
        if self._topology.nodes == 1 or self._over.is_set():
            return
        if (store := self._store) is not None:
            self.stop()
            told = json.dumps(self._own(0) | {"left": why})
            # Whoever talks to what a cut cable leads to may never get an answer.
            word = threading.Thread(target=store.set, args=(self._place(), told), daemon=True)
            word.start()
            word.join(_LAST_WORD_S)
        time.sleep(2 * self._every_s)

    def _own(self, beats: int) -> dict[str, str | int]:
        return {"beats": beats, "doing": self.doing, "host": platform.node()}

    def _place(self) -> str:
        return f"presence/{self._topology.node_rank}"

    def _talk(self, store: Store) -> None:
        beats = 0
        while not self._over.wait(self._every_s if beats else 0):
            beats += 1
            try:
                store.set(self._place(), json.dumps(self._own(beats)))
                for other in self._heard_at:
                    if not store.check([f"presence/{other}"]):
                        continue
                    told = json.loads(store.get(f"presence/{other}"))
                    if told != self._told.get(other):
                        self._told[other], self._heard_at[other] = told, time.monotonic()
                        if why := told.get("left"):
                            self._end(f"node {other} ({told['host']}) was {why} while {told['doing']}")
            except Exception as error:
                # Node 0 has ended, and its ranks' connections with it; or it is out of reach. Whatever else it is, a
                # thread that ended here would have all others end the run for a node that is well.
                self._failure = error
                time.sleep(self._every_s)
            else:
                self._failure = None

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            for node, heard_at in self._heard_at.items():
                if (silent_s := time.monotonic() - heard_at) > self._timeout_s:
                    self._end(self._silent(node, silent_s))

    def _silent(self, node: int, silent_s: float) -> str:
        told = self._told.get(node)
        which = f"node {node} ({told['host']}, {told['doing']})" if told else f"node {node}"
        return (
            f"no word from {which} for {silent_s:.0f} s (launch.step_timeout_s), while node"
            f" {self._topology.node_rank} was {self.doing}: is it gone, or is the network between them cut?"
        )

    def _end(self, message: str) -> None:
        why = "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}\n"
        end_rank(RankError(self._topology.rank, "peer_lost", message, f"{message}\n{why}", time.time()))
