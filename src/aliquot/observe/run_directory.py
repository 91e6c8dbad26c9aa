"""The run directory: its files, and checks that a run may write into an existing directory."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from datetime import date
from pathlib import Path

from aliquot.checkpoint.directories import complete_directories
from aliquot.config.read_config import dump_config
from aliquot.config.schema import RunConfig
from aliquot.config.section import refuse
from aliquot.core.errors import NodesDifferError, RunDirectoryError, writing
from aliquot.core.run_lock import BEATING_LOCK, LOCK, RunLock
from aliquot.core.small_files import publish_text, read_small_file
from aliquot.distributed.leader_lease import ROUND, ROUNDS, check_round
from aliquot.distributed.run_secret import SECRET_FILE
from aliquot.machine.facts import mount_of

HEADER = "# The configuration of an aliquot run, complete, as it was run."
_MARKER = ".shown-"  # prefix of the file that shows whether nodes share the run directory
_VISIBLE_S = 15.0  # longest time until a node sees files of another node on a network file system


class RunDirectory:
    """runs/<name>: config.yaml, metrics.jsonl, events.jsonl, ledger.json, report.html, and directories."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = RunLock(path, ROUND in os.environ, lambda: mount_of(path.resolve()).locks_are_local)
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.ledger = path / "ledger.json"
        self.chat_template_date = path / "chat-template-date.txt"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.profile = path / "profile"
        self.tensorboard = path / "tensorboard"
        self.export = path / "export"
        self.reference = path / "reference"
        self.logs = path / "logs"

    def check(self, config: RunConfig) -> None:
        """Raise RunDirectoryError if the run of `config` may not write here."""
        # The launcher makes logs/ before any rank starts. A directory with only logs/ is not a run.
        names = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        names -= {"logs", ROUNDS, LOCK, SECRET_FILE}
        is_used = any(not name.startswith((_MARKER, BEATING_LOCK)) for name in names)
        resume = config.checkpoint.resume
        can_resume = resume != "auto" or config.mirror is not None or any(self.checkpoints.glob("step-*"))
        refuse(
            (
                is_used and not self._is_run(),
                "exists and is not a run of aliquot; choose another run.name or run.directory",
            ),
            (
                is_used and resume == "never",
                "this run exists already and checkpoint.resume is `never`; choose another run.name, or resume: auto",
            ),
            (
                self.export.exists() and not can_resume,
                "this run has ended with its export, and no checkpoint is left to continue from; choose another"
                " run.name",
            ),
            error=lambda problem: RunDirectoryError(problem, self.path),
        )

    def create_marker(self) -> str:
        """On rank 0, create a marker file that all nodes must see in a shared directory, and return its name.

        Every start uses a new name, because a node may have old contents of the directory in its cache. Raises
        StorageError.
        """
        name = f"{_MARKER}{secrets.token_hex(8)}"
        for directory in self._marked_directories():
            with writing(directory):
                for old_marker in directory.glob(f"{_MARKER}*"):  # left by a killed process
                    old_marker.unlink(missing_ok=True)
                (directory / name).touch()
        return name

    def remove_marker(self, name: str) -> None:
        for directory in self._marked_directories():
            with suppress(OSError):
                (directory / name).unlink()

    def find_marker(self, name: str) -> None:
        """Raise NodesDifferError if the marker of rank 0 does not become visible on this node."""
        until = time.monotonic() + _VISIBLE_S
        for directory in self._marked_directories():
            while not (directory / name).exists():
                if time.monotonic() > until:
                    raise NodesDifferError(
                        "this node does not see the files that node 0 writes here, and every node must write its part"
                        " of each checkpoint: set run.directory to a directory on a file system that all nodes share",
                        directory,
                    )
                time.sleep(0.1)

    def _marked_directories(self) -> list[Path]:
        """Return the run directory, and checkpoints/, which may be a link to another file system."""
        return [self.path, *([self.checkpoints] if os.path.lexists(self.checkpoints) else ())]

    def day(self) -> date:
        """Return the day on which the run first started if its chat template writes a date, otherwise today."""
        try:
            return date.fromisoformat(read_small_file(self.chat_template_date, links="none").decode().strip())
        except FileNotFoundError:
            return date.today()
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"holds no date ({error}): write one as 2026-01-31", self.chat_template_date
            ) from None

    def write_day(self, day: str | None) -> None:
        """Store the date that the chat template writes, for later starts of this run. None: it writes no date."""
        if day is not None:
            publish_text(self.chat_template_date, f"{day}\n")

    def _is_run(self) -> bool:
        """Whether the directory is a run: aliquot wrote its config.yaml, or it has a complete checkpoint."""
        with suppress(OSError, ValueError):
            if read_small_file(self.path / "config.yaml", links="none").decode().startswith(HEADER):
                return True
        return bool(complete_directories(self.checkpoints))

    def check_publish(self) -> None:
        """Check that this process may still write. Call on rank 0 before a save or export begins and is published.

        Raises RunDirectoryError if somebody replaced the directory that this process has locked. Raises CutOffError if
        a newer round of an elastic run has begun without this node.
        """
        if (lost := self.lock.why_lost()) is not None:
            raise RunDirectoryError(lost)
        check_round(self.path)

    def begin(self, config: RunConfig) -> None:
        """Create the run directory with the complete config.yaml. Call this after all checks of the run."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            publish_text(self.path / "config.yaml", f"{HEADER}\n{dump_config(config)}")
            self.checkpoints.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
