"""Messages between a node and the leader of an elastic run: one signed JSON object per line, over TCP.

The key is the nonce in the lease, which never crosses a socket. Each end first sends a nonce of its own. A signature
covers both nonces and the number of the message, so that nobody can play back a message of another connection.
"""

from __future__ import annotations

import hmac
import json
import secrets
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
_LONGEST_UNKNOWN = 1 << 16  # limit for a peer that has not signed a message yet
_NONCE_CHARACTERS = 32
_SIGNATURE_BYTES = 64


class Peer:
    """One end of a connection to another node. One thread reads; any thread may write."""

    def __init__(self, connection: socket.socket, key: str) -> None:
        connection.settimeout(_SEND_S)
        self.socket = connection
        self.closed = False
        self._key = key.encode()
        self._nonce, self._peer_nonce = secrets.token_hex(_NONCE_CHARACTERS // 2).encode(), b""
        self._sent = self._received = 0  # messages
        self._partial_line = b""
        self._writing = threading.Lock()
        self.address = _plain(connection.getpeername()[0])
        self.own_address = _plain(connection.getsockname()[0])
        self._write(self._nonce)

    def send(self, what: str, **fields: Any) -> None:
        """Send a message, unless the peer has not sent its nonce yet.

        If the connection is lost, raise no error but set `closed`, which the reader checks.
        """
        text = json.dumps({"what": what, **fields}).encode()
        with self._writing:
            if self._peer_nonce:
                self._write(self._signature(self._peer_nonce, self._nonce, self._sent, text) + text)
                self._sent += 1

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
        if lines and not self._peer_nonce and len(lines[0]) == _NONCE_CHARACTERS:
            self._peer_nonce = lines.pop(0)
        try:
            messages = [self._verified(line) for line in lines]
        except ValueError:  # the message is not from a node of this run
            messages, read = [], b""
        longest = _LONGEST if self._received else _LONGEST_UNKNOWN
        self.closed = self.closed or not read or len(self._partial_line) > longest
        return messages

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

    def _write(self, line: bytes) -> None:
        try:
            self.socket.sendall(line + b"\n")
        except OSError:
            self.closed = True

    def _verified(self, line: bytes) -> Message:
        """Return the message in a line. Raises ValueError if the peer has not signed the line as its next message."""
        signature, text = line[:_SIGNATURE_BYTES], line[_SIGNATURE_BYTES:]
        expected = self._signature(self._nonce, self._peer_nonce, self._received, text)
        if not hmac.compare_digest(signature, expected):
            raise ValueError("unsigned")
        self._received += 1
        return dict(decode_json(text))

    def _signature(self, receiver: bytes, sender: bytes, number: int, text: bytes) -> bytes:
        signed = b"%b %b %d %b" % (receiver, sender, number, text)
        return hmac.digest(self._key, signed, "sha256").hex().encode()


def _plain(address: str) -> str:
    """Return `address`, with an IPv4 address in IPv6 form (`::ffff:10.0.0.1`) converted to plain IPv4."""
    return address.removeprefix("::ffff:")
