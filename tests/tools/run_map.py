"""Count what a run of one rank and three steps enters: `python -m tests.tools.run_map`.

It prints the functions and files of aliquot, in all, for each package, and those that only the plan or only the report
enters.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType

import aliquot
from aliquot.cli.main import app
from tests import runs

SOURCE = f"{Path(aliquot.__file__).parent}/"
PARTS = {"planner/": "plan", "observe/report/": "report"}

Function = tuple[str, str]  # file below src/aliquot, qualified name


def part_of(frame: FrameType | None) -> str:
    """Return the part of the run on whose behalf a frame runs: that of the nearest caller in a folder of PARTS."""
    while frame is not None:
        file = frame.f_code.co_filename.removeprefix(SOURCE)
        for folder, part in PARTS.items():
            if file.startswith(folder):
                return part
        frame = frame.f_back
    return "run"


def entered(arguments: list[str]) -> dict[Function, set[str]]:
    """Run `aliquot ARGUMENTS` in this process; return the functions that it enters, with the parts that enter them."""
    parts: dict[Function, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and is_function and code.co_filename.startswith(SOURCE):
            parts[code.co_filename.removeprefix(SOURCE), code.co_qualname].add(part_of(frame))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        app(arguments, standalone_mode=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return parts


def counted(functions: list[Function]) -> str:
    return f"{len(functions):,} functions in {len({file for file, _ in functions})} files"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = runs.write_config(Path(folder), train={"max_steps": 3}, launch={"ranks": 1})
        parts = entered(["train", str(config)])
    print(f"a run of one rank and three steps enters {counted(list(parts))}")
    for part in PARTS.values():
        print(f"only the {part}: {counted([function for function, by in parts.items() if by == {part}])}")
    for package, count in Counter(file.split("/")[0] for file, _ in parts).most_common():
        print(f"{count:6,} {package}")


if __name__ == "__main__":
    main()
