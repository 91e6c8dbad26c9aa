"""A hub on this machine: the requests of huggingface_hub for a commit with large files (LFS), and of its file system.

A commit is to a model; the file system reads the dataset `owner/name`. Both have the same files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.models.hub_server import entry
from tests.stores.http_server import Handler, serving


@dataclass
class Repository:
    """What the server was asked, and the files of the repository after its last commit."""

    address: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)  # headers of the requests
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by sha256
    files: dict[str, bytes] = field(default_factory=dict)
    refused_uploads: int = 0  # so many uploads of large files are answered with status 403
    stalled: set[str] = field(default_factory=set)  # of these files the server sends nothing


@contextmanager
def hub_repository() -> Iterator[Repository]:
    repository = Repository()

    class Hub(Handler):
        def do_POST(self) -> None:
            body = self.body()
            repository.tokens.add(self.headers.get("Authorization", ""))
            if self.headers.get("Authorization") != "Bearer hf_right":
                self.answer({"error": "Invalid credentials"}, 401)
            elif self.path == "/api/repos/create":
                repository.created.append(json.loads(body))
                self.answer({"url": f"{repository.address}/owner/name"})
            elif self.path.startswith("/api/validate-yaml"):
                self.answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
                self.answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
            elif self.path.endswith("/info/lfs/objects/batch"):
                self.answer({"transfer": "basic", "objects": [self._upload(o) for o in json.loads(body)["objects"]]})
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
            self.answer({"commitUrl": f"{repository.address}/owner/name/commit/1\x1b[2J", "commitOid": "1"})

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            _, is_tree, folder = path.partition("/api/datasets/owner/name/tree/main")
            _, is_file, name = path.partition("/datasets/owner/name/resolve/main/")
            if is_tree:
                within = f"{folder.strip('/')}/".lstrip("/")
                listed = [entry(name, data) for name, data in repository.files.items() if name.startswith(within)]
                self.answer(*((listed,) if listed else _missing("Entry")))
            elif is_file and name in repository.files:
                while name in repository.stalled:
                    time.sleep(0.05)
                data = repository.files[name]
                start, _, stop = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
                self.answer(data[int(start) : int(stop or len(data)) + 1], 206)
            elif path.startswith("/api/datasets/owner/name"):
                self.answer({"id": "owner/name", "sha": "1" * 40, "private": False, "tags": []})
            else:
                self.answer(*_missing("Repo"))

        def do_PUT(self) -> None:
            data = self.body()
            if repository.refused_uploads > 0:
                repository.refused_uploads -= 1
                self.answer({"error": "no space"}, 403)
                return
            repository.objects[hashlib.sha256(data).hexdigest()] = data
            self.answer({})

    with serving(Hub) as repository.address:
        yield repository


def _missing(what: str) -> tuple[dict[str, str], int, dict[str, str]]:
    return {"error": f"{what} not found"}, 404, {"X-Error-Code": f"{what}NotFound"}
