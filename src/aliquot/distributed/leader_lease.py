"""Who leads a round of a run whose nodes come and go: a file in the run directory that one node alone can make.

A run whose `launch.nodes` is MIN:MAX goes in rounds: in one the same nodes train. Whoever makes the file of a round
leads it; the directory is the run's, shared by all nodes, so there is one leader whatever the network does. A node
that was cut off finds a newer round when it comes back: it goes on in no older one, and publishes nothing of it.

Making is a hard link to a complete file, which on a network file system, too, either makes the name or finds it made.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from aliquot.core.errors import CutOffError, storage_error
from aliquot.core.small_files import open_unlinked

ROUNDS = ".rounds"  # in the run directory
ROUND = "ALIQUOT_ROUND"  # set by the launcher in its ranks: of which round they are
DEAD_S = 10.0  # a leader that leaves its file untouched for so long has ended, or does not reach the directory
_KEPT = 8


@dataclass(frozen=True)
class Claim:
    """Of the leader of round `number`: where it is reached, and the word by which it knows the nodes of its run."""

    number: int
    host: str
    addresses: tuple[str, ...]
    port: int
    nonce: str

    @property
    def name(self) -> str:
        return f"{self.host} ({self.addresses[0]})"


class Claims:
    """The rounds of the run in `directory`. Methods raise StorageError where it cannot be read or written."""

    def __init__(self, directory: Path) -> None:
        self._rounds = directory.absolute() / ROUNDS
        self._own = self._rounds / f".{secrets.token_hex(8)}"
        try:
            self._rounds.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            told = f"cannot write the run directory, which all nodes share: {error.strerror}"
            raise storage_error(told, error, directory) from None

    @property
    def directory(self) -> Path:
        return self._rounds.parent

    def newest_number(self) -> int | None:
        return newest_round(self._rounds.parent)

    def newest(self) -> Claim | None:
        number = self.newest_number()
        if number is None:
            return None
        try:
            fields = json.loads(self._file(number).read_text())
        except FileNotFoundError:  # a newer one has taken its place meanwhile
            return self.newest()
        return Claim(**{**fields, "addresses": tuple(fields["addresses"])})

    def make(self, claim: Claim) -> bool:
        """False: another node was first."""
        try:
            # Only its owner may read the nonce in the file.
            with open_unlinked(self._own, "x", permissions=0o600, encoding="utf-8") as file:
                file.write(json.dumps(asdict(claim)))
                file.flush()
                os.fsync(file.fileno())
            os.link(self._own, self._file(claim.number))
        except FileExistsError:
            return False
        except OSError as error:
            raise storage_error(f"cannot claim a round: {error.strerror}", error, self._rounds) from None
        finally:
            self._own.unlink(missing_ok=True)
        for number in _numbers(self._rounds):
            if number <= claim.number - _KEPT:
                with suppress(OSError):
                    self._file(number).unlink(missing_ok=True)
        return True

    def beat(self, number: int) -> None:
        """Say that the leader of this round lives, and has nodes enough. Raises OSError."""
        os.utime(self._file(number))

    def beaten(self, number: int) -> tuple[float, float]:
        """When that was said last, and how many seconds ago, both by the clock of who keeps the directory."""
        try:
            self._own.touch()
            now = self._own.stat().st_mtime
            with self._file(number).open() as file:  # opened: an NFS client then asks its server, else it may not
                then = os.fstat(file.fileno()).st_mtime
        except OSError:
            return 0.0, 0.0
        finally:
            self._own.unlink(missing_ok=True)
        return then, now - then

    def finish(self, mark: str) -> None:
        """Nodes that come later to the run of the configuration `mark` have nothing to do."""
        with suppress(OSError):  # they find it complete themselves
            (self._rounds / "finished").write_text(mark)

    def finished(self, mark: str) -> bool:
        return is_finished(self._rounds.parent, mark)

    def _file(self, number: int) -> Path:
        return self._rounds / f"{number:08d}.json"


def is_finished(directory: Path, mark: str) -> bool:
    """Whether the run of the configuration `mark` in `directory` has come to its end. Makes nothing there."""
    with suppress(OSError):
        return (directory / ROUNDS / "finished").read_text() == mark
    return False


def newest_round(directory: Path) -> int | None:
    """Of the run in `directory`; None: it has had none."""
    return max(_numbers(directory / ROUNDS), default=None)


def goes_on() -> bool:
    """Whether this is a rank of a round that follows another: a person has seen the run begin."""
    return int(os.environ.get(ROUND, "1")) > 1


def check_round(directory: Path) -> None:
    """As a rank of a round, before it publishes something: raises CutOffError where a newer one has begun."""
    if (own := os.environ.get(ROUND)) is None:
        return
    with suppress(OSError):  # an NFS client asks its server for the names in a directory that it has changed itself
        changed = directory / ROUNDS / f".{secrets.token_hex(8)}"
        changed.touch()
        changed.unlink()
    newest = newest_round(directory)
    if newest is not None and newest > int(own):
        raise CutOffError(
            f"this node was cut off: round {newest} of the run has begun without it, so nothing of round {own} is saved"
        )


def _numbers(rounds: Path) -> list[int]:
    try:
        return [int(file.stem) for file in rounds.iterdir() if file.suffix == ".json" and file.stem.isdecimal()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(f"cannot read: {error.strerror}", error, rounds) from None
