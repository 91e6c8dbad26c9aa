"""Training runs one after another in one process, because a CUDA context, imports and compiled kernels take seconds.

    python -m tests.gpu.run_server      reads the path of a config per line, and answers with a line of JSON

`trained` asks the server of this test process, and starts it if there is none. A run that ends the server fails alone.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

from tests.tools.warm import REPOSITORY

TIMEOUT_S = 150  # less than benchmarks/gpu_all.py gives all tests, so that a hanging run is named


class RunServer:
    """A process that trains configs."""

    def __init__(self) -> None:
        self._log = os.memfd_create("runs")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.run_server"],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        atexit.register(self._process.kill)

    def train(self, config: Path) -> str | None:
        """Train, and return what the run said if it failed."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        asked.write(f"{config}\n".encode())
        asked.flush()
        ready, _, _ = select.select([answers], [], [], TIMEOUT_S)
        answer = answers.readline() if ready else b""
        if answer and json.loads(answer) is None:
            return None
        if not answer:
            self._process.kill()
            _server.cache_clear()
        how = json.loads(answer) if answer else f"the process ended, or took {TIMEOUT_S} s"
        return f"{how}\n{os.pread(self._log, 1 << 20, 0).decode(errors='replace')[-4000:]}"


@cache
def _server() -> RunServer:
    return RunServer()


def trained(config: Path) -> None:
    """Train `config` in the server of this process, or fail with what the run said."""
    failure = _server().train(config)
    assert failure is None, failure


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what runs print goes to the log
    import aliquot

    for line in sys.stdin:
        failure = None
        try:
            aliquot.train(aliquot.read_config(Path(line.strip())))
        except BaseException:  # whatever ends a run
            failure = traceback.format_exc()
        print(json.dumps(failure), file=answers, flush=True)


if __name__ == "__main__":
    serve()
