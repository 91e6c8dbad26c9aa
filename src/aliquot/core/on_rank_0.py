"""Do something on every rank such that an error on any is raised on all: nobody waits for a rank that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from aliquot.core.errors import TrainingError, UserError, kinds, storage_error

T = TypeVar("T")


class RankGroup(Protocol):
    """The ranks of a run, as far as storage needs them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank gives a JSON value and gets the values of all, in rank order."""
        ...


class Alone:
    """One process that is all the ranks there are."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


def together(ranks: RankGroup, work: Callable[[], T]) -> list[T]:
    """Run `work` on this rank and return what it returned, a JSON value, on every rank. Collective.

    Raises on all ranks the UserError of the first rank whose `work` raised one, which it names unless all raised the
    same; any other exception is raised as it is where it occurred and as a TrainingError on the other ranks.
    """
    return _together(ranks, work, name_rank=True)


def on_each(ranks: RankGroup, work: Callable[[], T]) -> T:
    """What `work` returned on this rank, whatever it is. Collective; raises as `together` does."""
    found: list[T] = []
    together(ranks, lambda: found.append(work()))
    return found[0]


def on_first(ranks: RankGroup, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only and return what it returned, a JSON value, on every rank. Collective."""
    return _together(ranks, lambda: work() if ranks.rank == 0 else None, name_rank=False)[0]  # type: ignore[return-value]


def _together(ranks: RankGroup, work: Callable[[], T], name_rank: bool) -> list[T]:
    failure: Exception | None = None
    answer: list[Any] = []
    try:
        answer = [work()]
    except Exception as error:
        failure = _for_the_person(error)
    kind = type(failure).__name__ if failure is not None else None
    replies = ranks.gather({"answer": answer, "kind": kind, "error": str(failure)})
    failed = [(rank, reply) for rank, reply in enumerate(replies) if reply["kind"] is not None]
    if not failed:
        return [reply["answer"][0] for reply in replies]
    if failure is not None and not isinstance(failure, UserError):
        raise failure
    rank, reply = failed[0]
    known = {kind.__name__: kind for kind in kinds()}
    message = reply["error"] if reply["kind"] in known else f"{reply['kind']}: {reply['error']}"
    if name_rank and any(other["error"] != reply["error"] for other in replies):
        message = f"rank {rank}: {message}"
    raise known.get(reply["kind"], TrainingError)(message) from failure


def _for_the_person(error: Exception) -> Exception:
    if isinstance(error, OSError):
        return storage_error(error.strerror or str(error), error, error.filename)
    return error
