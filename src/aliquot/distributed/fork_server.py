"""Import the modules that forked ranks share. Only the fork server loads this module, before it forks a rank."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

PID = os.getpid()  # process id of the server; a forked rank keeps this value

for _name in os.environ["ALIQUOT_FORK_SERVER_IMPORTS"].split():  # set by forked_rank.py
    with suppress(Exception):  # a rank repeats a failed import, and reports the error to its log and its launcher
        importlib.import_module(_name)
