"""How nodes and ranks find each other, and who is named when one does not come.

Everybody writes down in a store of the first one that it has come, and waits until all have. Whoever waits in vain for
`launch.join_timeout_s` says in one line who is missing; so do all others that have come. The store listens on one
address, and what nobody of this run has signed is not read (signed_store.py).
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakValueDictionary

import psutil

# Public, but not re-exported for type checkers.
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import LaunchError, NodesDifferError, RendezvousError
from aliquot.distributed.collectives.peers import host_identity
from aliquot.distributed.gloo_interface import address_here, address_of, gloo_interface, listening_address
from aliquot.distributed.run_secret import SECRET, SECRET_FILE, new_secret
from aliquot.distributed.signed_store import SignedStore, signed
from aliquot.distributed.topology import Topology, check_port, number

_NAME = re.compile(r"[\w.-]+|[0-9a-fA-F:]+(%\w+)?")  # of a host, IPv6 addresses included
_POLL_S = 0.1
_CONNECT_S = 5.0
_SAY_EVERY_S = 30.0
_STORE_TIMEOUT_S = 30.0
_GRACE_S = 2.0  # the first one stays so long, so that the others can read what it has found
_SERVERS: WeakValueDictionary[int, TCPStore] = WeakValueDictionary()  # that this process has opened, by port


@dataclass(frozen=True)
class NodeGroup:
    """The nodes whose launchers have met, and what their ranks need to meet, too."""

    store: SignedStore  # of the launchers; on node 0 its server, in which the ranks meet as well
    address: str
    port: int
    node: int
    nodes: int
    run_id: str
    secret: str = field(repr=False)


class _Deadline:
    """`limit_s` from when it is made."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._begun = self._said = time.monotonic()

    @property
    def passed(self) -> bool:
        return time.monotonic() - self._begun > self.limit_s

    def say(self, waiting_for: str, trouble: str = "") -> None:
        """Tell the person once in a while what is waited for."""
        now = time.monotonic()
        if now > self._said + _SAY_EVERY_S:
            self._said = now
            text = f"aliquot: waiting for {waiting_for} since {now - self._begun:.0f} s{trouble}"
            print(text, file=sys.stderr, flush=True)


def single_node() -> NodeGroup:
    """As the launcher of the only node: a store on loopback, with a secret that this launcher alone knows."""
    server, secret, run_id = _serve("127.0.0.1", 0), new_secret(), new_secret()
    return NodeGroup(SignedStore(server, secret, run_id), "127.0.0.1", server.port, 0, 1, run_id, secret)


def meet_nodes(launch: LaunchSection, automatic: bool, secret: str) -> tuple[NodeGroup, int]:
    """As the launcher of one of several nodes: wait for those of the others.

    Returns the group, to be kept for as long as the ranks run, and the local ranks: where `automatic` the smallest
    number that any node has chosen for itself. Raises UserError, which names who is missing.
    """
    where = f"{launch.master_address}:{launch.master_port}"
    print(f"aliquot: node {launch.node_rank} of {launch.most_nodes} meets the others at {where}", file=sys.stderr)
    deadline = _Deadline(launch.join_timeout_s)
    store = _open(launch.master_address, launch.master_port, launch.node_rank == 0, deadline, "node 0")
    if launch.node_rank == 0:
        _check_own_address(launch)
    own = SignedStore(store, secret, "", "aliquot/nodes/")
    facts = {"ranks": launch.ranks, "run": new_secret()}
    told = _arrive(own, "node", launch.node_rank, launch.most_nodes, facts, deadline)
    _leave(own, launch.node_rank, launch.most_nodes)
    group = _node_group(store, launch, launch.most_nodes, told[0]["run"], secret)
    return group, min(entry["ranks"] for entry in told) if automatic else int(launch.ranks)


def meet_round(launch: LaunchSection, nodes: int, run_id: str, secret: str, timeout_s: float) -> NodeGroup:
    """As the launcher of one of the nodes of a round, which the leader has named to each other. Raises UserError."""
    if nodes == 1:
        return single_node()
    store = _open(
        launch.master_address, launch.master_port, launch.node_rank == 0, _Deadline(timeout_s), "node 0 of the round"
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    return _node_group(store, launch, nodes, run_id, secret)


def _node_group(store: TCPStore, launch: LaunchSection, nodes: int, run_id: str, secret: str) -> NodeGroup:
    # On node 0 its ranks use the address that it listens on, which they reach whatever a name leads to.
    address = store.host if launch.node_rank == 0 else launch.master_address
    own = SignedStore(store, secret, run_id)
    return NodeGroup(own, address, launch.master_port, launch.node_rank, nodes, run_id, secret)


def _check_own_address(launch: LaunchSection) -> None:
    """Check that node 0 reaches its own store by the name that the others use."""
    if trouble := _reach(launch.master_address, launch.master_port):
        raise _not_node_0(launch.master_address, trouble)


def _not_node_0(address: str, trouble: str) -> RendezvousError:
    return RendezvousError(
        f"launch.master_address {address} does not lead to {platform.node()}, which is node 0: {trouble}"
    )


def meet_ranks(topology: Topology, environ: Mapping[str, str], timeout_s: float) -> Store:
    """As a rank, by torchrun's variables: wait for the others; the store for process groups.

    Raises UserError, which names who is missing, or which two hosts cannot reach each other.
    """
    rank, world_size = topology.rank, topology.world_size
    address, port = _master(environ)
    deadline = _Deadline(timeout_s)
    # Under an elastic launcher the store is the launcher's; else rank 0 opens it.
    opens = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _open(address, port, opens, deadline, "rank 0")
    own = signed(store, environ, f"aliquot/ranks/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
    listener = _listen() if topology.nodes > 1 and topology.local_rank == 0 else None
    with listener or nullcontext():
        facts: dict[str, Any] = {} if listener is None else {"at": listener.getsockname()[:2]}
        told = _arrive(own, "rank", rank, world_size, facts, deadline)
        _check_paths(own, rank, told)
    _leave(own, rank, world_size)
    return own


def meet_hosts(
    rank: int, world_size: int, environ: Mapping[str, str], timeout_s: float
) -> tuple[Store, list[dict[str, Any]]]:
    """As a rank that was not told all of its host: the store, to be kept until `meet_ranks`, and each rank's host and
    the CPUs that it may use.

    Raises UserError, which names who is missing.
    """
    address, port = _master(environ)
    if rank >= world_size:
        raise LaunchError(f"the environment says rank {rank} of {world_size}: not possible")
    deadline = _Deadline(timeout_s)
    store = _open(address, port, rank == 0, deadline, "rank 0")
    own = signed(store, environ, "aliquot/hosts")
    facts = {"identity": host_identity(), "cpus": sorted(os.sched_getaffinity(0))}
    told = _arrive(own, "rank", rank, world_size, facts, deadline)
    _leave(own, rank, world_size)
    return store, told


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Raises UserError for what no host and no port is called, on rank 0 as well, which would wait for the others."""
    address, port = environ["MASTER_ADDR"], number(environ, "MASTER_PORT", 29500)
    _check_name(address)
    check_port("MASTER_PORT", port)
    return address, port


def _check_name(address: str) -> None:
    try:
        if not _NAME.fullmatch(address):
            raise UnicodeError
        address.encode("idna")
    except UnicodeError:
        raise RendezvousError(
            f"{address!r} cannot be the name of a host: set launch.master_address (MASTER_ADDR) to node 0's"
        ) from None


def _listen() -> socket.socket:
    """A socket at gloo's address, for other hosts to try first: gloo would not say which of them cannot reach it."""
    address = address_of(gloo_interface())
    try:
        return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError:
        raise RendezvousError(
            f"other nodes cannot reach {platform.node()} at {address}: set GLOO_SOCKET_IFNAME to the interface that"
            f" leads to them, one of {', '.join(sorted(psutil.net_if_addrs()))}"
        ) from None


def _check_paths(store: Store, rank: int, told: Sequence[Mapping[str, Any]]) -> None:
    """One rank of each host connects to each other host. Raises UserError on every rank if one cannot."""
    places = {other: entry["at"] for other, entry in enumerate(told) if "at" in entry}
    if rank in places:
        troubles = (
            (told[other]["host"], address, _reach(address, port))
            for other, (address, port) in places.items()
            if other != rank
        )
        found = [f"{told[rank]['host']} cannot reach {host} at {at}: {why}" for host, at, why in troubles if why]
        store.set(f"paths/{rank}", found[0] if found else "")
    keys = [f"paths/{other}" for other in places]
    until = time.monotonic() + _STORE_TIMEOUT_S + _CONNECT_S * len(places)
    try:
        while keys and not store.check(keys) and time.monotonic() < until:
            time.sleep(_POLL_S)
        texts = [store.get(key).decode() for key in keys]
        if trouble := next(filter(None, texts), None):
            _leave(store, rank, len(told))
            raise RendezvousError(
                f"{trouble}; nodes must reach each other on all ports, by the interface in GLOO_SOCKET_IFNAME if set"
            )
    except DistError:
        raise RendezvousError("rank 0 has ended before all hosts had reached each other") from None


def _open(address: str, port: int, first: bool, deadline: _Deadline, who: str) -> TCPStore:
    """The store at `address`, opened here if this is the `first` of all."""
    if first:
        return _serve(_own_address(address, deadline), port)
    while trouble := _reach(address, port):
        if deadline.passed:
            raise RendezvousError(
                f"{who} was not found at {address}:{port} within {deadline.limit_s:g} s (launch.join_timeout_s):"
                f" {trouble}; is it started, and are address and port the same everywhere?"
            )
        if os.environ.get("LOCAL_RANK", "0") == "0":
            deadline.say(f"{who} at {address}:{port}", f": {trouble}")
        time.sleep(_POLL_S)
    found: list[TCPStore] = []

    def connect() -> None:
        with suppress(DistError):
            found.append(TCPStore(address_here(address), port, None, False, timedelta(seconds=_STORE_TIMEOUT_S), False))

    # In a thread, because TCPStore waits without limit for a server that accepts the connection and never answers.
    aside = threading.Thread(target=connect, daemon=True)
    aside.start()
    aside.join(_STORE_TIMEOUT_S)
    if not found:
        raise RendezvousError(f"what answers at {address}:{port} is not {who} of this run: is the port another's?")
    return found[0]


def _reach(address: str, port: int) -> str | None:
    """What keeps a connection from `address`:`port`, in words; None: nothing. Raises UserError for what is no name."""
    _check_name(address)  # unlike one that does not resolve yet, `a..b` never will: nothing to wait for
    try:
        socket.create_connection((address_here(address), port), timeout=_CONNECT_S).close()
    except socket.gaierror:
        return f"the name {address} does not resolve"
    except ConnectionRefusedError:
        return "nobody listens there"
    except TimeoutError:
        return "no answer (a firewall, a security group?)"
    except OSError as error:
        return str(error.strerror)
    return None


def _own_address(master: str, deadline: _Deadline) -> str:
    """Where the first one listens. A name may take time to resolve. Raises UserError."""
    _check_name(master)
    while True:
        try:
            return listening_address(master)
        except OSError:
            if deadline.passed:
                raise _not_node_0(master, f"the name {master} does not resolve") from None
            time.sleep(_POLL_S)


def _serve(address: str, port: int) -> TCPStore:
    """Open a store that listens on `address` alone, or return the one that this process has opened at that port.

    Port 0 takes a free one. Raises RendezvousError.
    """
    if (server := _SERVERS.get(port)) is not None:
        return server
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family)
        port = listener.getsockname()[1]
        server = TCPStore(
            address, port, None, True, timedelta(seconds=_STORE_TIMEOUT_S), False, master_listen_fd=listener.detach()
        )
    except (OSError, DistError) as error:
        raise RendezvousError(f"port {port} cannot be opened at {address}: {_port_trouble(port, error)}") from None
    _SERVERS[port] = server
    return server


def _port_trouble(port: int, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"it is taken{_holder(port)}; choose another launch.master_port (MASTER_PORT) on all nodes"
    return (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]


def _holder(port: int) -> str:
    """Which process listens at `port`, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid is not None:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:
        pass
    return ""


def _arrive(
    store: Store,
    kind: Literal["node", "rank"],
    own: int,
    count: int,
    facts: dict[str, Any],
    deadline: _Deadline,
) -> list[dict[str, Any]]:
    """Say that this one has come, wait for all; what each has said of itself, by number."""
    entry = json.dumps({"host": platform.node(), **facts})
    try:
        if store.add(f"{own}/times", 1) > 1:
            other = json.loads(store.get(str(own)))["host"] if store.check([str(own)]) else "another machine"
            raise RendezvousError(f"{kind} {own} has come twice, from {other} and {platform.node()}: give each its own")
        store.set(str(own), entry)
        _wait(store, kind, own, count, deadline)
        return [json.loads(store.get(str(other))) for other in range(count)]
    except DistError:
        raise RendezvousError(
            f"{kind} 0 has ended before all {count} {kind}s had come; its own last line says why"
        ) from None


def _leave(store: Store, own: int, count: int) -> None:
    """The first one, which may hold the store, waits a moment for the others to be done with it."""
    until = time.monotonic() + _GRACE_S
    store.add("left", 1)
    while own == 0 and store.add("left", 0) < count and time.monotonic() < until:
        time.sleep(_POLL_S)


def _wait(store: Store, kind: str, own: int, count: int, deadline: _Deadline) -> None:
    missing = [other for other in range(count) if other != own]
    while missing := [other for other in missing if not store.check([str(other)])]:
        if store.check(["missing"]):
            raise RendezvousError(store.get("missing").decode())
        if deadline.passed:
            here = [other for other in range(count) if other not in missing]
            hosts = {other: json.loads(store.get(str(other)))["host"] for other in here}
            if forged := _signed_otherwise(store, missing):
                time.sleep(_GRACE_S)
                raise _other_secret(kind, forged)
            text = _in_vain(kind, missing, hosts, deadline.limit_s)
            store.set("missing", text)
            if own == 0:
                time.sleep(_GRACE_S)
            raise RendezvousError(text)
        if own == 0:
            forged = _signed_otherwise(store, missing)
            deadline.say(_numbers(kind, missing), f"; {_other_secret(kind, forged)}" if forged else "")
        time.sleep(_POLL_S)


def _signed_otherwise(store: Store, numbers: Sequence[int]) -> list[int]:
    """Those in whose name something has come that this run's secret did not sign."""
    return [other for other in numbers if isinstance(store, SignedStore) and store.is_forged(str(other))]


def _other_secret(kind: str, numbers: Sequence[int]) -> NodesDifferError:
    return NodesDifferError(
        f"what has come from {_numbers(kind, numbers)} is not signed with the secret of this run ({SECRET}, or"
        f" {SECRET_FILE} in the run directory): set run.directory to a directory that all nodes share"
    )


def _in_vain(kind: str, missing: Sequence[int], hosts: Mapping[int, str], limit_s: float) -> str:
    come = ", ".join(f"{number} ({host})" for number, host in hosts.items())
    return (
        f"{_numbers(kind, missing)} did not come within {limit_s:g} s (launch.join_timeout_s);"
        f" {len(hosts)} of {len(hosts) + len(missing)} {kind}s are here: {come}"
    )


def _numbers(kind: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"{kind}{'' if len(numbers) == 1 else 's'} {shown}"
