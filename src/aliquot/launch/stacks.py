"""Which ranks of a run that hangs stand still, by the stacks that all have written down: the others wait for them."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from aliquot.launch.moments import within_a_moment

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$')
_TOGETHER_S = 60.0
_WAITS = re.compile(  # for other ranks, in `file function`
    r"torch/distributed/|aliquot/collectives/|aliquot/launch/ranks\.py "
    r"|engines/host/late_update\.py need|engines/host/publication\.py need|engines/host/gradient_exchange\.py _left$"
)


def told_standing_still(own: Path) -> str:
    """Words that follow what a message says, and name the ranks that are not in a collective, if others are; of files
    that cannot be read in a moment, nothing.

    `own`: this rank's stacks; beside it lie those of the others, and those that an earlier attempt has left.
    """
    told: list[str] = []
    within_a_moment(lambda: told.append(_told(own)))
    return told[0] if told else ""


def _told(own: Path) -> str:
    stuck = standing_still(own)
    if not stuck and (silent := _silent(own)):
        return f"; nothing is heard of rank {', '.join(map(str, silent))}: stopped, or on a host that does not answer"
    told = ", ".join(f"rank {rank} stands still at {place}" for rank, place in stuck.items())
    return f"; {told}{', and the others wait for it' * (len(stuck) == 1)}" if stuck else ""


def _silent(own: Path) -> list[int]:
    """Ranks of this attempt that have written nothing."""
    began = psutil.Process().create_time()
    files = [file for file in own.parent.glob(of_all_ranks(own)) if file != own and file.stat().st_mtime >= began]
    return sorted(int(file.stem.rpartition("-")[2]) for file in files if file.stat().st_size == 0)


def of_all_ranks(own: Path) -> str:
    """The pattern of the files' names, beside `own`."""
    return re.sub(r"\d+\.txt$", "*.txt", own.name)


def standing_still(own: Path) -> dict[int, str]:
    """Of ranks that are not in a collective, where each is: `file:line in function`. Empty: no rank or all of them."""
    found = {}
    written = own.stat().st_mtime
    beside = sorted(own.parent.glob(of_all_ranks(own)))
    files = [file for file in beside if abs(file.stat().st_mtime - written) < _TOGETHER_S]
    for file in files:
        rank = re.search(r"(\d+)\.txt$", file.name)
        frames = _main_thread(file.read_text(errors="replace"))
        if (
            rank is not None
            and frames
            and not any(_WAITS.search(f"{frame['file']} {frame['name']}") for frame in frames)
        ):
            name = Path(frames[0]["file"]).name
            found[int(rank[1])] = f"{name}:{frames[0]['line']} in {frames[0]['name']}"
    return found if len(found) < len(files) else {}


def _main_thread(text: str) -> list[re.Match[str]]:
    """The frames of the thread that faulthandler writes last, from the innermost to the script."""
    last = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]
    frames: list[re.Match[str]] = []
    for line in last.splitlines():
        if (frame := _FRAME.match(line)) is not None:
            frames.append(frame)
            if frame["name"] == "<module>":  # what started the script may wait in torch for something else
                break
    return frames
