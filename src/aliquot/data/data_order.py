"""The order of sequences: within one source, among several sources, and over optimizer steps.

Sources are mixed by fixed arithmetic, without a state or a table. Source i with rate r_i, in sequences, has its k-th
sequence at time (k + 1/2) / r_i, and the sequences of all sources follow each other in the order of their times. After
any number of sequences each source has therefore had its share to within about one sequence, and bisection finds how
many sequences of each source come before the n-th. All numbers are integers: the order is the same on every machine.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from aliquot.data.layout import Pieces
from aliquot.data.packing import Epoch, Packing
from aliquot.data.token_store import TokenStore

_RATE_BITS = 40  # a rate of 1 is 2^40
_TIME_BITS = 60


@dataclass(frozen=True)
class Mixture:
    rates: tuple[int, ...]  # sequences of each source, relative to the others'
    ends: tuple[int | None, ...]  # after so many sequences a source has no more

    @classmethod
    def from_token_weights(
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


@dataclass(frozen=True)
class TrainStore:
    """A source of a run."""

    store: TokenStore
    name: str = ""
    weight: float | None = None  # of its tokens; None: as many as it has
    repeat: bool = True


class Stream:
    """The sequences of epoch 0 of one source, then of epoch 1 shuffled anew, and so on."""

    def __init__(self, source: TrainStore, packing: Packing, seed: int) -> None:
        self.source = source
        self.packing = packing
        # Sources of equal size would be shuffled alike, and one that is named twice would be seen twice at a time.
        self._seed = seed if not source.name else drawn_seed("source", seed, source.name)
        self._epochs: dict[int, Epoch] = {}

    @cached_property
    def epoch_tokens(self) -> int:
        return int(self.packing.tokens.sum())

    @property
    def sequence_tokens(self) -> Fraction:
        """On average."""
        return Fraction(self.epoch_tokens, self.packing.sequences)

    def sequence(self, index: int) -> Pieces:
        epoch, within = divmod(index, self.packing.sequences)
        return self.epoch(epoch).sequence(within)

    def lengths(self, index: int) -> npt.NDArray[np.int32]:
        epoch, within = divmod(index, self.packing.sequences)
        return self.epoch(epoch).lengths(within)

    def counts(self, first: int, stop: int) -> tuple[int, int]:
        """(labels, real tokens) of the sequences [first, stop)."""
        predicted = tokens = 0
        while first < stop:
            epoch, start = divmod(first, self.packing.sequences)
            end = min(self.packing.sequences, start + stop - first)
            predicted += int(self.epoch(epoch).predicted[start:end].sum())
            tokens += int(self.epoch(epoch).tokens[start:end].sum())
            first += end - start
        return predicted, tokens

    def epoch(self, epoch: int) -> Epoch:
        if epoch not in self._epochs:
            # A batch that straddles two epochs needs both.
            self._epochs = {kept: self._epochs[kept] for kept in self._epochs if kept == epoch - 1}
            self._epochs[epoch] = self.packing.epoch(self._seed, epoch)
        return self._epochs[epoch]


def drawn_seed(kind: str, seed: int, place: object) -> int:
    """What `kind` is drawn from at `place`."""
    return int.from_bytes(hashlib.sha256(f"{kind}:{seed}:{place}".encode()).digest()[:7], "little")


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

    def continued_at(self, step: int, sequence: int) -> Self:
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
