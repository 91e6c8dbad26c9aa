"""Imported in the process that ranks are forked from, before it forks, and nowhere else: what it imports for them."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

PID = os.getpid()  # of the server, in all that it forks

for _name in os.environ["ALIQUOT_FORK_SERVER_IMPORTS"].split():  # see forked_rank.py
    with suppress(Exception):  # a rank meets it again, and says so: it has a log and a launcher that listens
        importlib.import_module(_name)
