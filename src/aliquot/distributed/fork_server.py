"""Preloaded by the fork server only: import the modules that its ranks share, before it forks."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

PID = os.getpid()  # of the server, also in forked ranks

for _name in os.environ["ALIQUOT_FORK_SERVER_IMPORTS"].split():  # see forked_rank.py
    with suppress(Exception):  # a rank will raise the error again, and has a log and a launcher for it
        importlib.import_module(_name)
