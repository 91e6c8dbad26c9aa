"""Start a process for W&B or MLflow that follows the run directory, so that no server can delay a run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aliquot.core.errors import MissingToolError
from aliquot.core.interpreter import python_command
from aliquot.core.small_files import open_unlinked
from aliquot.observe.dashboard_process import LAST_WORDS_S


def check_installed(services: Sequence[str]) -> None:
    """Raise UserError for a client that is not installed."""
    for service in services:
        if service != "tensorboard" and importlib.util.find_spec(service) is None:
            raise MissingToolError(
                f"observe.report_to: {service} is not installed: pip install 'aliquot[{service}]', or leave it out"
            )


class Dashboard:
    """Sends the metrics of the run directory to `service`, including those that an earlier attempt could not send.

    Args:
        warn: receives the complaints of the process; other output of the process is in logs/<service>.txt.
    """

    def __init__(self, service: str, metrics: Path, warn: Callable[[str], None]) -> None:
        self._service = service
        self._warn = warn
        directory = metrics.parent
        (directory / "logs").mkdir(exist_ok=True)
        self._log = directory / "logs" / f"{service}.txt"
        follow = ["-m", "aliquot.observe.dashboard_process", service, str(directory), str(metrics.stat().st_size)]
        with open_unlinked(self._log, "ab") as log:
            # In a new session Ctrl-C in the terminal stops only the run, and this process can send its last metrics.
            self._process = subprocess.Popen(
                python_command(*follow), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        self._complaints = self._process.stdout.fileno()
        os.set_blocking(self._complaints, False)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Read complaints of the process; the process itself reads metrics.jsonl."""
        with suppress(BlockingIOError):
            for line in os.read(self._complaints, 1 << 16).decode(errors="replace").splitlines():
                self._warn(f"{self._service}: {line}; training goes on ({self._log})")

    def close(self) -> None:
        """Wait a limited time until the process has sent the rest."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # signals the end of the run
        try:
            complete = self._process.wait(LAST_WORDS_S + 5.0) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            complete = False
        self.write({})
        if not complete:
            self._warn(f"{self._service} does not have all of this run; metrics.jsonl has ({self._log})")
