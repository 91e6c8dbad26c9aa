"""A hub on this machine: the requests of huggingface_hub for a commit with large files (LFS), and of its file system.

A commit is to a model; the file system reads the dataset `owner/name`. Both have the same files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """What the server was asked, and the files of the repository after its last commit."""

    address: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)  # headers of the requests
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by sha256
    files: dict[str, bytes] = field(default_factory=dict)
    refused_uploads: int = 0  # so many uploads of large files are answered with status 403


def _entry(name: str, data: bytes) -> dict[str, object]:
    """A file in the listing of a repository; git's id of a file follows from its content."""
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


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
            self._answer({"commitUrl": f"{repository.address}/owner/name/commit/1\x1b[2J", "commitOid": "1"})

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            _, is_tree, folder = path.partition("/api/datasets/owner/name/tree/main")
            _, is_file, name = path.partition("/datasets/owner/name/resolve/main/")
            if is_tree:
                within = f"{folder.strip('/')}/".lstrip("/")
                listed = [_entry(name, data) for name, data in repository.files.items() if name.startswith(within)]
                self._answer(*((listed,) if listed else ({"error": "Entry not found"}, 404, "Entry")))
            elif is_file and name in repository.files:
                data = repository.files[name]
                start, _, stop = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
                self._send(data[int(start) : int(stop or len(data)) + 1], 206)
            elif path.startswith("/api/datasets/owner/name"):
                self._answer({"id": "owner/name", "sha": "1" * 40, "private": False, "tags": []})
            else:
                self._answer({"error": "Repository not found"}, 404, "Repo")

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if repository.refused_uploads > 0:
                repository.refused_uploads -= 1
                self._answer({"error": "no space"}, 403)
                return
            repository.objects[hashlib.sha256(data).hexdigest()] = data
            self._answer({})

        def _answer(self, content: object, status: int = 200, missing: str = "") -> None:
            self._send(json.dumps(content).encode(), status, {"X-Error-Code": f"{missing}NotFound"} if missing else {})

        def _send(self, data: bytes, status: int, headers: Mapping[str, str] = MappingProxyType({})) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": len(data), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data)

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
