"""Which ranks of a run that hangs stand still, by the stacks that all have written down: the others wait for them."""

from __future__ import annotations

import re
from pathlib import Path

from aliquot.distributed.bounded_call import within_a_moment

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$')
_NUMBER = re.compile(r"(\d+)\.txt$")
_TOGETHER_S = 60.0
_WAITS = re.compile(  # for other ranks, in `file function`
    r"torch/distributed/|aliquot/distributed/(?:collectives/|ranks\.py) "
    r"|engines/host/(?:weight_publication\.py need|gradient_exchange\.py _left)$"
)


def told_standing_still(own: Path, world_size: int) -> str:
    """Words that follow what a message says, and name the ranks that are not in a collective, if others are; of files
    that cannot be read in a moment, nothing.

    `own`: this rank's stacks; beside it lie those of the others, and those that an earlier attempt of more ranks has
    left.
    """
    told: list[str] = []
    within_a_moment(lambda: told.append(_told(own, world_size)))
    return told[0] if told else ""


def _told(own: Path, world_size: int) -> str:
    stuck = standing_still(own, world_size)
    if not stuck and (silent := _silent(own, world_size)):
        return f"; nothing is heard of rank {', '.join(map(str, silent))}: stopped, or on a host that does not answer"
    told = ", ".join(f"rank {rank} stands still at {place}" for rank, place in stuck.items())
    return f"; {told}{', and the others wait for it' * (len(stuck) == 1)}" if stuck else ""


def _silent(own: Path, world_size: int) -> list[int]:
    """Ranks that have written nothing."""
    return [rank for rank, file in _of_ranks(own, world_size).items() if file != own and file.stat().st_size == 0]


def _of_ranks(own: Path, world_size: int) -> dict[int, Path]:
    """Their files, by rank: which of them are of an earlier attempt no clock needs to tell."""
    found = {
        int(number[1]): file for file in own.parent.glob(of_all_ranks(own)) if (number := _NUMBER.search(file.name))
    }
    return {rank: file for rank, file in sorted(found.items()) if rank < world_size}


def of_all_ranks(own: Path) -> str:
    """The pattern of the files' names, beside `own`."""
    return _NUMBER.sub("*.txt", own.name)


def standing_still(own: Path, world_size: int) -> dict[int, str]:
    """Of ranks that are not in a collective, where each is: `file:line in function`. Empty: no rank or all of them."""
    found = {}
    written = own.stat().st_mtime
    beside = _of_ranks(own, world_size).items()
    files = {rank: file for rank, file in beside if abs(file.stat().st_mtime - written) < _TOGETHER_S}
    for rank, file in files.items():
        frames = _main_thread(file.read_text(errors="replace"))
        if frames and not any(_WAITS.search(f"{frame['file']} {frame['name']}") for frame in frames):
            name = Path(frames[0]["file"]).name
            found[rank] = f"{name}:{frames[0]['line']} in {frames[0]['name']}"
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
