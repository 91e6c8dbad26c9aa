"""A hub that takes uploads on this machine: the requests of huggingface_hub for a commit with large files (LFS)."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Repository:
    """What the server was asked, and the files of the repository after its last commit."""

    address: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)  # headers of the requests
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by sha256
    files: dict[str, bytes] = field(default_factory=dict)
    refused_uploads: int = 0  # so many uploads of large files are answered with status 403


@contextmanager
def hub_repository() -> Iterator[Repository]:
    repository = Repository()

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            repository.tokens.add(self.headers.get("Authorization", ""))
            if self.headers.get("Authorization") != "Bearer hf_right":
                self._answer({"error": "Invalid credentials"}, 401)
            elif self.path == "/api/repos/create":
                repository.created.append(json.loads(body))
                self._answer({"url": f"{repository.address}/owner/name"})
            elif self.path.startswith("/api/validate-yaml"):
                self._answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
                self._answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
            elif self.path.endswith("/info/lfs/objects/batch"):
                self._answer({"transfer": "basic", "objects": [self._upload(o) for o in json.loads(body)["objects"]]})
            else:
                self._commit(body)

        def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
            is_new = wanted["oid"] not in repository.objects
            href = {"upload": {"href": f"{repository.address}/lfs/{wanted['oid']}"}}
            return {**wanted, "actions": href} if is_new else wanted

        def _commit(self, body: bytes) -> None:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    repository.files[value["path"]] = repository.objects[value["oid"]]
            self._answer({"commitUrl": f"{repository.address}/owner/name/commit/1", "commitOid": "1"})

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if repository.refused_uploads > 0:
                repository.refused_uploads -= 1
                self._answer({"error": "no space"}, 403)
                return
            repository.objects[hashlib.sha256(data).hexdigest()] = data
            self._answer({})

        def _answer(self, content: dict[str, Any], status: int = 200) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    repository.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield repository
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
