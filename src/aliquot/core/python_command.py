"""Start Python interpreters that import nothing from the working directory, which may contain untrusted files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter with `arguments`.

    `-P` keeps the working directory out of `sys.path`, where `-m` and `-c` would otherwise put it first. Interpreters
    that `multiprocessing` starts from this interpreter inherit the flag.
    """
    return [sys.executable, "-P", *arguments]


def become_python(arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by `python_command(*arguments)` with the environment `environ`; the process id stays."""
    os.execve(sys.executable, python_command(*arguments), environ)
