"""Read and write files in S3 (s3://) through boto3; several processes send the parts of one multipart upload.

boto3 finds the credentials in the environment, in files, or in the role of a pod or an instance.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from aliquot.core.errors import StorageError, StorageFailureError
from aliquot.stores.store import FileChangedError, FileVersion, Store

_PART_BYTES, _MAX_PARTS = 16 << 20, 10_000
# botocore does not retry if the connection breaks, or nothing comes any more, while a body is read.
_READ_ATTEMPTS, _BROKEN = 3, (ResponseStreamingError, IncompleteReadError, ReadTimeoutError)
_SILENT_S = 12  # seconds without an answer, or without further bytes of a body
_DELETE_BATCH = 1000  # objects that one request deletes
# S3 error codes, with HTTP status below 500, of valid requests that were too fast, too slow, or had expired keys.
_TEMPORARY = {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestTimeout", "ExpiredToken"}


class S3Store(Store):
    verifies_checksums = True  # S3 compares the CRC-32 that is sent with each part

    def __init__(self, url: str) -> None:
        self._url = url
        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        # boto3 gives up on a dead server after about a minute; AWS_MAX_ATTEMPTS sets the number of attempts.
        timeouts = Config(connect_timeout=10, read_timeout=_SILENT_S)
        with self._request():
            self._s3 = boto3.client("s3", config=timeouts)

    def part_bytes(self, size_bytes: int) -> int:
        return _PART_BYTES * max(1, -(-size_bytes // (_PART_BYTES * _MAX_PARTS)))

    def find(self, name: str = "") -> dict[str, FileVersion]:
        prefix = self._prefix + name
        with self._request():
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            objects = [entry for page in pages for entry in page.get("Contents", ())]
        return {
            entry["Key"].removeprefix(self._prefix): FileVersion(entry["Size"], entry["ETag"])
            for entry in objects
            if not name or entry["Key"] == prefix or entry["Key"].startswith(f"{prefix}/")
        }

    def read(self, name: str, start: int, stop: int, version: FileVersion | None = None) -> bytes:
        if start >= stop:
            return b""
        condition = {} if version is None else {"IfMatch": version.version}  # the ETag
        query = {**self._address(name), "Range": f"bytes={start}-{stop - 1}", **condition}
        with self._request(name):
            for _ in range(_READ_ATTEMPTS - 1):
                body = self._body(query)
                with suppress(*_BROKEN):
                    return bytes(body.read())
            return bytes(self._body(query).read())

    def put(self, name: str, data: bytes) -> None:
        with self._request():
            self._s3.put_object(**self._address(name), Body=data, ChecksumCRC32=_crc32(data))

    def begin(self, name: str, size_bytes: int) -> str:
        if size_bytes <= _PART_BYTES:
            return ""  # a single request writes a small object
        with self._request():
            return str(self._s3.create_multipart_upload(**self._address(name), ChecksumAlgorithm="CRC32")["UploadId"])

    def put_part(self, name: str, token: str, index: int, start: int, data: Iterable[bytes]) -> str:
        body = b"".join(data)
        if not token:
            self.put(name, body)
            return ""
        with self._request():
            answer = self._s3.upload_part(
                **self._address(name), UploadId=token, PartNumber=index + 1, Body=body, ChecksumCRC32=_crc32(body)
            )
        return f"{answer['ETag']} {_crc32(body)}"

    def complete(self, name: str, token: str, receipts: Sequence[str]) -> None:
        if not token:
            return
        parts = [
            {"PartNumber": number, "ETag": etag, "ChecksumCRC32": crc32}
            for number, (etag, crc32) in enumerate(map(str.split, receipts), 1)
        ]
        with self._request():
            self._s3.complete_multipart_upload(**self._address(name), UploadId=token, MultipartUpload={"Parts": parts})

    def remove(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), _DELETE_BATCH):
            with self._request():
                keys = [{"Key": self._prefix + name} for name in names[first : first + _DELETE_BATCH]]
                answer = self._s3.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            if errors := answer.get("Errors"):
                raise StorageError(f"cannot remove {errors[0]['Key']}: {errors[0].get('Message')}", self._url)

    def abort(self) -> None:
        with self._request():
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for upload in [entry for page in pages for entry in page.get("Uploads", ())]:
                self._s3.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def _body(self, query: dict[str, str]) -> Any:
        try:
            return self._s3.get_object(**query)["Body"]
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            states = {"NoSuchKey": FileNotFoundError(query["Key"]), "PreconditionFailed": FileChangedError()}
            raise states.get(code) or error from None

    def _address(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    @contextmanager
    def _request(self, name: str = "") -> Iterator[None]:
        """Turn errors of boto3 in the block into a StorageError, which names the URL, or the file `name` below it."""
        url = f"{self._url.rstrip('/')}/{name}" if name else self._url
        try:
            yield
        except ClientError as error:
            details = error.response.get("Error", {})
            failed = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500
            error_type = StorageFailureError if failed or details.get("Code") in _TEMPORARY else StorageError
            raise error_type(f"{error.operation_name}: {details.get('Code')}: {details.get('Message')}", url) from None
        except BotoCoreError as error:  # no answer, no credentials or no region
            error_type = StorageFailureError if isinstance(error, (ConnectionError, HTTPClientError)) else StorageError
            raise error_type(f"cannot be reached: {' '.join(str(error).split())}", url) from None


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
