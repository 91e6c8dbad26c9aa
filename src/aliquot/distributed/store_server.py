"""Serve the TCP store for the rendezvous of nodes and ranks, or connect to it; it listens on one address only."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from weakref import WeakValueDictionary

import psutil

# Public, but not re-exported for type checkers.
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from aliquot.core.errors import LaunchError, RendezvousError
from aliquot.distributed.gloo_interface import address_here, listen, listening_address
from aliquot.distributed.rank_errors import bounded_value

CONNECT_TIMEOUT_S = 5.0
UNSERVED = "nobody listens there"
STORE_TIMEOUT_S = 30.0
_HOST_NAME = re.compile(r"[\w.-]+|[0-9a-fA-F:]+(%\w+)?")  # including IPv6 addresses
_FEWEST_FILES = 64
_POLL_S = 0.1
_REPORT_INTERVAL_S = 30.0
_SERVERS: WeakValueDictionary[int, TCPStore] = WeakValueDictionary()  # servers of this process by port


class Deadline:
    """A time limit that starts at construction, and progress lines on the console while a caller waits."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start = self._last_report = time.monotonic()

    @property
    def has_passed(self) -> bool:
        return time.monotonic() - self._start > self.limit_s

    def report(self, missing: str, reason: str = "") -> None:
        """Print from time to time which node or rank is missing."""
        now = time.monotonic()
        if now > self._last_report + _REPORT_INTERVAL_S:
            self._last_report = now
            print(
                f"aliquot: waiting for {missing} since {now - self._start:.0f} s{reason}", file=sys.stderr, flush=True
            )


def open_store(address: str, port: int, is_server: bool, deadline: Deadline, server_name: str) -> TCPStore:
    """Serve the store at `address`, or connect to it once `server_name` ("node 0") serves it.

    Raises RendezvousError if that fails, if `address` is not a valid host name, or if no store of this run answers
    before the deadline.
    """
    _check_host_name(address)  # first on every rank, because other ranks would wait for rank 0
    if is_server:
        return serve_store(_server_address(address, deadline), port)
    while failure := connection_failure(address, port):
        if deadline.has_passed:
            raise RendezvousError(
                f"{server_name} was not found at {address}:{port} within {deadline.limit_s:g} s"
                f" (launch.join_timeout_s): {failure}; is it started, and are address and port the same everywhere?"
            )
        if os.environ.get("LOCAL_RANK", "0") == "0":
            deadline.report(f"{server_name} at {address}:{port}", f": {failure}")
        time.sleep(_POLL_S)

    def connect() -> TCPStore | None:
        with suppress(DistError):
            return TCPStore(address_here(address), port, None, False, timedelta(seconds=STORE_TIMEOUT_S), False)
        return None

    # TCPStore waits without limit if a server accepts the connection and never answers.
    if (store := bounded_value(connect, None, STORE_TIMEOUT_S)) is None:
        raise RendezvousError(
            f"the program at {address}:{port} is not {server_name} of this run: does another program use the port?"
        )
    return store


def serve_store(address: str, port: int) -> TCPStore:
    """Open a store that listens on `address` only, or return the store that this process already serves at `port`.

    Port 0 takes a free port. Raises RendezvousError.
    """
    if (server := _SERVERS.get(port)) is not None:
        return server
    allow_open_files()
    listener = open_port(address, port)
    port = listener.getsockname()[1]
    server = TCPStore(
        address, port, None, True, timedelta(seconds=STORE_TIMEOUT_S), False, master_listen_fd=listener.detach()
    )
    _SERVERS[port] = server
    return server


def open_port(address: str, port: int = 0) -> socket.socket:
    """Listen on `address` only, at a port that this process can reach; port 0 takes a free one.

    Raises RendezvousError.
    """
    try:
        listener = listen(address, port)
    except OSError as error:
        name, reason = f"port {port} cannot" if port else "no port can", error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            owner = _port_owner(port)
            reason = f"the port is taken{owner}; choose another launch.master_port (MASTER_PORT) on all nodes"
        raise RendezvousError(f"{name} be opened at {address}: {reason}") from None
    check_connection(address, listener.getsockname()[1])
    return listener


def allow_open_files() -> None:
    """Let this process open as many files as the system allows: a connection to every rank needs a descriptor.

    Raises LaunchError if the system allows too few for two ranks, because torch would only log a lost connection.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _FEWEST_FILES:
        raise LaunchError(
            f"this process may open {hard} files: connections between ranks need at least {_FEWEST_FILES}. Raise the"
            " limit (ulimit -n 1024)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_failure(address: str, port: int) -> str | None:
    """Return why no connection to `address`:`port` is possible, or None if a connection is possible."""
    try:
        socket.create_connection((address_here(address), port), timeout=CONNECT_TIMEOUT_S).close()
    except socket.gaierror:
        return f"the name {address} does not resolve"
    except ConnectionRefusedError:
        return UNSERVED
    except TimeoutError:
        return "no answer (a firewall, a security group?)"
    except OSError as error:
        return str(error.strerror)
    return None


def check_connection(address: str, port: int) -> None:
    """Raise RendezvousError if this process cannot connect to its own `port`, at which it listens."""
    if failure := connection_failure(address, port):
        raise RendezvousError(
            f"this machine listens at {address}:{port}, but cannot connect to that port: {failure}. Is the"
            " interface up (for loopback: ip link set lo up)?"
        )


def _check_host_name(address: str) -> None:
    """Raise RendezvousError unless `address` is a valid host name or address."""
    try:
        if not _HOST_NAME.fullmatch(address):
            raise UnicodeError
        address.encode("idna")
    except UnicodeError:
        raise RendezvousError(
            f"{address!r} cannot be the name of a host: set launch.master_address (MASTER_ADDR) to node 0's"
        ) from None


def wrong_master_address(address: str, reason: str) -> RendezvousError:
    return RendezvousError(
        f"launch.master_address {address} does not lead to {platform.node()}, which is node 0: {reason}"
    )


def _server_address(master: str, deadline: Deadline) -> str:
    """Return the address that the server listens on; wait until the name `master` resolves."""
    while True:
        try:
            return listening_address(master)
        except OSError:
            if deadline.has_passed:
                raise wrong_master_address(master, f"the name {master} does not resolve") from None
            time.sleep(_POLL_S)


def _port_owner(port: int) -> str:
    """Name the process that listens at `port`, if this user may see it."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid is not None:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""
