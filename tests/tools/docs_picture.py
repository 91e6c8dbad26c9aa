"""The picture of README.md: the console of a real run, from its first line to its last, as SVG.

python -m tests.tools.docs_picture
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.tools.docs_pages import ROOT

PICTURE = ROOT / "docs" / "pictures" / "console.svg"
COMMAND = ("train", "examples/quickstart.yaml", "observe.sample_prompt=null")
_COLUMNS = 116
_STEP = re.compile(r"step [\d,]+/")
_HEADER, _SHOWN_STEPS = 3, 2  # lines at the beginning; lines of steps at the beginning and at the end
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono'"


def main() -> None:
    PICTURE.write_text(svg(shortened(output())))


def output() -> list[str]:
    """Run the command and return the lines that it prints."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-m", "aliquot", *COMMAND, f"run.directory={directory}/run"],
            cwd=ROOT,
            env={**os.environ, "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return [line.replace(f"{directory}/run", "runs/quickstart") for line in done.stdout.splitlines()]


def shortened(lines: Sequence[str]) -> list[str]:
    """Replace the rest of the header and the steps in the middle of the run by `...`."""
    steps = [number for number, line in enumerate(lines) if _STEP.match(line)]
    first, last = slice(steps[0], steps[_SHOWN_STEPS]), slice(steps[-_SHOWN_STEPS], None)
    return [*lines[:_HEADER], "...", *lines[first], "...", *lines[last]]


def svg(lines: Sequence[str]) -> str:
    """Draw the lines as a terminal. The picture has its own background, and loads no font."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=_COLUMNS, file=nowhere, highlight=False)
        console.print(Text(f"$ aliquot {' '.join(COMMAND)}", style="bold green"))
        for line in lines:
            console.print(Text(line))
    picture = console.export_svg(title="aliquot", unique_id="console")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL).replace("Fira Code", _FONT)


if __name__ == "__main__":
    main()
