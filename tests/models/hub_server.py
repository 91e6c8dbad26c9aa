"""A hub that serves one repository on this machine: what huggingface_hub asks of the real one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.stores.http_server import Handler, serving

_COMMIT = "a" * 40


def entry(name: str, data: bytes) -> dict[str, object]:
    """A file in the listing of a repository; git's id of a file follows from its content."""
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def hub_with(files: Mapping[str, bytes], slow: str = "") -> Iterator[tuple[str, list[str]]]:
    """Its address, and the names of the files that were fetched from it. It sends `slow` byte by byte."""
    fetched: list[str] = []

    class Hub(Handler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            name = self._answer()
            if name is not None:
                fetched.append(name)

        def _answer(self) -> str | None:
            path, name = self.path.partition("?")[0], None
            if "/tree/" in path:
                content = json.dumps([entry(file, data) for file, data in files.items()]).encode()
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
            etag = hashlib.sha1(content).hexdigest()
            self.answer(content, headers={"ETag": f'"{etag}"', "X-Repo-Commit": _COMMIT}, slowly=name == slow)
            return name

    with serving(Hub) as address:
        yield address, fetched
