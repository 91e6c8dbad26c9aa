"""The server behind tests/tools/warm.py: it has imported what a command imports, and forks a process for each request.

    python -m tests.tools.warm_server SOCKET      SOCKET: an inherited file descriptor

Nothing here computes: a thread of OpenMP would not live on in what is forked.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import multiprocessing.util
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.tools.warm import ForkedPopen

REQUEST_BYTES = 1 << 20
NO_DIRECTORY = Path("/proc/self/fdinfo/none")  # what a path has in front for `-P`
RESTARTS = "ALIQUOT_ALLOCATOR"  # a process that is not restarted for another allocator; see machine/allocator.py
IMPORTED = (
    "datasets", "peft.tuners.lora", "pytest", "safetensors.torch", "tensorboard.compat.proto.summary_pb2",
    "torch.distributed.fsdp", "torch.distributed.launcher.api", "torch.profiler", "torch.testing",
    "transformers", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama",
)  # fmt: skip


def main() -> None:
    gc.disable()  # nothing that an import makes is garbage
    import aliquot

    for found in pkgutil.walk_packages(aliquot.__path__, "aliquot."):
        if found.name not in ("aliquot.__main__", "aliquot.distributed.fork_server"):  # importing them acts
            importlib.import_module(found.name)
    for name in IMPORTED:
        importlib.import_module(name)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = _forked_rank  # type: ignore[method-assign, assignment]
    os.execve = _execve
    multiprocessing.util.spawnv_passfds = _forked_spawn  # type: ignore[assignment]
    gc.freeze()  # else each process would write to all that it shares with this one
    gc.enable()
    asked = socket.socket(fileno=int(sys.argv[1]))
    while True:
        text, streams, _, _ = socket.recv_fds(asked, REQUEST_BYTES, 3)
        if not text:  # the tests are at their end
            return
        request = json.loads(text)
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                # The child becomes one of the process that asked: see warm.Warm.
                asked.send(str(child).encode())
                os._exit(0)
            start(request["arguments"], request["environ"], request["directory"], streams, request["session"])
        os.waitpid(between, 0)
        asked.send(b"done")
        for stream in streams:
            os.close(stream)


def start(
    arguments: list[str], environ: dict[str, str], directory: str | None, streams: list[int], session: bool
) -> NoReturn:
    """As what `python ARGUMENTS` is started with: streams, signals, session, directory, no other open files."""
    try:
        if session:
            os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for target, stream in enumerate([os.dup(stream) for stream in streams]):
            os.dup2(stream, target)
        os.closerange(3, max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + 1)
        if directory is not None:
            os.chdir(directory)
        become(arguments, environ)
    finally:
        os._exit(70)


def become(arguments: list[str], environ: dict[str, str]) -> NoReturn:
    """Does in this process what `python ARGUMENTS` would do, and ends it."""
    import torch

    environ = {RESTARTS: "glibc", **environ}
    os.environ.clear()
    os.environ.update(environ)
    for stream in (sys.stdout, sys.stderr):
        lines = stream is sys.stderr or stream.isatty()
        stream.reconfigure(line_buffering=lines, write_through="PYTHONUNBUFFERED" in environ)  # type: ignore[union-attr]
    if "PYTHONFAULTHANDLER" in environ:
        faulthandler.enable()
    if environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    if "OMP_NUM_THREADS" in environ:  # which OpenMP has read long ago
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    code = 0
    try:
        _interpret(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for what the interpreter would wait for
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code & 0xFF)


def _interpret(arguments: list[str]) -> None:
    sys.orig_argv = [sys.executable, *arguments]
    match arguments:
        case ["-u", *rest]:  # as torchrun starts its ranks
            _interpret(rest)
        case ["-P", "-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path[0] = str(NO_DIRECTORY)
            sys.modules.pop(module, None)  # a fresh interpreter has not imported it, and runpy warns if it is there
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-P", *rest]:
            _interpret(rest)
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", program, *rest]:
            sys.argv = ["-c", *rest]
            sys.path[0] = ""
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        case [script, *rest]:
            sys.argv = [script, *rest]
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")


def _fork() -> int:
    """From Python 3.12 on, a fork in a process with threads warns on stderr, which tests compare."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*use of fork\(\)", DeprecationWarning)
        return os.fork()


class Forked(ForkedPopen):
    """A child of this process that is a fork of it."""

    def fork(self, asked: Mapping[str, Any], streams: list[int]) -> int:
        pid = _fork()
        if pid == 0:
            start(list(asked["args"][1:]), dict(asked["env"]), asked["cwd"], streams, asked["start_new_session"])
        return pid


def _forked_rank(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
    """SubprocessHandler._popen of the elastic launcher: the rank is a child of the launcher, as ever."""
    kind = Forked if args[0] == sys.executable else subprocess.Popen
    return kind(args, env=env, stdout=handler._stdout, stderr=handler._stderr, start_new_session=True)


def _forked_spawn(path: Any, args: list[Any], passfds: list[int]) -> int:
    """multiprocessing.util.spawnv_passfds: its fork server is a fork, too."""
    pid = os.fork()
    if pid == 0:
        try:
            highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
            for number in {*range(3, highest + 1)} - {*passfds}:
                with contextlib.suppress(OSError):
                    os.close(number)
            become(args[args.index("-c") :], dict(os.environ))
        finally:
            os._exit(70)
    return pid


_exec = os.execve


def _execve(path: Any, argv: Any, env: Any) -> NoReturn:
    if path == sys.executable:
        sys.stdout.flush()
        sys.stderr.flush()
        become(list(argv[1:]), dict(env))
    _exec(path, argv, env)


if __name__ == "__main__":
    main()
