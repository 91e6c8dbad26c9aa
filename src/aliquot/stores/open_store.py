"""The store of a URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from aliquot.core.errors import MissingToolError, UsageError, has_url_credentials
from aliquot.stores.base import Store


def is_url(text: str) -> bool:
    return "://" in text


def open_store(url: str) -> Store:
    """Nothing is asked of it yet. Raises UserError where a package is missing, and for a file:// of another machine."""
    if has_url_credentials(url):
        raise UsageError(f"{url} has a user name or password in it: give credentials by the environment instead")
    if url.startswith("file://"):
        from aliquot.stores.local_store import LocalStore

        return LocalStore(_path_of(url))
    if url.startswith("s3://"):
        try:
            from aliquot.stores.s3_store import S3Store
        except ImportError:
            raise MissingToolError(f"{url} needs boto3: pip install 'aliquot[s3]'") from None
        return S3Store(url)
    from aliquot.stores.fsspec_store import FsspecStore

    return FsspecStore(url)


def _path_of(url: str) -> Path:
    host, _, path = url.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise UsageError(f"{url}: a directory of this machine has three slashes, file:///DIRECTORY; {host!r} is a host")
    return Path("/" + unquote(path))
