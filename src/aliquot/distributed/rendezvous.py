"""How nodes and ranks find each other, and who is named when one does not come.

Everybody writes down in a store of the first one that it has come, and waits until all have. Whoever waits in vain for
`launch.join_timeout_s` says in one line who is missing; so do all others that have come. The store listens on one
address, and what nobody of this run has signed is not read (signed_store.py).
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

# Public, but not re-exported for type checkers.
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import LaunchError, NodesDifferError, RendezvousError
from aliquot.distributed.collectives.peers import host_identity
from aliquot.distributed.gloo_interface import address_of, gloo_interface
from aliquot.distributed.run_secret import SECRET, SECRET_FILE, new_secret
from aliquot.distributed.signed_store import SignedStore, signed
from aliquot.distributed.store_server import (
    CONNECT_S,
    STORE_TIMEOUT_S,
    Deadline,
    check_host_name,
    connection_trouble,
    open_store,
    serve_store,
    wrong_master_address,
)
from aliquot.distributed.topology import Topology, check_port, number

_POLL_S = 0.1
_PLACE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_GRACE_S = 2.0  # the first one stays so long, so that the others can read what it has found


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


def single_node() -> NodeGroup:
    """As the launcher of the only node: a store on loopback, with a secret that this launcher alone knows."""
    server, secret, run_id = serve_store("127.0.0.1", 0), new_secret(), new_secret()
    return NodeGroup(SignedStore(server, secret, run_id), "127.0.0.1", server.port, 0, 1, run_id, secret)


def meet_nodes(launch: LaunchSection, automatic: bool, secret: str) -> tuple[NodeGroup, int]:
    """As the launcher of one of several nodes: wait for those of the others.

    Returns the group, to be kept for as long as the ranks run, and the local ranks: where `automatic` the smallest
    number that any node has chosen for itself. Raises UserError, which names who is missing.
    """
    where = f"{launch.master_address}:{launch.master_port}"
    print(f"aliquot: node {launch.node_rank} of {launch.most_nodes} meets the others at {where}", file=sys.stderr)
    deadline = Deadline(launch.join_timeout_s)
    store = open_store(launch.master_address, launch.master_port, launch.node_rank == 0, deadline, "node 0")
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
    store = open_store(
        launch.master_address, launch.master_port, launch.node_rank == 0, Deadline(timeout_s), "node 0 of the round"
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
    if trouble := connection_trouble(launch.master_address, launch.master_port):
        raise wrong_master_address(launch.master_address, trouble)


def meet_ranks(topology: Topology, environ: Mapping[str, str], timeout_s: float) -> Store:
    """As a rank, by torchrun's variables: wait for the others; the store for process groups.

    Raises UserError, which names who is missing, or which two hosts cannot reach each other.
    """
    rank, world_size = topology.rank, topology.world_size
    address, port = _master(environ)
    deadline = Deadline(timeout_s)
    # Under an elastic launcher the store is the launcher's; else rank 0 opens it.
    opens = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = open_store(address, port, opens, deadline, "rank 0")
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
    deadline = Deadline(timeout_s)
    store = open_store(address, port, rank == 0, deadline, "rank 0")
    own = signed(store, environ, "aliquot/hosts")
    facts = {"identity": host_identity(), "cpus": sorted(os.sched_getaffinity(0))}
    told = _arrive(own, "rank", rank, world_size, facts, deadline)
    _leave(own, rank, world_size)
    return store, told


@contextmanager
def infer_local_ranks(environ: MutableMapping[str, str], timeout_s: float) -> Iterator[bool]:
    """Complete `environ` as torchrun would have. Ranks must join within the block, which keeps the store open.

    Yields whether each rank of this host has been bound to cores of its own, as srun does. Collective where `environ`
    names one rank of many and not its place on its host, or not which of the hosts that is. Raises UserError.
    """
    if _is_told(environ):
        yield False
        return
    rank = number(environ, "RANK", 0)
    store, told = meet_hosts(rank, number(environ, "WORLD_SIZE", 1), environ, timeout_s)
    hosts = [each["identity"] for each in told]
    local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    order = list(dict.fromkeys(hosts))
    environ["LOCAL_RANK"] = str(local.index(rank))
    environ["LOCAL_WORLD_SIZE"] = str(len(local))
    environ["GROUP_RANK"] = str(order.index(hosts[rank]))
    environ["GROUP_WORLD_SIZE"] = str(len(order))
    bound = [cpu for other in local for cpu in told[other]["cpus"]]
    yield len(local) > 1 and len(set(bound)) == len(bound)
    del store


def _is_told(environ: Mapping[str, str]) -> bool:
    world_size = number(environ, "WORLD_SIZE", 1) if "RANK" in environ else 1
    if world_size == 1 or all(name in environ for name in _PLACE):
        return True
    # Of one host there is no more to be told.
    return all(name in environ for name in _PLACE[:2]) and number(environ, "LOCAL_WORLD_SIZE", 1) == world_size


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Raises UserError for what no host and no port is called, on rank 0 as well, which would wait for the others."""
    address, port = environ["MASTER_ADDR"], number(environ, "MASTER_PORT", 29500)
    check_host_name(address)
    check_port("MASTER_PORT", port)
    return address, port


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
            (told[other]["host"], address, connection_trouble(address, port))
            for other, (address, port) in places.items()
            if other != rank
        )
        found = [f"{told[rank]['host']} cannot reach {host} at {at}: {why}" for host, at, why in troubles if why]
        store.set(f"paths/{rank}", found[0] if found else "")
    keys = [f"paths/{other}" for other in places]
    until = time.monotonic() + STORE_TIMEOUT_S + CONNECT_S * len(places)
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


def _arrive(
    store: Store,
    kind: Literal["node", "rank"],
    own: int,
    count: int,
    facts: dict[str, Any],
    deadline: Deadline,
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


def _wait(store: Store, kind: str, own: int, count: int, deadline: Deadline) -> None:
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
