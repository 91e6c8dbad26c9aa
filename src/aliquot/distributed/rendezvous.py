"""Rendezvous of nodes and ranks: all join through a signed store, and an error names missing nodes or ranks.

Node 0 or rank 0 serves the store. Every node or rank writes an entry into the store, and waits for the entries of all
others. After `launch.join_timeout_s`, all that have joined end with the same error line, which names the missing nodes
or ranks. The store listens on one address only (store_server.py), and ignores values that this run has not signed
(signed_store.py).

A program without the secret can play back the signed entries of an earlier start of the run. Every member of a signed
store therefore draws a nonce. The keys of a start contain the nonce of member 0, and the answer of member 0 contains
the nonces of all members.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import psutil
import torch

# Public, but not re-exported for type checkers.
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import LaunchError, NodesDifferError, RendezvousError
from aliquot.distributed.collectives.peers import host_identity
from aliquot.distributed.gloo_interface import address_of, check_network, gloo_interface, listen, listening_address
from aliquot.distributed.run_secret import SECRET_FILE, SECRET_VARIABLE, new_secret
from aliquot.distributed.signed_store import SignedStore, sign_store
from aliquot.distributed.store_server import (
    CONNECT_TIMEOUT_S,
    STORE_TIMEOUT_S,
    Deadline,
    connection_failure,
    open_store,
    serve_store,
    wrong_master_address,
)
from aliquot.distributed.topology import Topology, check_gpus, integer_variable, port_variable

_POLL_S = 0.1
_FIRST_POLL_S = 0.01
_GRACE_S = 2.0  # member 0 keeps the store open for this long, because other members may still read from the store
_ALL = "all"  # the key of the entries of all members
_PATHS = "paths"  # the key of the first path between two hosts that does not work; an empty text if all work
_LOCAL_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")

_Entry = dict[str, Any]  # the JSON object that a member publishes


@dataclass(frozen=True)
class NodeGroup:
    """The nodes whose launchers have joined, and the data that the ranks need for the rendezvous of ranks."""

    store: SignedStore  # the store of the launchers, which the ranks use as well; on node 0 the server of the store
    address: str
    port: int
    node: int
    nodes: int
    run_id: str
    secret: str = field(repr=False)


def single_node() -> NodeGroup:
    """Return the group of a single node: a store on loopback, with a secret that only this launcher knows.

    The store listens on the interface in GLOO_SOCKET_IFNAME if set, as gloo does.
    """
    check_network()
    server, secret, run_id = serve_store(listening_address("127.0.0.1"), 0), new_secret(), new_secret()
    return NodeGroup(SignedStore(server, secret, run_id), server.host, server.port, 0, 1, run_id, secret)


def meet_nodes(launch: LaunchSection, automatic: bool, secret: str) -> tuple[NodeGroup, int]:
    """Join the launchers of the other nodes. Return the group, and the number of local ranks.

    Keep a reference to the group for as long as the ranks run. If `automatic`, every node starts the smallest number of
    ranks that any node has chosen for itself. Raises UserError, which names a missing node.
    """
    where = f"{launch.master_address}:{launch.master_port}"
    print(f"aliquot: node {launch.node_rank} of {launch.most_nodes} meets the others at {where}", file=sys.stderr)
    deadline = Deadline(launch.join_timeout_s)
    store = open_store(launch.master_address, launch.master_port, launch.node_rank == 0, deadline, "node 0")
    # Check that node 0 is reachable under the name that the other nodes use.
    if launch.node_rank == 0 and (failure := connection_failure(launch.master_address, launch.master_port)):
        raise wrong_master_address(launch.master_address, failure)
    nodes = SignedStore(store, secret, "", "aliquot/nodes/")
    meeting = _Meeting(nodes, "node", launch.node_rank, launch.most_nodes)
    entries = meeting.exchange({"ranks": launch.ranks}, deadline)
    meeting.leave()
    group = _node_group(store, launch, launch.most_nodes, entries[0]["nonce"], secret)
    return group, min(entry["ranks"] for entry in entries) if automatic else int(launch.ranks)


def meet_round(launch: LaunchSection, nodes: int, run_id: str, secret: str, timeout_s: float) -> NodeGroup:
    """Join the nodes of an elastic round and return their group. Raises UserError.

    No entries are exchanged, because the leader of the round has already given every node its number.
    """
    store = open_store(
        launch.master_address, launch.master_port, launch.node_rank == 0, Deadline(timeout_s), "node 0 of the round"
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    return _node_group(store, launch, nodes, run_id, secret)


def _node_group(store: TCPStore, launch: LaunchSection, nodes: int, run_id: str, secret: str) -> NodeGroup:
    # The ranks of node 0 use the address that the store listens on, because the master's name may not resolve to it.
    address = store.host if launch.node_rank == 0 else launch.master_address
    signed = SignedStore(store, secret, run_id)
    return NodeGroup(signed, address, launch.master_port, launch.node_rank, nodes, run_id, secret)


def meet_ranks(topology: Topology, environ: Mapping[str, str], timeout_s: float) -> Store:
    """Join the other ranks, as torchrun's environment variables describe them. Return the store for process groups.

    Raises UserError, which names a missing rank, two hosts that cannot reach each other, or two ranks with one GPU.
    """
    rank, world_size = topology.rank, topology.world_size
    address, port = _master(environ)
    deadline = Deadline(timeout_s)
    # An elastic launcher serves the store itself; otherwise rank 0 does.
    is_server = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = open_store(address, port, is_server, deadline, "rank 0")
    ranks = sign_store(store, environ, f"aliquot/ranks/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
    meeting = _Meeting(ranks, "rank", rank, world_size)
    listener = _listen() if topology.nodes > 1 and topology.local_rank == 0 else None
    with listener or nullcontext():
        entry: _Entry = {} if listener is None else {"at": listener.getsockname()[:2]}
        if topology.device == "cuda":
            entry["gpu"] = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        entries = meeting.exchange(entry, deadline)
        _check_paths(meeting, entries)
    meeting.leave()
    check_gpus([entry.get("gpu") for entry in entries])
    return meeting.store


@contextmanager
def infer_local_ranks(environ: MutableMapping[str, str], timeout_s: float) -> Iterator[bool]:
    """Set torchrun's local variables (LOCAL_RANK, ...) in `environ`, for ranks that srun or a shell loop has started.

    The ranks exchange their hosts through the store of the later rendezvous. The block keeps that store open, so the
    ranks must join within the block. Yields whether every rank of this host is already bound to different cores, for
    example by srun. Collective if `environ` lacks the variables. Raises UserError.
    """
    if _has_local_ranks(environ):
        yield False
        return
    address, port = _master(environ)
    rank, world_size = integer_variable(environ, "RANK", 0), integer_variable(environ, "WORLD_SIZE", 1)
    if rank >= world_size:
        raise LaunchError(
            f"the environment says rank {rank} of {world_size}: ranks count from 0. Correct RANK and WORLD_SIZE"
        )
    deadline = Deadline(timeout_s)
    store = open_store(address, port, rank == 0, deadline, "rank 0")
    meeting = _Meeting(sign_store(store, environ, "aliquot/hosts"), "rank", rank, world_size)
    entries = meeting.exchange({"identity": host_identity(), "cpus": sorted(os.sched_getaffinity(0))}, deadline)
    meeting.leave()
    hosts = [entry["identity"] for entry in entries]
    local = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
    order = list(dict.fromkeys(hosts))
    numbers = (local.index(rank), len(local), order.index(hosts[rank]), len(order))
    environ.update(zip(_LOCAL_VARIABLES, map(str, numbers), strict=True))
    cpus = [cpu for peer in local for cpu in entries[peer]["cpus"]]
    yield len(local) > 1 and len(set(cpus)) == len(cpus)
    del meeting, store


def _has_local_ranks(environ: Mapping[str, str]) -> bool:
    world_size = integer_variable(environ, "WORLD_SIZE", 1) if "RANK" in environ else 1
    return (
        world_size == 1
        or all(name in environ for name in _LOCAL_VARIABLES)
        # If all ranks share one host, the first two variables are enough.
        or (
            all(name in environ for name in _LOCAL_VARIABLES[:2])
            and integer_variable(environ, "LOCAL_WORLD_SIZE", 1) == world_size
        )
    )


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT. Raises UserError."""
    return environ["MASTER_ADDR"], port_variable(environ, "MASTER_PORT", 29500)


def _listen() -> socket.socket:
    """Listen at gloo's address for test connections of other hosts, because gloo does not name an unreachable host."""
    address = address_of(gloo_interface())
    try:
        return listen(address)
    except OSError:
        raise RendezvousError(
            f"other nodes cannot reach {platform.node()} at {address}: set GLOO_SOCKET_IFNAME to the interface that"
            f" leads to them, one of {', '.join(sorted(psutil.net_if_addrs()))}"
        ) from None


class _Meeting:
    """Member `number` of `count` nodes or ranks, which exchange entries in a store."""

    def __init__(self, store: Store, kind: Literal["node", "rank"], number: int, count: int) -> None:
        self.store = self._first_store = store  # `exchange` replaces a signed store by the keys of this start
        self.number = number
        self._nonce = new_secret()
        self._kind, self._count = kind, count

    def exchange(self, entry: _Entry, deadline: Deadline) -> list[_Entry]:
        """Publish this member's entry and return the entries of all members by number. Raises UserError."""
        store, kind, key = self.store, self._kind, str(self.number)
        try:
            if store.add(f"{key}/times", 1) > 1:
                twin = json.loads(store.get(key))["host"] if store.check([key]) else "another machine"
                raise RendezvousError(
                    f"{kind} {key} has joined twice, from {twin} and {platform.node()}: every {kind} needs its own"
                    " number"
                )
            text = json.dumps({"host": platform.node(), "nonce": self._nonce, **entry})
            store.set(key, text)  # the entry of a member with another secret, which never reads the nonce of member 0
            if isinstance(store, SignedStore):
                if self.number > 0:
                    self._wait("0", deadline)
                nonce = self._nonce if self.number == 0 else json.loads(store.get("0"))["nonce"]
                store = self.store = store.with_prefix(nonce)
                store.set(key, text)
            self._wait(_ALL, deadline)
            # Member 0 collects the entries for all members, because every member would otherwise read every entry.
            if self.number == 0:
                entries = [json.loads(store.get(str(member))) for member in range(self._count)]
                store.set(_ALL, json.dumps(entries))
                return entries
            entries = list(json.loads(store.get(_ALL)))
            if isinstance(store, SignedStore) and self._nonce not in [entry["nonce"] for entry in entries]:
                raise self._intruder(f"the answer of {kind} 0 is that of an earlier start")
            return entries
        except DistError:
            raise RendezvousError(
                f"{kind} 0 has ended before all {self._count} {kind}s had come; its own last line says why"
            ) from None

    def leave(self) -> None:
        """End the exchange. Member 0, which may serve the store, first waits a short time for all other members."""
        until = time.monotonic() + _GRACE_S
        self.store.add("left", 1)
        while self.number == 0 and self.store.add("left", 0) < self._count and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _wait(self, key: str, deadline: Deadline) -> None:
        """On member 0, wait for the entries of all members; on another member, wait until member 0 has set `key`.

        After the deadline, every member looks for missing members itself.
        """
        missing = [member for member in range(self._count) if member != self.number]
        pause_s = 0.0
        while self.number == 0 or not self.store.check([key]):
            if self.number == 0 or deadline.has_passed:
                missing = [member for member in missing if not self.store.check([str(member)])]
                if not missing and self.number == 0:
                    return
            if self.store.check(["missing"]):
                raise RendezvousError(self.store.get("missing").decode())
            if deadline.has_passed and missing:
                self._give_up(missing, deadline.limit_s)
            if self.number == 0:
                self._check_nonce()
                error = self._wrong_secret(missing)
                deadline.report(self._members(missing), f"; {error}" if error else "")
            pause_s = min(_POLL_S, pause_s + _FIRST_POLL_S)  # the members usually come within a short time
            time.sleep(pause_s)

    def _check_nonce(self) -> None:
        """Raise RendezvousError if another program has replaced the nonce of this start, which the members look for."""
        store = self._first_store
        if isinstance(store, SignedStore) and self._nonce.encode() not in (store.peek("0") or b""):
            raise self._intruder(f"the entry of {self._kind} 0 is not that of this start")

    def _intruder(self, text: str) -> RendezvousError:
        return RendezvousError(
            f"{text}: another program writes to the rendezvous store. Keep other programs out of the network between"
            f" the {self._kind}s, and start all {self._kind}s again"
        )

    def _give_up(self, missing: Sequence[int], limit_s: float) -> None:
        if error := self._wrong_secret(missing):
            time.sleep(_GRACE_S)
            raise error
        present = [member for member in range(self._count) if member not in missing]
        hosts = ", ".join(f"{member} ({json.loads(self.store.get(str(member)))['host']})" for member in present)
        text = (
            f"{self._members(missing)} did not come within {limit_s:g} s (launch.join_timeout_s);"
            f" {len(present)} of {self._count} {self._kind}s are here: {hosts}"
        )
        self.store.set("missing", text)
        if self.number == 0:
            time.sleep(_GRACE_S)
        raise RendezvousError(text)

    def _wrong_secret(self, members: Sequence[int]) -> NodesDifferError | None:
        """Return an error that names those of `members` whose entries are signed with another secret."""
        store = self._first_store
        forged = [member for member in members if isinstance(store, SignedStore) and store.is_forged(str(member))]
        if not forged:
            return None
        return NodesDifferError(
            f"a message from {self._members(forged)} is not signed with the secret of this run"
            f" ({SECRET_VARIABLE}, or {SECRET_FILE} in the run directory): set run.directory to a directory that all"
            " nodes share"
        )

    def _members(self, numbers: Sequence[int]) -> str:
        shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
        return f"{self._kind}{'' if len(numbers) == 1 else 's'} {shown}"


def _check_paths(meeting: _Meeting, entries: Sequence[_Entry]) -> None:
    """Test the network: connect one rank of every host to every other host.

    Raises UserError on all ranks if a connection fails.
    """
    store, rank = meeting.store, meeting.number
    addresses = {peer: entry["at"] for peer, entry in enumerate(entries) if "at" in entry}
    if rank in addresses:
        failures = (
            (entries[peer]["host"], address, connection_failure(address, port))
            for peer, (address, port) in addresses.items()
            if peer != rank
        )
        lines = [f"{entries[rank]['host']} cannot reach {host} at {at}: {why}" for host, at, why in failures if why]
        store.set(f"paths/{rank}", lines[0] if lines else "")
    if not addresses:
        return
    keys = [f"paths/{peer}" for peer in addresses]
    longest = timedelta(seconds=STORE_TIMEOUT_S + CONNECT_TIMEOUT_S * len(addresses))
    try:
        if rank == 0:
            store.wait(keys, longest)
            store.set(_PATHS, next(filter(None, (store.get(key).decode() for key in keys)), ""))
        store.wait([_PATHS], longest)
        if failure := store.get(_PATHS).decode():
            meeting.leave()
            raise RendezvousError(
                f"{failure}; nodes must reach each other on all ports, by the interface in GLOO_SOCKET_IFNAME if set"
            )
    except DistError:
        raise RendezvousError(
            "rank 0 has ended before all hosts had reached each other; its own last line says why"
        ) from None
