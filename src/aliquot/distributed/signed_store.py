"""A rendezvous store that ignores values of other programs: the secret of the run signs every value.

torch's TCPStore accepts values from any program that reaches its port. Every value therefore carries an HMAC over the
run id, the key and the value. The HMAC is verified before any code parses the value; an unsigned value counts as
absent.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

# Public, but not re-exported for type checkers.
from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]

from aliquot.distributed.run_secret import SECRET_VARIABLE

_DIGEST = "sha256"
_DIGEST_BYTES = 32
_POLL_S = 0.05


class SignedStore(Store):
    """A Store whose values are signed. Counters (`add`) are not signed, because the server computes their values.

    torch's stores and process groups keep only the C++ part of a store alive. A caller that passes this store to torch
    must keep the Python object alive for as long as torch uses the store.
    """

    def __init__(self, store: Store, secret: str, run_id: str, prefix: str = "") -> None:
        super().__init__()
        self._store = cast(Any, store)  # type stubs lack some of its methods
        self._secret, self._run_id, self._prefix = secret, run_id, prefix
        self.set_timeout(self._store.timeout)

    def with_prefix(self, prefix: str) -> SignedStore:
        """Return the same store with `prefix` in front of every key."""
        return SignedStore(self._store, self._secret, self._run_id, f"{self._prefix}{prefix}/")

    def unsigned(self) -> Store:
        """Return the underlying store, without signatures, for libraries that cannot use this class."""
        return PrefixStore(f"{self._run_id}/unsigned/{self._prefix}", self._store)

    def clone(self) -> SignedStore:
        """Return the same store over a new connection."""
        return SignedStore(self._store.clone(), self._secret, self._run_id, self._prefix)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(self._name(key), self._digest(key, data) + data)

    def get(self, key: str) -> bytes:
        return self._wait(key, time.monotonic() + self._timeout().total_seconds())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout or self._timeout()).total_seconds()
        for key in keys:
            self._wait(key, until)

    def check(self, keys: list[str]) -> bool:
        """Whether every key has a value that this run has signed."""
        return bool(self._store.check([self._name(key) for key in keys])) and None not in map(self._verified, keys)

    def is_forged(self, key: str) -> bool:
        """Whether `key` has a value that is not signed with this secret."""
        return bool(self._store.check([self._name(key)])) and self._verified(key) is None

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(self._name(key), value))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(self._name(key)))

    def _timeout(self) -> timedelta:
        return cast(timedelta, cast(Any, self).timeout)

    def _name(self, key: str) -> str:
        return f"{self._run_id}/{self._prefix}{key}"

    def _digest(self, key: str, value: bytes) -> bytes:
        name = self._name(key).encode()
        text = b"%d %d %b%b" % (len(self._run_id), len(name), name, value)
        return hmac.digest(self._secret.encode(), text, _DIGEST)

    def _verified(self, key: str) -> bytes | None:
        signed: bytes = self._store.get(self._name(key))
        digest, value = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        return value if hmac.compare_digest(digest, self._digest(key, value)) else None

    def _wait(self, key: str, until: float) -> bytes:
        """Wait for a value that this run has signed. Raises DistStoreError."""
        while True:
            self._store.wait([self._name(key)], timedelta(seconds=max(0.001, until - time.monotonic())))
            if (value := self._verified(key)) is not None:
                return value
            if time.monotonic() > until:
                raise DistStoreError(f"no process of this run has written {key}: its value has no valid signature")
            time.sleep(_POLL_S)


def sign_store(store: Store, environ: Mapping[str, str], prefix: str) -> Store:
    """Return the store that a rank uses, which signs values if `environ` has the secret of a launcher or job.

    Without a secret (torchrun, srun, a shell loop), a rank cannot be distinguished from another program that reaches
    the store. Values are JSON and are never unpickled.
    """
    secret = environ.get(SECRET_VARIABLE)
    if not secret:
        return PrefixStore(prefix, store)
    return SignedStore(store, secret, environ.get("TORCHELASTIC_RUN_ID", ""), f"{prefix}/")
