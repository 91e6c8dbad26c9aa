"""In which order the sequences of several sources follow each other: a fixed arithmetic, without a state or a table.

Source i with rate r_i, in sequences, has its k-th sequence at time (k + 1/2) / r_i, and the sequences of all come in
the order of their times. So after any number of sequences each source has had its share to within about one, and how
many of each come before the n-th is found by bisection. All numbers are integers: the order is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

_RATE_BITS = 40  # a rate of 1 is 2^40
_TIME_BITS = 60


@dataclass(frozen=True)
class Mixture:
    rates: tuple[int, ...]  # sequences of each source, relative to the others'
    ends: tuple[int | None, ...]  # after so many sequences a source has no more

    @classmethod
    def of_tokens(
        cls, weights: Sequence[float], sequence_tokens: Sequence[Fraction], ends: Sequence[int | None]
    ) -> Self:
        """`weights` are of tokens; `sequence_tokens`: how many a sequence of each source has on average."""
        rates = [Fraction(weight) / mean for weight, mean in zip(weights, sequence_tokens, strict=True)]
        scale = (1 << _RATE_BITS) / sum(rates)
        return cls(tuple(max(1, round(rate * scale)) for rate in rates), tuple(ends))

    @property
    def total(self) -> int | None:
        """Sequences until all sources have ended; None: never."""
        known = [end for end in self.ends if end is not None]
        return sum(known) if len(known) == len(self.ends) else None

    def drawn(self, count: int) -> list[int]:
        """How many sequences of each source are among the first `count`, which must not be more than there are."""
        if len(self.rates) == 1:
            return [count]
        late = 1
        while sum(self._before(late)) < count:
            late *= 2
        early = 0
        while late - early > 1:
            middle = (early + late) // 2
            early, late = (middle, late) if sum(self._before(middle)) <= count else (early, middle)
        before, until = self._before(early), self._before(late)
        left = count - sum(before)
        for source, (some, more) in enumerate(zip(before, until, strict=True)):
            taken = min(left, more - some)  # at one time, in the order of the sources
            before[source] += taken
            left -= taken
        return before

    def between(self, first: int, stop: int) -> list[tuple[int, int]]:
        """(source, which of its sequences) of the sequences [first, stop)."""
        ranges = zip(self.drawn(first), self.drawn(stop), strict=True)
        found = [(self._time(source, k), source, k) for source, (a, b) in enumerate(ranges) for k in range(a, b)]
        return [(source, k) for _, source, k in sorted(found)]

    def _time(self, source: int, sequence: int) -> int:
        return ((2 * sequence + 1) << _TIME_BITS) // self.rates[source]

    def _before(self, time: int) -> list[int]:
        """Sequences of each source whose time is before `time`."""
        counts = [(((time * rate - 1) >> _TIME_BITS) + 1) // 2 for rate in self.rates]
        return [count if end is None else min(count, end) for count, end in zip(counts, self.ends, strict=True)]
