"""Which sequences of the endless stream, epoch after epoch, each optimizer step takes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self


@dataclass(frozen=True)
class Steps:
    """`size` sequences a step, one step after the other. The last step before `stop` takes what is left.

    So did the last one of an earlier stage of the run, which ended within a batch: `ends` are those sequences, and the
    next step begins there. Without, and without `stop`, step s takes [s * size, (s + 1) * size).
    """

    size: int
    stop: int | None = None  # the sequence before which this run ends
    ends: tuple[int, ...] = ()  # rising

    def of(self, step: int) -> range:
        """The sequences of `step` (the first is 0); none behind the last one."""
        first = self.begin(step)
        later = self.ends[bisect_right(self.ends, first) :][:1]
        limits = [*later, *([] if self.stop is None else [self.stop])]
        return range(first, max(first, min([first + self.size, *limits])))

    def begin(self, step: int) -> int:
        """The sequence that `step` would begin with if the run did not end."""
        begin = 0
        for end in self.ends:
            steps = self._steps(begin, end)
            if step < steps:
                break
            step -= steps
            begin = end
        return begin + step * self.size

    def until(self, sequence: int) -> int:
        """Steps that it takes to reach `sequence`."""
        edges = [0, *(end for end in self.ends if end < sequence), sequence]
        return sum(self._steps(begin, end) for begin, end in pairwise(edges))

    def going_on(self, step: int, sequence: int) -> Self:
        """With the end of an earlier stage, which ended before `sequence` after `step` steps.

        Raises ValueError where it cannot have done so.
        """
        regular = self.begin(step)
        if sequence == regular:
            return self
        if step == 0 or not self.begin(step - 1) < sequence < regular:
            raise ValueError(f"{step} steps do not end at sequence {sequence}")
        return replace(self, ends=(*self.ends, sequence))

    def _steps(self, begin: int, end: int) -> int:
        return -(-(end - begin) // self.size)
