"""The lease of the leader of an elastic run: a file per round in the run directory, which only one node can create.

A run whose `launch.nodes` is MIN:MAX proceeds in rounds; the set of nodes changes only between rounds. The node that
creates the file of a round leads the round. All nodes share the run directory, so every round has one leader, whatever
happens to the network. A node that was cut off sees the file of a newer round when it reconnects, and then publishes
nothing for the older round.

The leader creates the file as a hard link to a complete file. Even on a network file system, linking either creates the
name or fails because the name exists.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from aliquot.core.errors import CutOffError, RunDirectoryError, UnfitFileError, printable, storage_error
from aliquot.core.small_files import flush_to_disk, open_regular, open_unlinked, publish_text, read_small_file

ROUNDS = ".rounds"  # in the run directory
ROUND = "ALIQUOT_ROUND"  # the number of the round, which the launcher sets for its ranks
DEAD_S = 10.0  # a leader that has not touched its file for this long has ended, or cannot reach the directory
_RETAINED = 8
_FINISHED = "finished"
_NAME = re.compile(r"([0-9]{8}|[1-9][0-9]{8,17})\.json")


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Claim:
    """The address of the leader of round `number`, and the nonce with which the leader and the nodes sign messages."""

    number: int
    host: str
    address: Annotated[str, Field(pattern=r"^[0-9A-Za-z.:%_-]{1,64}$")]
    port: Annotated[int, Field(ge=0, lt=1 << 16)]
    nonce: str

    @property
    def name(self) -> str:
        return printable(f"{self.host} ({self.address})")

    def run_id(self, round: int) -> str:
        """Return the id of a round, which does not reveal the nonce, because keys of the store contain the id."""
        return hmac.digest(self.nonce.encode(), b"round %d" % round, "sha256").hex()


_CLAIM = TypeAdapter(Claim)


class Claims:
    """The lease files in a run directory. Methods raise StorageError if the directory cannot be read or written."""

    def __init__(self, directory: Path) -> None:
        self._rounds = directory.absolute() / ROUNDS
        self._draft = self._rounds / f".{secrets.token_hex(8)}"
        try:
            self._rounds.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"cannot write the run directory, which all nodes share: {error.strerror}"
            raise storage_error(text, error, directory) from None

    @property
    def directory(self) -> Path:
        return self._rounds.parent

    def newest(self) -> Claim | None:
        number = newest_round(self.directory)
        if number is None:
            return None
        file = self._file(number)
        try:
            return replace(_CLAIM.validate_json(read_small_file(file, links="none")), number=number)
        except FileNotFoundError:  # the leader of a newer round has removed the file meanwhile
            return self.newest()
        except (UnfitFileError, ValueError) as error:
            reason = "its content is damaged" if isinstance(error, ValueError) else str(error)
            advice = "End all nodes, remove this file, and start the nodes again"
            raise RunDirectoryError(f"not the lease of a round: {reason}. {advice}", file) from None
        except OSError as error:
            raise storage_error(f"cannot read: {error.strerror}", error, file) from None

    def make(self, claim: Claim) -> bool:
        """Create the lease of a round. Return False if another node was first."""
        try:
            # The permissions let only the owner of the file read the nonce.
            with open_unlinked(self._draft, "x", permissions=0o600, encoding="utf-8") as file:
                file.write(json.dumps(asdict(claim)))
                flush_to_disk(file)
            os.link(self._draft, self._file(claim.number))
        except FileExistsError:
            return False
        except OSError as error:
            raise storage_error(f"cannot claim a round: {error.strerror}", error, self._rounds) from None
        finally:
            self._draft.unlink(missing_ok=True)
        for number in _numbers(self._rounds):
            if number <= claim.number - _RETAINED:
                with suppress(OSError):
                    self._file(number).unlink(missing_ok=True)
        return True

    def beat(self, number: int) -> None:
        """Renew the lease, to show that the leader of this round is alive and has enough nodes. Raises OSError."""
        os.utime(self._file(number))

    def beaten(self, number: int) -> tuple[float, float]:
        """Return when the lease was last renewed, and how many seconds ago, both by the clock of the file server."""
        try:
            self._draft.touch()
            now = self._draft.stat().st_mtime
            with open_regular(self._file(number), "none") as file:  # opening makes an NFS client ask its server
                then = os.fstat(file.fileno()).st_mtime
        except OSError:
            return 0.0, 0.0
        finally:
            self._draft.unlink(missing_ok=True)
        return then, now - then

    def finish(self, mark: str) -> None:
        """Record that the run with the configuration `mark` is finished, for nodes that join later."""
        with suppress(OSError):  # without the file, a later node finds the run complete when it resumes
            publish_text(self._rounds / _FINISHED, mark)

    def _file(self, number: int) -> Path:
        return self._rounds / f"{number:08d}.json"


def is_finished(directory: Path, mark: str) -> bool:
    """Whether the run with the configuration `mark` in `directory` is finished. Creates nothing there."""
    with suppress(OSError):
        return read_small_file(directory / ROUNDS / _FINISHED, links="none") == mark.encode()
    return False


def newest_round(directory: Path) -> int | None:
    """Return the number of the newest round of the run in `directory`, or None."""
    return max(_numbers(directory / ROUNDS), default=None)


def follows_earlier_round() -> bool:
    """Whether this rank belongs to a round after the first, so that the user has already seen the start of the run."""
    return int(os.environ.get(ROUND, "1")) > 1


def check_round(directory: Path) -> None:
    """Raise CutOffError if a round newer than this rank's has started. Call this before publishing anything."""
    if (number := os.environ.get(ROUND)) is None:
        return
    with suppress(OSError):  # changing the directory makes an NFS client ask its server for the newest entries
        changed = directory / ROUNDS / f".{secrets.token_hex(8)}"
        changed.touch()
        changed.unlink()
    newest = newest_round(directory)
    if newest is not None and newest > int(number):
        raise CutOffError(
            f"this node was cut off: round {newest} of the run has begun without it, so nothing of round {number} is"
            " saved"
        )


def _numbers(rounds: Path) -> list[int]:
    try:
        return [int(name[1]) for file in rounds.iterdir() if (name := _NAME.fullmatch(file.name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(f"cannot read: {error.strerror}", error, rounds) from None
