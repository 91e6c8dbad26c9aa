"""Messages between a node and the leader of its round: a JSON object a line, over TCP."""

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

_SEND_S = 2.0  # a message is far smaller than what a socket takes without anybody reading
_LONGEST = 1 << 20
_LONGEST_FIRST = 1 << 16  # of who has not said yet that it belongs to the run


class Peer:
    """The other end of a connection. One thread reads; any may write."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_S)
        self.socket = connection
        self.closed = False
        self.is_known = False  # has said the nonce
        self._beginning = b""
        self._writing = threading.Lock()
        self.address = _plain(connection.getpeername()[0])
        self.own_address = _plain(connection.getsockname()[0])

    def send(self, what: str, **fields: Any) -> None:
        """To one that has gone it does nothing: the reader finds out."""
        line = json.dumps({"what": what, **fields}).encode() + b"\n"
        with self._writing:
            try:
                self.socket.sendall(line)
            except OSError:
                self.closed = True

    def receive(self, wait_s: float = 0.0) -> list[Message]:
        """What has come by then. `closed` is true afterwards where nothing more will."""
        try:
            with selectors.PollSelector() as selector:
                selector.register(self.socket, selectors.EVENT_READ)
                if not selector.select(wait_s):
                    return []
            read = self.socket.recv(1 << 16)
        except (OSError, ValueError):  # ValueError: closed by ourselves
            read = b""
        *lines, self._beginning = (self._beginning + read).split(b"\n")
        try:
            found = [decode_json(line) for line in lines]
        except ValueError:  # none of ours
            found, read = [], b""
        longest = _LONGEST if self.is_known else _LONGEST_FIRST
        self.closed = self.closed or not read or len(self._beginning) > longest
        return [message for message in found if isinstance(message, dict)]

    def see_off(self, until: float) -> None:
        """Close once the other end has read all and closed: what is closed with something unread takes back what it
        has sent."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        while not self.closed and time.monotonic() < until:
            self.receive(0.1)
        self.close()

    def close(self) -> None:
        self.closed = True
        self.socket.close()


def _plain(address: str) -> str:
    """Of an IPv4 peer of a socket that takes both."""
    return address.removeprefix("::ffff:")
