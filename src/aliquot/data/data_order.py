"""The order of sequences: within one source, among several sources, and over optimizer steps.

Sources are mixed by fixed arithmetic, without a state or a table. Source i contributes sequences at the rate r_i: its
k-th sequence gets the time (k + 1/2) / r_i. The mixture takes the sequences of all sources in ascending order of time.
After any number of sequences, the count of each source therefore differs from its exact share by about one sequence at
most. Bisection over time finds how many of the first n sequences come from each source. All numbers are integers, so
that the order is the same on every machine.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Self

from aliquot.data.token_store import TokenStore
from aliquot.data.token_stream import TokenStream

_RATE_BITS = 40  # fixed point: the rates of all sources sum to about 2^40
_TIME_BITS = 60


@dataclass(frozen=True)
class Mixture:
    """The order in which the sequences of several sources take turns, by the rates of the sources."""

    rates: tuple[int, ...]  # relative number of sequences that each source contributes, in fixed point
    ends: tuple[int | None, ...]  # number of sequences of each source that does not repeat; None: the source repeats

    @classmethod
    def from_token_weights(
        cls, weights: Sequence[float], sequence_tokens: Sequence[Fraction], ends: Sequence[int | None]
    ) -> Self:
        """Return the mixture in which each source contributes tokens in proportion to its weight.

        `sequence_tokens`: the mean number of tokens in a sequence of each source.
        """
        rates = [Fraction(weight) / mean for weight, mean in zip(weights, sequence_tokens, strict=True)]
        scale = (1 << _RATE_BITS) / sum(rates)
        return cls(tuple(max(1, round(rate * scale)) for rate in rates), tuple(ends))

    @property
    def total(self) -> int | None:
        """The number of sequences until all sources have ended; None if a source repeats."""
        known = [end for end in self.ends if end is not None]
        return sum(known) if len(known) == len(self.ends) else None

    def drawn(self, count: int) -> list[int]:
        """Return how many of the first `count` sequences come from each source. `count` is at most `total`."""
        late = 1
        while sum(self._before(late)) < count:
            late *= 2
        early = 0
        while late - early > 1:
            middle = (early + late) // 2
            early, late = (middle, late) if sum(self._before(middle)) <= count else (early, middle)
        before, until = self._before(early), self._before(late)
        left = count - sum(before)
        for source, (earlier, later) in enumerate(zip(before, until, strict=True)):
            drawn = min(left, later - earlier)  # sequences of equal time come in the order of the sources
            before[source] += drawn
            left -= drawn
        return before

    def between(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return (source, index within the source) of sequences [first, stop) of the mixture."""
        ranges = zip(self.drawn(first), self.drawn(stop), strict=True)
        times = [
            (((2 * k + 1) << _TIME_BITS) // self.rates[source], source, k)
            for source, (a, b) in enumerate(ranges)
            for k in range(a, b)
        ]
        return [(source, k) for _, source, k in sorted(times)]

    def _before(self, time: int) -> list[int]:
        """Return how many sequences of each source have a time before `time`."""
        counts = [(((time * rate - 1) >> _TIME_BITS) + 1) // 2 for rate in self.rates]
        return [count if end is None else min(count, end) for count, end in zip(counts, self.ends, strict=True)]


@dataclass(frozen=True)
class TrainStore:
    """The tokens of one training source, with its weight in the mixture."""

    store: TokenStore
    name: str = ""
    weight: float | None = None  # relative share of the tokens; None: the number of tokens in the source
    repeat: bool = True
    stream: TokenStream | None = None  # if the source is tokenised during training; `store` is then its first segment

    @property
    def digest(self) -> str:
        """Hash of the tokens and of their order in the store."""
        return (self.store.path if self.stream is None else self.stream.directory).name


def drawn_seed(kind: str, seed: int, place: object) -> int:
    """Derive a seed from the run's seed for one `kind` of random choices (such as dropout) at one `place`."""
    return int.from_bytes(hashlib.sha256(f"{kind}:{seed}:{place}".encode()).digest()[:7], "little")


@dataclass(frozen=True)
class Steps:
    """Map optimizer steps to ranges of sequences.

    Without `ends` and `stop`, step s takes sequences [s * size, (s + 1) * size). The last step before `stop` may take
    fewer sequences. The last step of an earlier stage of the run may also have taken fewer sequences. `ends` lists the
    sequence numbers at which these stages ended; the first step of the next stage begins there.
    """

    size: int
    stop: int | None = None  # sequence number at which this run ends, exclusive
    ends: tuple[int, ...] = ()  # ascending

    def of(self, step: int) -> range:
        """Return the sequences of `step`, counted from 0; an empty range after the last step."""
        first = self.begin(step)
        later = self.ends[bisect_right(self.ends, first) :][:1]
        limits = [*later, *([] if self.stop is None else [self.stop])]
        return range(first, max(first, min([first + self.size, *limits])))

    def begin(self, step: int) -> int:
        """Return the number of the first sequence of `step`, without regard to `stop`."""
        begin = 0
        for end in self.ends:
            steps = self._steps(begin, end)
            if step < steps:
                break
            step -= steps
            begin = end
        return begin + step * self.size

    def until(self, sequence: int) -> int:
        """Return the number of steps that take all sequences before `sequence`."""
        edges = [0, *(end for end in self.ends if end < sequence), sequence]
        return sum(self._steps(begin, end) for begin, end in pairwise(edges))

    def continued_at(self, step: int, sequence: int) -> Self:
        """Return the steps of a run that continues an earlier stage.

        The earlier stage ended after `step` steps, before `sequence`. Raises ValueError if these two contradict.
        """
        regular = self.begin(step)
        if sequence == regular:
            return self
        if step == 0 or not self.begin(step - 1) < sequence < regular:
            raise ValueError(f"{step} steps do not end at sequence {sequence}")
        return replace(self, ends=(*self.ends, sequence))

    def _steps(self, begin: int, end: int) -> int:
        return -(-(end - begin) // self.size)
