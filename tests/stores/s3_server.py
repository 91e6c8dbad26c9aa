"""A local S3 server, moto's, on a real socket, that fails when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "models"
STALL = "stall"  # half of the answer is sent, and then nothing
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "2",
}  # fmt: skip

Environ = dict[str, Any]


class S3Server:
    """`fault` is asked before each request: a status such as "500 Oops" to answer, STALL, or None.

    `seen`: all requests.
    """

    def __init__(self) -> None:
        self.fault: Callable[[Environ], str | None] = lambda environ: None
        self.seen: list[str] = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.running = True
        self._ends = threading.Event()

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.seen.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        status = self.fault(environ)
        if status in (None, STALL):
            answer: Iterable[bytes] = self._app(environ, start_response)
            return answer if status is None else self._half(b"".join(answer))
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(status, [("Content-Type", "application/xml")])
        return [b"<Error><Code>InternalError</Code><Message>injected</Message></Error>"]

    def _half(self, body: bytes) -> Iterator[bytes]:
        yield body[: len(body) // 2]
        self._ends.wait()

    def empty(self, client: Any) -> None:
        """moto keeps buckets for the whole process."""
        for upload in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
            client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
        for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
            client.delete_object(Bucket=BUCKET, Key=found["Key"])
        client.delete_bucket(Bucket=BUCKET)

    def stop(self) -> None:
        self.running = False
        self._server.shutdown()
        self.fault = lambda environ: "503 Gone"  # to connections that are open
        self._ends.set()
        self._server.server_close()
        self._thread.join()


@contextmanager
def s3_server(monkeypatch: Any) -> Iterator[S3Server]:
    """With a bucket, and a client's environment for this process."""
    server = S3Server()
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": server.url}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    server.seen.clear()
    try:
        yield server
    finally:
        server.fault = lambda environ: None
        if server.running:
            server.empty(client)
            server.stop()


def is_part(environ: Environ) -> bool:
    return environ["REQUEST_METHOD"] == "PUT" and "partNumber" in environ["QUERY_STRING"]
