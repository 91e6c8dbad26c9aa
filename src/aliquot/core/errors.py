"""Errors that are for the person, not for the programmer. The one module that every other may import.

Each kind has an id, which is printed behind its line and explained in docs/troubleshooting.md.
"""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

# What a disk or a file server in trouble says, and not of what has been asked.
_FAILING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESHUTDOWN,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET,
    errno.ECONNABORTED, errno.EREMOTEIO, errno.ENOLCK, errno.EAGAIN, errno.EBUSY,
}  # fmt: skip

# Only a file system says these; an error of a write that fails so names no file.
_OF_FILES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE}


# Characters that a terminal obeys, or that change the order in which it shows others: all but newline and tab.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_USER_OF_URL = re.compile(r"(?<=[A-Za-z0-9]:/)/?[^\r\n/?#]*@")  # pathlib removes the second slash


def printable(text: str) -> str:
    """Return `text` with its control characters escaped, for a terminal: text of strangers could drive it."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def has_user(text: str) -> bool:
    """Whether a URL in `text` holds a user name or a password, which reports, dashboards and manifests would show."""
    return _USER_OF_URL.search(text) is not None


def one_line(path: str | Path) -> str:
    """A path as messages show it: it may have newlines in it."""
    return str(path).replace("\r", "\\r").replace("\n", "\\n")


class UserError(Exception):
    """Bad input: shown as one line without a traceback; the process exits with code 2.

    `message` says what is wrong and what to do; `where` (a file, or file:line) is put in front of it.
    """

    id: ClassVar[str] = "input"
    exit_code: int = 2

    def __init_subclass__(cls, id: str) -> None:
        cls.id = id

    def __init__(self, message: str, where: str | Path | None = None) -> None:
        super().__init__(f"{one_line(where)}: {message}" if where is not None else message)

    @property
    def line(self) -> str:
        """What a person is shown: of a library's words the first line, without control characters and passwords."""
        first = str(self).strip().partition("\n")[0]
        return f"{printable(_USER_OF_URL.sub('/...@', first))} [{self.id}]"


class ConfigError(UserError, id="config"):
    """A run configuration, or an override of it, that is wrong by itself."""


class DeepspeedConfigError(UserError, id="deepspeed-config"):
    """A DeepSpeed JSON that is wrong, contradicts the run configuration, or asks for what is not supported."""


class UsageError(UserError, id="usage"):
    """A function or command was called with what it cannot take."""


class LaunchError(UserError, id="launch"):
    """The environment or the placement of ranks makes no run."""


class RendezvousError(UserError, id="rendezvous"):
    """The nodes or ranks of a run have not found each other: those that are late may be there next time."""

    exit_code = 1


class NodesDifferError(UserError, id="nodes-differ"):
    """The nodes of a run do not have the same configuration, software, data, model or run directory."""


class DeviceError(UserError, id="device"):
    """A device that is not there."""


class EngineError(UserError, id="engine"):
    """Settings that the engine does not have."""


class MissingToolError(UserError, id="missing-tool"):
    """A compiler, program or optional package that is needed and not installed."""


class ModelFilesError(UserError, id="model-files"):
    """No model is where one should be, or its files are not readable."""


class UnsupportedModelError(UserError, id="unsupported-model"):
    """A model of a kind that cannot be trained here."""


class WeightsFileError(UserError, id="weights-file"):
    """A safetensors file or index that is damaged or does not fit the model."""


class TokenizerError(UserError, id="tokenizer"):
    """No tokenizer, or one that fits neither data nor model."""


class DataError(UserError, id="data"):
    """Texts or records that cannot be read or hold nothing to learn from."""


class DataCacheError(UserError, id="data-cache"):
    """Prepared tokens that are damaged."""


class StorageError(UserError, id="disk"):
    """A file system that is full or not writable, or an object store that refuses."""


class StorageFailureError(StorageError, id="storage"):
    """A file system or an object store that fails or does not answer: it may the next time."""

    exit_code = 1


class RunDirectoryError(UserError, id="run-directory"):
    """A directory that is not what it should be: another's, a run's that goes on, no run's."""


class ResumeError(UserError, id="resume"):
    """A run that cannot continue from its checkpoints as it is configured now."""


class DamagedCheckpoint(UserError, id="damaged-checkpoint"):
    """A checkpoint that is incomplete or whose bytes are not those that were saved. An older one may be good."""


class PlanError(UserError, id="plan"):
    """Nothing to plan for."""


class DoesNotFitError(UserError, id="does-not-fit"):
    """The plan needs more memory than the machine has."""


class InstanceError(UserError, id="instances"):
    """An EC2 type that is not known, or AWS did not say."""


class ManifestError(UserError, id="manifest"):
    """A manifest that cannot be read."""


class ClusterError(UserError, id="cluster"):
    """A `cluster:` section from which no job can be made."""


class TrainingError(UserError, id="training"):
    """A run that was well formed had to stop: a lost or hung rank. One line; exits with code 1."""

    exit_code = 1


class SelfTestError(TrainingError, id="engine-check"):
    """What an engine checks before it trains gave a wrong result."""


class CutOffError(TrainingError, id="cut-off"):
    """The other nodes of a run have begun a newer round without this one."""


class DivergedError(TrainingError, id="diverged"):
    """A loss or gradient norm that is not finite."""


def kinds(of: type[UserError] = UserError) -> Iterator[type[UserError]]:
    """UserError and all kinds of it: a process that is told of an error by name raises the same."""
    yield of
    for kind in of.__subclasses__():
        yield from kinds(kind)


def storage_error(told: str, error: OSError, where: str | Path | None = None) -> StorageError:
    """`told` as what it is: a StorageFailureError where a disk or a file server is in trouble."""
    return (StorageFailureError if error.errno in _FAILING else StorageError)(told, where)


def refusal(error: BaseException) -> UserError | None:
    """The line for the person where the operating system has refused memory, or more of a file; None for any other
    error. Torch's allocator says ENOMEM in the words of a RuntimeError."""
    if isinstance(error, UserError):
        return None
    number = error.errno if isinstance(error, OSError) else None
    told = str(error).strip().partition("\n")[0]
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "Cannot allocate memory" in told:
        return DoesNotFitError(
            f"out of memory: {told or 'Cannot allocate memory'}. Raise the limit (ulimit -v, the container's), or look"
            " at what `aliquot plan` says is needed"
        )
    if isinstance(error, OSError) and number == errno.EFBIG:
        largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit = "the file system's limit" if largest == resource.RLIM_INFINITY else f"{largest} bytes (ulimit -f)"
        return StorageError(f"a file or shared memory would be larger than {limit}. Raise it", error.filename)
    if isinstance(error, OSError) and number in _OF_FILES:
        return storage_error(error.strerror or told, error, error.filename)
    return None


@contextmanager
def reading(path: Path | None) -> Iterator[None]:
    """Raise OSError as StorageError: cannot read."""
    try:
        yield
    except OSError as error:
        raise storage_error(f"cannot read: {error.strerror or error}", error, path) from error


@contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Raise OSError as StorageError: cannot write."""
    try:
        yield
    except OSError as error:  # disk full, quota, read-only, no permission
        raise storage_error(f"cannot write: {error.strerror or error}", error, path) from error
