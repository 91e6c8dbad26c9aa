"""Run work on rank 0 or on all ranks, and raise an error of one rank on every rank.

No rank then waits for a rank that has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from aliquot.core.errors import TrainingError, UserError, storage_error, user_error_types

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


class RankGroup(Protocol):
    """The ranks of a run, as this module and storage use them: through these collectives."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """Send a JSON value to all ranks and return the values of all ranks, in rank order."""
        ...

    def combine(self, values: npt.NDArray[np.int64], operation: Literal["sum", "xor"]) -> npt.NDArray[np.int64]:
        """Return the element-wise sum or exclusive-or of the arrays of all ranks, which have equal shapes."""
        ...


class SingleRank:
    """The rank group of a run with a single process."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def combine(self, values: npt.NDArray[np.int64], operation: Literal["sum", "xor"]) -> npt.NDArray[np.int64]:
        return values


def gather_results(ranks: RankGroup, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return the results of all ranks, which are JSON values, on every rank. Collective.

    If ranks fail, every rank raises the UserError of the first failed rank, or a TrainingError if that rank's exception
    is no UserError. The message names the rank unless all ranks raised the same error. A rank whose own exception is no
    UserError raises that exception instead.
    """
    return _run(ranks, work, names_rank=True)


def run_on_all_ranks(ranks: RankGroup, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's result. Collective; raises as `gather_results` does."""
    results: list[T] = []
    gather_results(ranks, lambda: results.append(work()))
    return results[0]


def run_on_rank_0(ranks: RankGroup, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only and return its result, a JSON value, on every rank. Collective."""
    return _run(ranks, lambda: work() if ranks.rank == 0 else None, names_rank=False)[0]  # type: ignore[return-value]


def _run(ranks: RankGroup, work: Callable[[], T], names_rank: bool) -> list[T]:
    failure: Exception | None = None
    result: list[Any] = []
    try:
        result = [work()]
    except OSError as error:
        failure = storage_error(error.strerror or str(error), error, error.filename)
    except Exception as error:
        failure = error
    name = type(failure).__name__ if failure is not None else None
    replies = ranks.gather({"result": result, "error_type": name, "error": str(failure)})
    failed = [(rank, reply) for rank, reply in enumerate(replies) if reply["error_type"] is not None]
    if not failed:
        return [reply["result"][0] for reply in replies]
    if failure is not None and not isinstance(failure, UserError):
        raise failure
    rank, first = failed[0]
    where = f"rank {rank}: " if names_rank and any(reply["error"] != first["error"] for reply in replies) else ""
    raise error_of(first["error_type"], first["error"], where) from failure


def error_of(name: str, text: str, where: str = "") -> UserError:
    """Return the UserError of a rank, from the name of its type and its text; a TrainingError for other exceptions."""
    types = {error_type.__name__: error_type for error_type in user_error_types()}
    return types[name](where + text) if name in types else TrainingError(f"{where}{name}: {text}")
