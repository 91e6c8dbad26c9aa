"""A rendezvous store that ignores values of other programs: the secret of the run signs every value.

torch's TCPStore accepts values from any program that reaches its port. Every value therefore carries an HMAC over the
run id, the key, a number and the value. The HMAC is verified before any code parses the value; an unsigned value counts
as absent. A program without the secret can still put back an earlier value of a key. The number rises with every value
of the key, and a process that has seen a newer value counts the earlier value as absent.
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
_NUMBER_BYTES = 8
_POLL_S = 0.05


class SignedStore(Store):
    """A Store whose values are signed. Counters (`add`) are not signed, because the server computes their values.

    torch's stores and process groups keep only the C++ part of a store alive. A caller that passes this store to torch
    must keep the Python object alive for as long as torch uses the store.
    """

    def __init__(
        self, store: Store, secret: str, run_id: str, prefix: str = "", newest: dict[str, int] | None = None
    ) -> None:
        """`newest`: the newest number that this process has seen of each key, which all its stores of a run share."""
        super().__init__()
        self._store = cast(Any, store)  # type stubs lack some of its methods
        self._secret, self._run_id, self._prefix = secret, run_id, prefix
        self._newest = {} if newest is None else newest
        self.set_timeout(self._store.timeout)

    def with_prefix(self, prefix: str) -> SignedStore:
        """Return the same store with `prefix` in front of every key."""
        return SignedStore(self._store, self._secret, self._run_id, f"{self._prefix}{prefix}/", self._newest)

    def unsigned(self) -> Store:
        """Return the underlying store, without signatures, for libraries that cannot use this class."""
        return PrefixStore(f"{self._run_id}/unsigned/{self._prefix}", self._store)

    def clone(self) -> SignedStore:
        """Return the same store over a new connection."""
        return SignedStore(self._store.clone(), self._secret, self._run_id, self._prefix, self._newest)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.peek(key)  # several processes may write a key, and readers ignore a number below that of another writer
        name = self._name(key)
        self._newest[name] = self._newest.get(name, 0) + 1
        numbered = self._newest[name].to_bytes(_NUMBER_BYTES) + data
        self._store.set(name, self._digest(name, numbered) + numbered)

    def get(self, key: str) -> bytes:
        return self._wait(key, time.monotonic() + self._timeout().total_seconds())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout or self._timeout()).total_seconds()
        for key in keys:
            self._wait(key, until)

    def check(self, keys: list[str]) -> bool:
        """Whether every key has a value that this run has signed."""
        return all(self.peek(key) is not None for key in keys)

    def peek(self, key: str) -> bytes | None:
        """Return the value of `key` without waiting, or None if this run has signed none."""
        return self._verified(key) if self._store.check([self._name(key)]) else None

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

    def _digest(self, name: str, numbered: bytes) -> bytes:
        text = b"%d %d %b%b" % (len(self._run_id), len(name.encode()), name.encode(), numbered)
        return hmac.digest(self._secret.encode(), text, _DIGEST)

    def _verified(self, key: str) -> bytes | None:
        name = self._name(key)
        signed: bytes = self._store.get(name)
        digest, numbered = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        number = int.from_bytes(numbered[:_NUMBER_BYTES])
        if number < self._newest.get(name, 0) or not hmac.compare_digest(digest, self._digest(name, numbered)):
            return None
        self._newest[name] = number
        return numbered[_NUMBER_BYTES:]

    def _wait(self, key: str, until: float) -> bytes:
        """Wait for a value that this run has signed. Raises DistStoreError."""
        while True:
            self._store.wait([self._name(key)], timedelta(seconds=max(0.001, until - time.monotonic())))
            if (value := self._verified(key)) is not None:
                return value
            if time.monotonic() > until:
                raise DistStoreError(f"{key} has no new value of this run: its value is unsigned, or an earlier one")
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
