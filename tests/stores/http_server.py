"""HTTP servers on this machine for the length of a test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType


class Handler(BaseHTTPRequestHandler):
    """`do_GET` and the like of a subclass answer requests."""

    def body(self) -> bytes:
        """Read what came with the request."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(
        self,
        content: object = b"",
        status: int = 200,
        headers: Mapping[str, str] = MappingProxyType({}),
        slowly: bool = False,
    ) -> None:
        """Send bytes, or anything else as JSON; `slowly`: a byte at a time, until the client has gone."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(data), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):
                for byte in data if slowly else ():
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.05)
            self.wfile.write(b"" if slowly else data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    """Serve in a thread, at the address that is yielded."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
