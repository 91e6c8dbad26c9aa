"""The directory of a run: what it holds, and who may write into one that exists already."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from pathlib import Path

from aliquot.checkpoint.directories import complete_directories
from aliquot.config.read_config import dump_config
from aliquot.config.schema import RunConfig
from aliquot.core.beating_lock import beating_lock
from aliquot.core.errors import NodesDifferError, RunDirectoryError, one_line, storage_error
from aliquot.core.textfile import open_unlinked, publish_text, read_small_file
from aliquot.distributed.leader_lease import ROUND, ROUNDS, check_round
from aliquot.distributed.run_secret import SECRET_FILE
from aliquot.machine.mounts import mount_of

HEADER = "# The configuration of an aliquot run, complete, as it was run."
LOCK, BEATING_LOCK = ".lock", ".lock.held"
_OF_A_ROUND = "round"
_SHOWN = ".shown-"
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
_SEEN_S = 15.0  # within which a network file system shows to a node what another one has written


class RunDirectory:
    """runs/<name>: config.yaml, metrics.jsonl, events.jsonl, ledger.json, report.html, and directories."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._of_a_round = ROUND in os.environ
        self._held_locks: list[tuple[Path, int]] = []  # and their open descriptors
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.ledger = path / "ledger.json"
        self.chat_template_date = path / "chat-template-date.txt"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.profile = path / "profile"
        self.tensorboard = path / "tensorboard"
        self.export = path / "export"
        self.logs = path / "logs"

    def check(self, config: RunConfig) -> None:
        """Raises UserError when something else lives here or when `checkpoint.resume: never` meets an earlier run."""
        # logs/ alone is no run: the launcher makes it before any rank starts.
        names = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        held = {
            name for name in names - {"logs", ROUNDS, LOCK, SECRET_FILE} if not name.startswith((_SHOWN, BEATING_LOCK))
        }
        if held and not self._is_a_run():
            raise RunDirectoryError(
                "exists and is not a run of aliquot; choose another run.name or run.directory", self.path
            )
        if held and config.checkpoint.resume == "never":
            raise RunDirectoryError(
                "this run exists already and checkpoint.resume is `never`; choose another run.name, or resume: auto",
                self.path,
            )
        goes_on = (
            config.checkpoint.resume != "auto" or config.mirror is not None or any(self.checkpoints.glob("step-*"))
        )
        if self.export.exists() and not goes_on:
            raise RunDirectoryError(
                "this run has ended with its export, and no checkpoint is left to go on from; choose another run.name",
                self.path,
            )

    def show(self) -> str:
        """As who trains into this directory: make a file for the other nodes to find, and return its name.

        Raises StorageError. The name is new: of what a node has seen before it may have a copy, and what is still open
        on one need not be where the others look."""
        name = f"{_SHOWN}{secrets.token_hex(8)}"
        for place in self._shown_in():
            try:
                for earlier in place.glob(f"{_SHOWN}*"):  # of who was killed meanwhile
                    earlier.unlink(missing_ok=True)
                (place / name).touch()
            except OSError as error:
                raise storage_error(f"cannot write the run directory: {error.strerror}", error, place) from None
        return name

    def hide(self, name: str) -> None:
        for place in self._shown_in():
            with suppress(OSError):
                (place / name).unlink()

    def find(self, name: str) -> None:
        """Raises UserError where this is not the directory in which another node shows a file of that name."""
        until = time.monotonic() + _SEEN_S
        for place in self._shown_in():
            while not (place / name).exists():
                if time.monotonic() > until:
                    raise NodesDifferError(
                        "this node does not see what node 0 writes here, and every node has to write its part of each"
                        " checkpoint: set run.directory to a directory on a file system that all nodes share",
                        place,
                    )
                time.sleep(0.1)

    def _shown_in(self) -> list[Path]:
        """Checkpoints may be a link to elsewhere."""
        return [self.path, *([self.checkpoints] if os.path.lexists(self.checkpoints) else ())]

    def day(self) -> date:
        """The day on which the run began, if its chat template writes one; else today."""
        try:
            return date.fromisoformat(read_small_file(self.chat_template_date).decode().strip())
        except FileNotFoundError:
            return date.today()
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"holds no date ({error}): write one as 2026-01-31", self.chat_template_date
            ) from None

    def keep_day(self, day: str | None) -> None:
        """Keep the day that the chat template of this run takes for today; None: it writes none."""
        if day is not None:
            publish_text(self.chat_template_date, f"{day}\n")

    def _is_a_run(self) -> bool:
        """Whether config.yaml is aliquot's, not the person's own, or was lost beside a checkpoint that is whole."""
        with suppress(OSError, ValueError):
            if read_small_file(self.path / "config.yaml").decode().startswith(HEADER):
                return True
        with suppress(OSError):
            return bool(complete_directories(self.checkpoints))
        return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Raises UserError while another process trains into this directory; the kernel unlocks when a process dies.

        Where the file system has no locks, or such that only this machine sees, a file that is touched for as long as a
        run lives stands for one. A round of an elastic run (distributed/leader_lease.py) need not wait until a file
        server gives up the lock of a node of an earlier round: a node that is cut off publishes nothing."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open_unlinked(self.path / LOCK, "a")
        except OSError as error:  # no permission, read-only, a file where a directory should be
            told = f"cannot write the run directory: {error.strerror}; choose another run.directory"
            raise storage_error(told, error, self.path) from None
        with lock, ExitStack() as held:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks = not mount_of(self.path.resolve()).locks_are_local
            except BlockingIOError:
                if not (self._of_a_round and (self.path / LOCK).read_text().startswith(_OF_A_ROUND)):
                    raise RunDirectoryError("another process is training into this run directory", self.path) from None
                locks = True
            except OSError:  # a file system without locks: Lustre may be mounted so
                locks = False
            if not (locks or self._of_a_round):
                descriptor = held.enter_context(beating_lock(self.path / BEATING_LOCK))
                self._held_locks.append((self.path / BEATING_LOCK, descriptor))
            self._held_locks.append((self.path / LOCK, lock.fileno()))
            try:
                with suppress(OSError):  # a full disk is met by what needs it
                    lock.truncate(0)
                    lock.write(_OF_A_ROUND * self._of_a_round)
                    lock.flush()
                    os.fsync(lock.fileno())  # it stays open, so that a network file system need not write it yet
                yield
            finally:
                is_lost = self.why_lost() is not None
                self._held_locks.clear()
                with suppress(OSError):  # what the body raised must be what is told
                    held.close()
                    if not is_lost and [entry.name for entry in self.path.iterdir()] == [LOCK]:  # refused at its start
                        (self.path / LOCK).unlink()
                        self.path.rmdir()

    def why_lost(self) -> str | None:
        """Compare each lock that this process holds with the file under its path.

        Returns:
            None while they are the same file, and on ranks that hold no lock; otherwise the line for the person. The
            directory was removed, renamed or replaced, and whatever lies under the path belongs to somebody else.
        """
        for path, descriptor in self._held_locks:
            try:
                is_same = os.path.samestat(os.fstat(descriptor), path.stat())
            except OSError as error:  # a file server in trouble says nothing about the directory
                is_same = error.errno not in _GONE
            if not is_same:
                return (
                    f"{one_line(self.path)}: the run directory was removed, renamed or replaced while the run went on:"
                    " the run no longer holds its lock and writes nothing more. To continue, start again with"
                    " run.directory set to where the checkpoints are now"
                )
        return None

    def check_publish(self) -> None:
        """Call on rank 0 before a checkpoint or an export is begun, and before it is published.

        Raises RunDirectoryError where the directory is not the one that this process has locked, CutOffError where a
        newer round of the run has begun without this node.
        """
        if (lost := self.why_lost()) is not None:
            raise RunDirectoryError(lost)
        check_round(self.path)

    def begin(self, config: RunConfig) -> None:
        """Write config.yaml, complete, as run: only once all else is known to be in order."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            publish_text(self.path / "config.yaml", f"{HEADER}\n{dump_config(config)}")
            self.checkpoints.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(f"cannot write the run directory: {error.strerror}", error, self.path) from None
