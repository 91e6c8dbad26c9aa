"""A hub that serves one repository on this machine: what huggingface_hub asks of the real one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_COMMIT = "a" * 40


@contextmanager
def hub_with(files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the names of the files that were fetched from it."""
    fetched: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            name = self._answer()
            if name is not None:
                fetched.append(name)

        def _answer(self) -> str | None:
            path, name = self.path.partition("?")[0], None
            if "/tree/" in path:
                entries = [
                    {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for file, data in files.items()
                ]
                content = json.dumps(entries).encode()
            elif path.startswith("/api/models/"):
                content = json.dumps(
                    {
                        "_id": "1",
                        "id": "owner/name",
                        "sha": _COMMIT,
                        "siblings": [{"rfilename": file} for file in files],
                    }
                ).encode()
            elif (name := path.partition(f"/resolve/{_COMMIT}/")[2]) in files:
                content = files[name]
            else:
                self.send_error(404)
                return None
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", _COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
            return name

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
