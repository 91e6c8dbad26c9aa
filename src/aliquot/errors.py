"""Errors that are for the person, not for the programmer. The one module that every other may import.

Each kind has an id, which is printed behind its line and explained in docs/troubleshooting.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar


class UserError(Exception):
    """Bad input: shown as one line without a traceback; the process exits with code 2.

    `message` says what is wrong and what to do; `where` (a file, or file:line) is put in front of it.
    """

    id: ClassVar[str] = "input"
    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, where: str | Path | None = None) -> None:
        super().__init__(f"{where}: {message}" if where is not None else message)

    @property
    def line(self) -> str:
        """What a person is shown."""
        first = str(self).strip().partition("\n")[0]
        return f"{first} [{self.id}]"


class ConfigError(UserError):
    """A run configuration, or an override of it, that is wrong by itself."""

    id = "config"


class DeepspeedConfigError(UserError):
    """A DeepSpeed JSON that is wrong, contradicts the run configuration, or asks for what is not supported."""

    id = "deepspeed-config"


class UsageError(UserError):
    """A function or command was called with what it cannot take."""

    id = "usage"


class LaunchError(UserError):
    """The environment or the placement of ranks makes no run."""

    id = "launch"


class RendezvousError(UserError):
    """The nodes or ranks of a run have not found each other."""

    id = "rendezvous"


class DeviceError(UserError):
    """A device that is not there."""

    id = "device"


class EngineError(UserError):
    """Settings that the engine does not have."""

    id = "engine"


class MissingToolError(UserError):
    """A compiler, program or optional package that is needed and not installed."""

    id = "missing-tool"


class ModelFilesError(UserError):
    """No model is where one should be, or its files are not readable."""

    id = "model-files"


class UnsupportedModelError(UserError):
    """A model of a kind that cannot be trained here."""

    id = "unsupported-model"


class WeightsFileError(UserError):
    """A safetensors file or index that is damaged or does not fit the model."""

    id = "weights-file"


class TokenizerError(UserError):
    """No tokenizer, or one that fits neither data nor model."""

    id = "tokenizer"


class DataError(UserError):
    """Texts or records that cannot be read or hold nothing to learn from."""

    id = "data"


class DataCacheError(UserError):
    """Prepared tokens that are damaged."""

    id = "data-cache"


class StorageError(UserError):
    """A file system that is full, not writable or failing."""

    id = "disk"


class RunDirectoryError(UserError):
    """A directory that is not what it should be: another's, a run's that goes on, no run's."""

    id = "run-directory"


class ResumeError(UserError):
    """A run that cannot continue from its checkpoints as it is configured now."""

    id = "resume"


class DamagedCheckpoint(UserError):
    """A checkpoint that is incomplete or whose bytes are not those that were saved. An older one may be good."""

    id = "damaged-checkpoint"


class PlanError(UserError):
    """Nothing to plan for."""

    id = "plan"


class DoesNotFitError(UserError):
    """The plan needs more memory than the machine has."""

    id = "does-not-fit"


class InstanceError(UserError):
    """An EC2 type that is not known, or AWS did not say."""

    id = "instances"


class ManifestError(UserError):
    """A manifest that cannot be read."""

    id = "manifest"


class ClusterError(UserError):
    """A `cluster:` section from which no job can be made."""

    id = "cluster"


class TrainingError(UserError):
    """A run that was well formed had to stop: a lost or hung rank. One line; exits with code 1."""

    id = "training"
    exit_code = 1


class SelfTestError(TrainingError):
    """What an engine checks before it trains gave a wrong result."""

    id = "engine-check"


class DivergedError(TrainingError):
    """A loss or gradient norm that is not finite."""

    id = "diverged"


def kinds(of: type[UserError] = UserError) -> Iterator[type[UserError]]:
    """UserError and all kinds of it: a process that is told of an error by name raises the same."""
    yield of
    for kind in of.__subclasses__():
        yield from kinds(kind)


@contextmanager
def reading(path: Path | None) -> Iterator[None]:
    """Raise OSError as StorageError: cannot read."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror or error}", path) from error


@contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Raise OSError as StorageError: cannot write."""
    try:
        yield
    except OSError as error:  # disk full, quota, read-only, no permission
        raise StorageError(f"cannot write: {error.strerror or error}", path) from error
