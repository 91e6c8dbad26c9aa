"""Messages between a node and the leader of an elastic run: one JSON object per line, over TCP."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from aliquot.core.decode import decode_json

Message = dict[str, Any]

_SEND_S = 2.0  # timeout of a send, which rarely waits: a message is far smaller than the buffer of a socket
_LONGEST = 1 << 20
_LONGEST_UNKNOWN = 1 << 16  # limit for a peer that has not sent the nonce


class Peer:
    """One end of a connection to another node. One thread reads; any thread may write."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_S)
        self.socket = connection
        self.closed = False
        self.is_known = False  # whether the peer has sent the nonce of the run
        self._partial_line = b""
        self._writing = threading.Lock()
        self.address = _plain(connection.getpeername()[0])
        self.own_address = _plain(connection.getsockname()[0])

    def send(self, what: str, **fields: Any) -> None:
        """Send a message. If the connection is lost, raise no error but set `closed`, which the reader checks."""
        line = json.dumps({"what": what, **fields}).encode() + b"\n"
        with self._writing:
            try:
                self.socket.sendall(line)
            except OSError:
                self.closed = True

    def receive(self, wait_s: float = 0.0) -> list[Message]:
        """Return messages that arrive within `wait_s`. Sets `closed` if no more messages can arrive."""
        try:
            with selectors.PollSelector() as selector:
                selector.register(self.socket, selectors.EVENT_READ)
                if not selector.select(wait_s):
                    return []
            read = self.socket.recv(1 << 16)
        except (OSError, ValueError):  # ValueError: this process has closed the socket
            read = b""
        *lines, self._partial_line = (self._partial_line + read).split(b"\n")
        try:
            messages = [decode_json(line) for line in lines]
        except ValueError:  # the message is not from a node of this run
            messages, read = [], b""
        longest = _LONGEST if self.is_known else _LONGEST_UNKNOWN
        self.closed = self.closed or not read or len(self._partial_line) > longest
        return [message for message in messages if isinstance(message, dict)]

    def see_off(self, deadline: float) -> None:
        """Read until the peer has closed its end, at most until `deadline`, then close the connection.

        Closing a socket with unread input at once would discard messages that the peer has not received yet.
        """
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        while not self.closed and time.monotonic() < deadline:
            self.receive(0.1)
        self.close()

    def close(self) -> None:
        self.closed = True
        self.socket.close()


def _plain(address: str) -> str:
    """Return `address`, with an IPv4 address in IPv6 form (`::ffff:10.0.0.1`) converted to plain IPv4."""
    return address.removeprefix("::ffff:")
