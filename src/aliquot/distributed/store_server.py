"""The store in which nodes and ranks meet: opened by the first one at one address, reached there by the others."""

from __future__ import annotations

import errno
import os
import platform
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from weakref import WeakValueDictionary

import psutil

# Public, but not re-exported for type checkers.
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from aliquot.core.errors import RendezvousError
from aliquot.distributed.gloo_interface import address_here, listening_address

_NAME = re.compile(r"[\w.-]+|[0-9a-fA-F:]+(%\w+)?")  # of a host, IPv6 addresses included
_POLL_S = 0.1
CONNECT_S = 5.0
_SAY_EVERY_S = 30.0
STORE_TIMEOUT_S = 30.0
_SERVERS: WeakValueDictionary[int, TCPStore] = WeakValueDictionary()  # that this process has opened, by port


class Deadline:
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


def check_host_name(address: str) -> None:
    try:
        if not _NAME.fullmatch(address):
            raise UnicodeError
        address.encode("idna")
    except UnicodeError:
        raise RendezvousError(
            f"{address!r} cannot be the name of a host: set launch.master_address (MASTER_ADDR) to node 0's"
        ) from None


def open_store(address: str, port: int, first: bool, deadline: Deadline, who: str) -> TCPStore:
    """The store at `address`, opened here if this is the `first` of all."""
    if first:
        return serve_store(_own_address(address, deadline), port)
    while trouble := connection_trouble(address, port):
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
            found.append(TCPStore(address_here(address), port, None, False, timedelta(seconds=STORE_TIMEOUT_S), False))

    # In a thread, because TCPStore waits without limit for a server that accepts the connection and never answers.
    aside = threading.Thread(target=connect, daemon=True)
    aside.start()
    aside.join(STORE_TIMEOUT_S)
    if not found:
        raise RendezvousError(f"what answers at {address}:{port} is not {who} of this run: is the port another's?")
    return found[0]


def connection_trouble(address: str, port: int) -> str | None:
    """What keeps a connection from `address`:`port`, in words; None: nothing. Raises UserError for what is no name."""
    check_host_name(address)  # unlike one that does not resolve yet, `a..b` never will: nothing to wait for
    try:
        socket.create_connection((address_here(address), port), timeout=CONNECT_S).close()
    except socket.gaierror:
        return f"the name {address} does not resolve"
    except ConnectionRefusedError:
        return "nobody listens there"
    except TimeoutError:
        return "no answer (a firewall, a security group?)"
    except OSError as error:
        return str(error.strerror)
    return None


def _own_address(master: str, deadline: Deadline) -> str:
    """Where the first one listens. A name may take time to resolve. Raises UserError."""
    check_host_name(master)
    while True:
        try:
            return listening_address(master)
        except OSError:
            if deadline.passed:
                raise wrong_master_address(master, f"the name {master} does not resolve") from None
            time.sleep(_POLL_S)


def wrong_master_address(address: str, trouble: str) -> RendezvousError:
    return RendezvousError(
        f"launch.master_address {address} does not lead to {platform.node()}, which is node 0: {trouble}"
    )


def serve_store(address: str, port: int) -> TCPStore:
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
            address, port, None, True, timedelta(seconds=STORE_TIMEOUT_S), False, master_listen_fd=listener.detach()
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
