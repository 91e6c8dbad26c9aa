"""Errors that are for the person, not for the programmer. The one module that every other may import."""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """Bad input: shown as one line without a traceback; the process exits with code 2.

    `message` says what is wrong and what to do; `where` (a file, or file:line) is put in front of it.
    """

    exit_code = 2

    def __init__(self, message: str, where: str | Path | None = None) -> None:
        super().__init__(f"{where}: {message}" if where is not None else message)


class TrainingError(UserError):
    """A run that was well formed had to stop: non-finite loss, a lost or hung rank. One line; exits with code 1."""

    exit_code = 1
