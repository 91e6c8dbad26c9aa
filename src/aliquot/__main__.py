"""The `aliquot` command, also as `python -m aliquot`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Ctrl-C is one line from the first import on."""
    try:
        from aliquot.cli.main import run

        run()
    except KeyboardInterrupt:
        print("aliquot: stopped by SIGINT", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
