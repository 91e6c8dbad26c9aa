"""The directory of a run: what it holds, and who may write into one that exists already."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import AbstractContextManager, suppress
from datetime import date
from pathlib import Path

from aliquot.checkpoint.directories import complete_directories
from aliquot.config.read_config import dump_config
from aliquot.config.schema import RunConfig
from aliquot.core.errors import NodesDifferError, RunDirectoryError, storage_error
from aliquot.core.run_lock import BEATING_LOCK, LOCK, RunLock
from aliquot.core.small_files import publish_text, read_small_file
from aliquot.distributed.leader_lease import ROUND, ROUNDS, check_round
from aliquot.distributed.run_secret import SECRET_FILE
from aliquot.machine.mounts import mount_of

HEADER = "# The configuration of an aliquot run, complete, as it was run."
_SHOWN = ".shown-"
_SEEN_S = 15.0  # within which a network file system shows to a node what another one has written


class RunDirectory:
    """runs/<name>: config.yaml, metrics.jsonl, events.jsonl, ledger.json, report.html, and directories."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = RunLock(path, ROUND in os.environ, lambda: mount_of(path.resolve()).locks_are_local)
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

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock of the directory. Raises UserError while another process trains into it."""
        return self._lock.hold()

    def why_lost(self) -> str | None:
        """Return the line for the person once the directory is not the one that this process has locked."""
        return self._lock.why_lost()

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
