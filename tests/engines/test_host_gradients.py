"""Sums of gradients, whatever comes in whatever order: the first of a step replaces, each later one adds.

Gradient sums in windows on disk equal sums in memory, whatever is read ahead.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.peers import Peers
from aliquot.engines.engine_plan import OnDisk
from aliquot.engines.global_norm import block_squares
from aliquot.engines.host.gradient_sums import GradientSums, WindowSums
from aliquot.engines.host.host_disk import HostDisk
from aliquot.engines.host.host_gradients import HostGradients
from aliquot.engines.host.shared_weights import Counterparts, GradientOrder, Weight
from aliquot.offload.scratch_file import Move, ScratchFile, ScratchStream
from aliquot.offload.windows import paged
from aliquot.tensor_io.parts import row_ranges
from tests.examples import examples

SHAPE = (3, 2)


@pytest.fixture(params=["memory", "disk"])
def gradients(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostGradients]:
    """Of three weights of one rank, staged in the order 2, 1, 0. The first's, which is looked up, stay in memory."""
    hosts = Hosts.join(0, 0, lambda value: [value])
    weights = [Weight(name, SHAPE, ((0, 6),), True, torch.bfloat16) for name in ("first", "second", "third")]
    disk = None
    if request.param == "disk":
        on_disk = OnDisk(((SHAPE, 3),), ((SHAPE, 2),))
        disk = HostDisk(tmp_path, on_disk, weights, 0, Counterparts([0], 0), "fp32")
    summed = GradientSums(weights, Counterparts([0], 0), torch.float32, "fp32", disk)
    yield HostGradients(hosts, weights, summed, GradientOrder([2, 1, 0]), torch.float32, tokens=4, width=2)
    hosts.peers.close()
    if disk is not None:
        disk.scratch.close()


def full(value: float) -> torch.Tensor:
    return torch.full(SHAPE, value)


def sums(gradients: HostGradients) -> list[float]:
    gradients.finish()
    on_disk = dict(zip(gradients._sums.on_disk, gradients._sums.visit(0, changes=False), strict=True))
    summed = [on_disk[i] if i in on_disk else gradients._sums.in_memory(0, i) for i in range(3)]
    assert all(len(weight_sums.unique()) == 1 for weight_sums in summed)
    assert gradients._sums.squares() == pytest.approx([float(weight_sums.square().sum()) for weight_sums in summed])
    return [float(weight_sums[0]) for weight_sums in summed]


def test_gradients_may_arrive_in_any_order(gradients: HostGradients) -> None:
    for value, order in ((1.0, (0, 1, 2)), (10.0, (2, 0, 1)), (100.0, (1, 2, 0))):
        for index in order:
            gradients.stage(index, full(value * (index + 1)))
        gradients.end_micro_batch()
    assert sums(gradients) == [111, 222, 333]


def test_weight_without_gradient_adds_nothing(gradients: HostGradients) -> None:
    gradients.stage(1, full(5))
    gradients.end_micro_batch()
    gradients.stage(0, full(7))
    gradients.stage(1, full(1))
    gradients.end_micro_batch()
    assert sums(gradients) == [7, 6, 0]
    gradients.stage(2, full(3))  # the next step: nothing of the one before is left
    gradients.end_micro_batch()
    assert sums(gradients) == [0, 0, 3]


def test_contributions_to_a_tied_weight_add_up(gradients: HostGradients) -> None:
    """Of a tied embedding: the head's in pieces, the look-up's by rows, autograd's as a whole, twice."""
    for _ in range(2):
        gradients.buffer(0, 0, 6).fill_(1)
        gradients.publish()
        gradients.stage(0, full(10))
        gradients.end_micro_batch()
        gradients.add_rows(
            0, torch.tensor([0, 1, 2, 0]), torch.tensor([[100.0, 100], [200, 200], [200, 200], [100, 100]])
        )
    assert sums(gradients) == [422, 0, 0]


def test_piece_of_another_weight_is_refused(gradients: HostGradients) -> None:
    gradients.buffer(0, 0, 6).fill_(1)
    gradients._tag(gradients._piece, 0).copy_(torch.tensor([1, 0, 1]))
    with pytest.raises(SelfTestError, match="a gradient of second where this rank expects one of first"):
        gradients._sum(gradients._piece, 0, 0, 6, True, (0, 0))


def test_second_micro_batch_with_transient_sums_is_refused(gradients: HostGradients) -> None:
    gradients._sums.transient = frozenset({1})
    with pytest.raises(ValueError, match="expected one micro-batch per optimizer step, got a second one"):
        gradients.begin_micro_batch(0, last=False)


def test_rounding_does_not_depend_on_arrival_times() -> None:
    """Sums for another host in bf16: a rank that is ahead reads pieces of a micro-batch when it is in the next one."""
    at_once = rounded_sums([0.0, 0.0])
    for pauses in ([0.003, 0.0], [0.0, 0.003]):
        for summed, expected in zip(rounded_sums(pauses), at_once, strict=True):
            assert torch.equal(summed, expected)


def rounded_sums(pauses: list[float], micro_batches: int = 6) -> list[torch.Tensor]:
    """Of two ranks of the first of two hosts, what they have for the second, in bf16."""
    shape, ends = (64, 256), socket.socketpair()
    weights = [Weight(name, shape, row_ranges(shape, 4), True, torch.bfloat16) for name in "ab"]
    peers = [Peers(member, {1 - member: ends[member]}, [0, 1]) for member in (0, 1)]

    def rank(member: int) -> list[torch.Tensor]:
        hosts = Hosts(peers[member], ((0, 1), (2, 3)), 0, (0, 0), None)
        host_sums = GradientSums(
            weights, Counterparts([member, 2 + member], 0), torch.float32, "fp32", None, sent_dtype=torch.bfloat16
        )
        gradients = HostGradients(hosts, weights, host_sums, GradientOrder([1, 0]), torch.float32, tokens=4, width=2)
        for number in range(micro_batches):
            gradients.begin_micro_batch(1, last=number == micro_batches - 1)
            for index in (1, 0):
                time.sleep(pauses[member])
                seed = torch.Generator().manual_seed(100 * number + 10 * index + member)
                gradients.stage(index, torch.randn(shape, generator=seed))
            gradients.end_micro_batch()
        gradients.finish()
        return [host_sums.in_memory(1, index) for index in (0, 1)]

    with ThreadPoolExecutor(2) as ranks:
        summed = [tensor for rank_sums in ranks.map(rank, (0, 1)) for tensor in rank_sums]
    for peer in peers:
        peer.close()
    return summed


def test_bf16_sums_keep_growing() -> None:
    """Frugal states: 256 + 1 is 256 in bf16, to nearest."""
    hosts = Hosts.join(0, 0, lambda value: [value])
    weights = [Weight(name, (64, 64), ((0, 64 * 64),), True, torch.bfloat16) for name in ("dense", "looked up")]
    host_sums = GradientSums(weights, Counterparts([0], 0), torch.bfloat16, "bf16", None)
    gradients = HostGradients(hosts, weights, host_sums, GradientOrder([0]), torch.float32, tokens=64, width=64)
    for number in range(600):
        gradients.begin_micro_batch(1, last=number == 599)
        gradients.stage(0, torch.ones(64, 64))
        gradients.end_micro_batch()
        gradients.add_rows(1, torch.arange(64), torch.ones(64, 64))
    gradients.finish()
    for index in (0, 1):
        assert host_sums.in_memory(0, index).float().mean() == pytest.approx(600, rel=0.01)
    hosts.peers.close()


@given(
    numels=st.lists(st.integers(1, 3000), min_size=1, max_size=9),
    rounds=st.integers(1, 3),
    steps=st.integers(1, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(20), deadline=None)
def test_sums_on_disk_equal_sums_in_memory(numels: list[int], rounds: int, steps: int, seed: int) -> None:
    """Windows of any sizes and numbers, of which each round changes two ranges or, now and then, none."""
    generator = torch.Generator().manual_seed(seed)
    places, end = {}, 0
    keys = [(0, index, 0) for index in range(len(numels))]
    for key, numel in zip(keys, numels, strict=True):
        places[key] = (end, numel)
        end += paged(4 * numel)
    expected = dict(zip(keys, map(torch.zeros, numels), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        scratch = ScratchFile(Path(folder), end)
        sums = WindowSums(scratch, places, torch.float32)
        for _ in range(steps):
            for number in range(rounds):
                for key, numel in zip(keys, numels, strict=True):
                    if number and int(torch.randint(3, (), generator=generator)) == 0:
                        continue
                    values, middle = torch.randn(numel, generator=generator), numel // 2
                    for part in (slice(0, middle), slice(middle, numel)):
                        target = sums.open(key, overwrite=number == 0)[part]
                        target.copy_(values[part] if number == 0 else target + values[part])
                    expected[key] = values if number == 0 else expected[key] + values
            sums.flush()
            for key, (offset, numel) in places.items():
                (stored,) = ScratchStream(scratch, [Move(offset, paged(4 * numel), None)])
                assert torch.equal(stored[: 4 * numel].view(torch.float32), expected[key])
                assert sums.squares[key] == block_squares(expected[key])
        scratch.close()
