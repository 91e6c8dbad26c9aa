"""s3://: through boto3, whose multipart uploads take the parts of one object from several processes.

Who may do what is found by boto3's own chain: environment, files, the role of a pod or an instance.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

from aliquot.core.errors import DamagedCheckpoint, StorageError, StorageFailureError

_PART_BYTES, _MOST_PARTS = 16 << 20, 10_000
_ATTEMPTS = 3  # at a body that breaks off, which botocore does not read again by itself
_AT_ONCE = 1000  # objects that one request deletes
# Answers below 500 to a good request that came too fast, too slowly, or with keys that have run out meanwhile.
_LATER = {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestTimeout", "ExpiredToken"}


class S3Store:
    compares: ClassVar[bool] = True  # by the CRC-32 that goes with each part

    def __init__(self, url: str) -> None:
        self._url = url
        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        # A server that is gone is given up in about a minute; how often it is asked, AWS_MAX_ATTEMPTS says.
        waits = Config(connect_timeout=10, read_timeout=60)
        with self._asking():
            self._s3 = boto3.client("s3", config=waits)

    def part_bytes(self, size_bytes: int) -> int:
        return _PART_BYTES * max(1, -(-size_bytes // (_PART_BYTES * _MOST_PARTS)))

    def list(self) -> dict[str, int]:
        with self._asking():
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            found = [each for page in pages for each in page.get("Contents", ())]
        return {each["Key"].removeprefix(self._prefix): each["Size"] for each in found}

    def read(self, name: str, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        for _ in range(_ATTEMPTS - 1):
            with suppress(BotoCoreError):
                return self._read(name, start, stop)
        with self._asking():
            return self._read(name, start, stop)

    def put(self, name: str, data: bytes) -> None:
        with self._asking():
            self._s3.put_object(**self._at(name), Body=data, ChecksumCRC32=_crc32(data))

    def begin(self, name: str, size_bytes: int) -> str:
        if size_bytes <= _PART_BYTES:
            return ""  # one request does it
        with self._asking():
            return str(self._s3.create_multipart_upload(**self._at(name), ChecksumAlgorithm="CRC32")["UploadId"])

    def put_part(self, name: str, token: str, index: int, start: int, data: Iterable[bytes]) -> str:
        body = b"".join(data)
        if not token:
            self.put(name, body)
            return ""
        with self._asking():
            told = self._s3.upload_part(
                **self._at(name), UploadId=token, PartNumber=index + 1, Body=body, ChecksumCRC32=_crc32(body)
            )
        return f"{told['ETag']} {_crc32(body)}"

    def complete(self, name: str, token: str, receipts: Sequence[str]) -> None:
        if not token:
            return
        parts = []
        for index, receipt in enumerate(receipts):
            etag, crc32 = receipt.split()
            parts.append({"PartNumber": index + 1, "ETag": etag, "ChecksumCRC32": crc32})
        with self._asking():
            self._s3.complete_multipart_upload(**self._at(name), UploadId=token, MultipartUpload={"Parts": parts})

    def remove(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), _AT_ONCE):
            with self._asking():
                keys = [{"Key": self._prefix + name} for name in names[first : first + _AT_ONCE]]
                told = self._s3.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            if errors := told.get("Errors"):
                raise StorageError(f"cannot remove {errors[0]['Key']}: {errors[0].get('Message')}", self._url)

    def abort(self) -> None:
        with self._asking():
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for upload in [each for page in pages for each in page.get("Uploads", ())]:
                self._s3.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def _read(self, name: str, start: int, stop: int) -> bytes:
        try:
            return bytes(self._s3.get_object(**self._at(name), Range=f"bytes={start}-{stop - 1}")["Body"].read())
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") == "NoSuchKey":
                raise DamagedCheckpoint(f"{name} is not there", self._url) from None
            raise self._refused(error) from None

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise self._refused(error) from None
        except BotoCoreError as error:  # no answer, or no keys, no region: nothing to ask with
            kind = StorageFailureError if isinstance(error, (ConnectionError, HTTPClientError)) else StorageError
            raise kind(f"cannot be reached: {' '.join(str(error).split())}", self._url) from None

    def _refused(self, error: ClientError) -> StorageError:
        told = error.response.get("Error", {})
        failed = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500
        kind = StorageFailureError if failed or told.get("Code") in _LATER else StorageError
        return kind(f"{error.operation_name}: {told.get('Code')}: {told.get('Message')}", self._url)


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
