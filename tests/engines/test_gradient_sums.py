"""Gradient sums in windows on disk equal sums in memory, whatever is read ahead."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.engines.host.gradient_sums import WindowSums
from aliquot.offload.scratch_file import Move, ScratchFile, ScratchStream
from aliquot.offload.windows import paged
from aliquot.optim.gradient_norm import block_squares
from tests.examples import examples


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
