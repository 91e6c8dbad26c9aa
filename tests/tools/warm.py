"""`python ARGUMENTS` as a process of its own, without the five seconds that importing torch and transformers takes.

A server (tests/tools/warm_server.py) has imported them and forks. What it forks has its own process id, streams,
environment, directory and exit code, is a child of the test that asked, and starts ranks through the same launcher;
those are forked, too. What it does not have: a command line and an environment in /proc, an allocator of LD_PRELOAD,
and what imports print or fail with. A few tests of each kind start real interpreters for that: `run(..., cold=True)`.

The fork server of multiprocessing cannot serve: what it forks is its own child, with its own streams and environment,
so that each test's `Popen` (wait, communicate, exit code, signals to its group) would have to be written anew.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_PR_SET_CHILD_SUBREAPER = 36


@functools.cache
def _server() -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # -P: as `aliquot` restarts itself
    command = [sys.executable, "-P", "-m", "tests.tools.warm_server", str(its.fileno())]
    # The sources beside these tests, even if another copy of them is installed: tests.tools.planted changes a copy.
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH"))))
    # As our launcher sets it for its ranks: it counts only when torch is imported, which is in the server.
    environ = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": paths}
    server = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()], env=environ)
    its.close()

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


class ForkedPopen(subprocess.Popen[str]):
    """A process that `fork` makes, where Popen would start an interpreter; all else of Popen stays as it is."""

    def fork(self, asked: Mapping[str, Any], streams: list[int]) -> int:
        """Fork a process with these three streams and Popen's arguments, and return its id."""
        raise NotImplementedError

    def _execute_child(self, *arguments: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        pipes = [asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        streams = [number if own == -1 else own for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = self.fork(asked, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Warm(ForkedPopen):
    """`subprocess.Popen([sys.executable, *arguments])`, forked by the server."""

    def fork(self, asked: Mapping[str, Any], streams: list[int]) -> int:
        request = {
            "arguments": list(asked["args"]), "environ": dict(os.environ if asked["env"] is None else asked["env"]),
            "directory": str(asked["cwd"] or Path.cwd()), "session": asked["start_new_session"],
        }  # fmt: skip
        server = _server()
        # The process between the server and the new one ends. Orphans are ours meanwhile, so the new one becomes ours.
        adopt_orphans(True)
        try:
            socket.send_fds(server, [json.dumps(request).encode()], streams)
            pid = int(server.recv(64))
            if server.recv(64) != b"done":
                raise RuntimeError("the warm server has ended")
        finally:
            adopt_orphans(False)
        return pid


def adopt_orphans(adopt: bool) -> None:
    """Whether a descendant whose parent ends becomes a child of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def popen(*arguments: str | Path | int, cold: bool = False, **options: Any) -> subprocess.Popen[str]:
    """`python ARGUMENTS`; options of Popen: env, cwd, streams, start_new_session. `cold`: a real interpreter."""
    words = list(map(str, arguments))
    return (
        subprocess.Popen([sys.executable, *words], text=True, **options) if cold else Warm(words, text=True, **options)
    )


def run(
    *arguments: str | Path,
    cold: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 240,
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` to its end, with what it printed."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen(*arguments, cold=cold, env=env, cwd=cwd, **pipes) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)
