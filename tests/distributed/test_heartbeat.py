"""A rank that ends by an error tells the other nodes, whichever rank of its node it is."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from aliquot.core.errors import UserError
from aliquot.distributed.liveness import heartbeat
from aliquot.distributed.liveness.heartbeat import Heartbeat
from aliquot.distributed.rank_errors import RankError
from aliquot.distributed.topology import Topology

TIMEOUT_S = 30.0  # of a silent node, which no test here has


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[RankError]:
    errors: list[RankError] = []
    monkeypatch.setattr(heartbeat, "end_rank", errors.append)
    monkeypatch.setattr(heartbeat, "_INTERVAL_S", 0.05)
    return errors


def fail(error: BaseException, local_rank: int, ended: list[RankError]) -> None:
    """Raise `error` in a rank of the second of two nodes, while the first rank of either node watches."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def of_rank(rank: int) -> Heartbeat:
        topology = Topology(rank, 4, rank % 2, 2, rank // 2, 2, "cpu", 1, ())
        return Heartbeat(topology, store, TIMEOUT_S, lambda: "in step 7")

    with of_rank(0), of_rank(2) if local_rank else of_rank(1):
        with suppress(type(error)), of_rank(2 + local_rank):
            raise error
        until = time.monotonic() + 10
        while not ended and not isinstance(error, UserError) and time.monotonic() < until:
            time.sleep(0.02)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_other_nodes_end_when_a_rank_fails(local_rank: int, ended: list[RankError]) -> None:
    fail(RuntimeError("CUDA error: an illegal memory access\nmore"), local_rank, ended)
    error = ended[0]
    assert error.rank == 0 and error.kind == "peer_lost"
    assert error.message.startswith("node 1 (")
    assert error.message.endswith(") was ended by RuntimeError: CUDA error: an illegal memory access while in step 7")
    # The failed rank reports its error to its launcher, which ends the other ranks of that node.
    assert {other.rank for other in ended} == {0}


def test_errors_that_all_ranks_raise_are_left_to_them(ended: list[RankError]) -> None:
    fail(UserError("bad input"), 1, ended)
    assert ended == []


def test_heartbeats_that_are_played_back_do_not_count(ended: list[RankError]) -> None:
    store, until = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), time.monotonic() + 5
    beats = [json.dumps({"beats": count, "doing": "in step 7", "host": "b"}) for count in (1, 2)]
    with Heartbeat(Topology(0, 2, 0, 1, 0, 2, "cpu", 1, ()), store, 0.5, lambda: "in step 8"):
        while not ended and time.monotonic() < until:
            beats.reverse()
            store.set("heartbeat/1", beats[0])
            time.sleep(0.05)
    assert ended[0].message.startswith("no word from node 1 (b, in step 7)")
