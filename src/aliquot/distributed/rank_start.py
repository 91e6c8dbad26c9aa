"""What runs first in a rank that our launcher started: tie its life to the launcher, give it its log, become the rank.

`python -m aliquot.distributed.rank_process LAUNCHER_PID LOG_DIRECTORY ARGUMENT...` becomes `python ARGUMENT...`:
the death signal, the redirected streams and the process id stay.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aliquot.core.interpreter import become_python
from aliquot.distributed.rank_process import end_with_parent, open_log, rank_environment


def main() -> None:
    launcher, directory, arguments = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    end_with_parent()
    if os.getppid() != launcher:  # it died before the line above
        sys.exit(1)
    open_log(directory, int(os.environ["RANK"]))
    become_python(arguments, rank_environment(os.environ, directory))


if __name__ == "__main__":
    main()
