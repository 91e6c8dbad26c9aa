"""Errors that the user sees as one line, and functions that make untrusted text safe to print.

Each error type has an id, which is printed at the end of the line and explained in docs/guides/troubleshooting.md.
"""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import ClassVar

# Error numbers of a failing disk or file server: the same request may succeed later.
_STORAGE_FAILURES = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESHUTDOWN,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET,
    errno.ECONNABORTED, errno.EREMOTEIO, errno.ENOLCK, errno.EAGAIN, errno.EBUSY,
}  # fmt: skip

# Error numbers that only a file system returns. They identify a failed write, whose OSError names no file.
_FILE_SYSTEM_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE}

_TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}


# Control characters of a terminal without newline and tab, and characters that reverse the order of text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_USER_OF_URL = re.compile(r"(?<=[A-Za-z0-9]:/)/?[^\r\n/?#]*@")  # pathlib removes the second slash


def printable(text: str) -> str:
    """Return `text` with control characters escaped, because untrusted text could control the terminal."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def has_url_credentials(text: str) -> bool:
    """Return whether a URL in `text` holds a user name or a password, which reports and manifests would show."""
    return _USER_OF_URL.search(text) is not None


def one_line(path: str | Path) -> str:
    """Return a path on one line, for messages: a path may contain newlines."""
    return str(path).replace("\r", "\\r").replace("\n", "\\n")


class UserError(Exception):
    """Bad input: the command line shows one line without a traceback, and exits with code 2.

    Attributes:
        id: The name of the kind of error, under which the troubleshooting page explains it.
        exit_code: The exit code of the command line.

    Args:
        message: what is wrong and what to do.
        where: a file, or file:line, put in front of the message.
        problems: all messages of an error about several problems; the user sees one line for each.
    """

    id: ClassVar[str] = "input"
    exit_code: int = 2

    def __init_subclass__(cls, id: str) -> None:
        cls.id = id

    def __init__(self, message: str, where: str | Path | None = None, problems: Sequence[str] = ()) -> None:
        super().__init__(f"{one_line(where)}: {message}" if where is not None else message)
        self._problems = problems

    @property
    def line(self) -> str:
        """The text for the user: one line, without control characters and passwords."""
        return self._shown(str(self))

    @property
    def lines(self) -> list[str]:
        """`line`, or one such line for each problem of an error that has several."""
        return [self._shown(problem) for problem in self._problems] or [self.line]

    def _shown(self, text: str) -> str:
        first = text.strip().partition("\n")[0]
        return f"{printable(_USER_OF_URL.sub('/...@', first))} [{self.id}]"


class ConfigError(UserError, id="config"):
    """A run configuration, or an override, is wrong."""


class DeepspeedConfigError(UserError, id="deepspeed-config"):
    """A DeepSpeed JSON is wrong, contradicts the run configuration, or sets something unsupported."""


class UsageError(UserError, id="usage"):
    """A function or command was called with unusable arguments."""


class LaunchError(UserError, id="launch"):
    """The environment or the placement of ranks does not allow a run."""


class RendezvousError(UserError, id="rendezvous"):
    """Nodes or ranks did not join in time; the next attempt may succeed."""

    exit_code = 1


class NodesDifferError(UserError, id="nodes-differ"):
    """The nodes of a run differ in configuration, software, data, model or run directory."""


class DeviceError(UserError, id="device"):
    """A device is missing."""


class EngineError(UserError, id="engine"):
    """The engine does not support a setting."""


class MissingToolError(UserError, id="missing-tool"):
    """A compiler, program or optional package is not installed."""


class ModelFilesError(UserError, id="model-files"):
    """A model is missing, or its files are not readable."""


class UnsupportedModelError(UserError, id="unsupported-model"):
    """aliquot does not train models of this type."""


class WeightsFileError(UserError, id="weights-file"):
    """A safetensors file or index is damaged or does not fit the model."""


class TokenizerError(UserError, id="tokenizer"):
    """A tokenizer is missing, or does not fit the data or the model."""


class DataError(UserError, id="data"):
    """Texts or records cannot be read or contain nothing to train on."""


class DataCacheError(UserError, id="data-cache"):
    """Prepared tokens are damaged."""


class StorageError(UserError, id="disk"):
    """A file system is full or not writable, or an object store refuses a request."""


class StorageFailureError(StorageError, id="storage"):
    """A file system or an object store fails or does not answer; the next attempt may succeed."""

    exit_code = 1


class RunDirectoryError(UserError, id="run-directory"):
    """A directory is no run, belongs to another run, or another process is training into it."""


class ResumeError(UserError, id="resume"):
    """A run cannot continue from its checkpoints with the present configuration."""


class DamagedCheckpoint(UserError, id="damaged-checkpoint"):
    """A checkpoint is incomplete or its checksums do not match. An older checkpoint may be good."""


class CallbackError(UserError, id="callback"):
    """A callback of `aliquot.train` raised an exception."""


class PlanError(UserError, id="plan"):
    """A plan cannot be made."""


class DoesNotFitError(UserError, id="does-not-fit"):
    """The plan needs more memory than the machine has."""


class FewerRanksFitError(DoesNotFitError, id="fewer-ranks-fit"):
    """The run does not fit with the ranks that `launch.ranks: auto` has chosen, but with fewer ranks."""


class InstanceError(UserError, id="instances"):
    """An EC2 instance type is unknown, or AWS did not describe it."""


class ManifestError(UserError, id="manifest"):
    """A manifest cannot be read."""


class ClusterError(UserError, id="cluster"):
    """A `cluster:` section does not describe a job."""


class TrainingError(UserError, id="training"):
    """A well-formed run had to stop. The command exits with code 1, or 128 + signal after a signal."""

    exit_code = 1


class SelfTestError(TrainingError, id="engine-check"):
    """The start-up proof of an engine gave a wrong result."""


class CutOffError(TrainingError, id="cut-off"):
    """The other nodes of an elastic run began a newer round without this node."""


class DivergedError(TrainingError, id="diverged"):
    """A loss or gradient norm is not finite."""


def user_error_types(base: type[UserError] = UserError) -> Iterator[type[UserError]]:
    """Yield `base` and all its subclasses, so that a rank can raise an error type that another rank has named."""
    yield base
    for subclass in base.__subclasses__():
        yield from user_error_types(subclass)


def reason_of(error: BaseException, longest: int = 300) -> str:
    """Return the message of another library's error on one line, or the name of its type if there is no message."""
    return " ".join(str(error).split())[:longest] or type(error).__name__


def storage_error(message: str, error: OSError, where: str | Path | None = None) -> StorageError:
    """Return `message` as a StorageError, or as a StorageFailureError if `error` says that a disk or server fails.

    If this process or the system has too many open files, no file is at fault, and the message says that instead.
    """
    if error.errno in _TOO_MANY_FILES:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return StorageError(f"too many open files: this process may open {limit}. Raise the limit (ulimit -n)", where)
    return (StorageFailureError if error.errno in _STORAGE_FAILURES else StorageError)(message, where)


def resource_error(error: BaseException) -> UserError | None:
    """Return the UserError for an error by which the system refused memory or a write; None for other errors.

    torch's allocator reports ENOMEM as a RuntimeError.
    """
    if isinstance(error, UserError):
        return None
    number = error.errno if isinstance(error, OSError) else None
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "Cannot allocate memory" in text:
        return DoesNotFitError(
            f"out of memory: {text or 'Cannot allocate memory'}. Raise the limit (ulimit -v, the container's), or see"
            " with `aliquot plan` how much memory the run needs"
        )
    if type(error).__name__ == "OutOfMemoryError":  # of torch, which this package does not import
        return DoesNotFitError(
            f"{'. '.join(text.split('. ')[:2])}. A run needs less memory with train.gradient_checkpointing=full, a"
            " smaller train.per_device_train_batch_size, shard.offload=cpu or shard.engine=host: `aliquot plan` shows"
            " what fits"
        )
    if isinstance(error, OSError) and number == errno.EFBIG:
        largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit = "the file system's limit" if largest == resource.RLIM_INFINITY else f"{largest} bytes (ulimit -f)"
        return StorageError(f"a file or shared memory would be larger than {limit}. Raise the limit", error.filename)
    if isinstance(error, OSError) and number in _FILE_SYSTEM_ERRORS | _TOO_MANY_FILES:
        return storage_error(error.strerror or text, error, error.filename)
    return None


def describe_failure(function: Callable[..., object], what: str, error: BaseException) -> str:
    """Return `what` with the reason, behind file:line of the last line of the function's own file before the error."""
    reason = " ".join(f"{what}: {type(error).__name__}: {error}".split()).removesuffix(":")
    if (code := getattr(function, "__code__", None)) is None:
        return reason
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == code.co_filename]
    return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}: {reason}"


class UnfitFileError(OSError):
    """A file that is not opened: a link to elsewhere, not a regular file, or too large. It has no errno."""


@contextmanager
def reading(path: Path | None) -> Iterator[None]:
    """Turn an OSError in the block into a StorageError that says "cannot read"; an UnfitFileError, into its message."""
    try:
        yield
    except UnfitFileError as error:
        raise WeightsFileError(str(error), path) from error
    except OSError as error:
        raise storage_error(f"cannot read: {error.strerror or error}", error, path or error.filename) from error


@contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Turn an OSError in the block into a StorageError that says "cannot write"."""
    try:
        yield
    except OSError as error:  # disk full, quota, read-only, no permission
        raise storage_error(f"cannot write: {error.strerror or error}", error, path) from error
