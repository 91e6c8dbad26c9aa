"""The order of sequences: among sources, and over optimizer steps."""

from __future__ import annotations

import dataclasses
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.data_section import DataSection
from aliquot.core.errors import UserError
from aliquot.data.batches import Batches, StepBatch
from aliquot.data.data_order import Mixture, Steps, TrainStore
from aliquot.data.prepare import prepare
from aliquot.data.workload import BatchSize
from tests.data.stores import make_batches, numbered
from tests.data.test_batches import facts, in_order

SOURCES = st.lists(
    st.tuples(st.floats(1e-3, 1e3), st.integers(1, 5000), st.none() | st.integers(1, 40)), min_size=1, max_size=5
)


def mixture(sources: list[tuple[float, int, int | None]]) -> Mixture:
    weights, tokens, ends = zip(*sources, strict=True)
    return Mixture.from_token_weights(weights, [Fraction(each, 7) for each in tokens], ends)


@given(SOURCES, st.integers(0, 300), st.integers(0, 60))
def test_ranges_equal_counting_from_the_start(
    sources: list[tuple[float, int, int | None]], first: int, length: int
) -> None:
    made = mixture(sources)
    stop = first + length if made.total is None else min(first + length, made.total)
    first = min(first, stop)
    walked = made.between(0, stop)
    assert len(walked) == stop
    assert made.between(first, stop) == walked[first:]
    counts = Counter(source for source, _ in walked)
    assert made.drawn(stop) == [counts[source] for source in range(len(sources))]
    for source, (_, _, end) in enumerate(sources):
        assert [k for of, k in walked if of == source] == list(range(counts[source]))
        assert end is None or counts[source] <= end


@given(SOURCES, st.integers(1, 10**9))
def test_sources_get_their_share_within_one(sources: list[tuple[float, int, int | None]], count: int) -> None:
    endless = [(weight, tokens, None) for weight, tokens, _ in sources]
    rates = [Fraction(weight) / tokens for weight, tokens, _ in endless]
    for rate, drawn in zip(rates, mixture(endless).drawn(count), strict=True):
        assert abs(drawn - count * rate / sum(rates)) <= len(sources) + count / 2**30


def mixed(**changes: object) -> Batches:
    """Three sources of 4-token sequences, whose tokens tell which they are from."""
    stores = [numbered([4] * count) for count in (30, 10, 6)]
    stores = [dataclasses.replace(store, tokens=store.tokens + 1000 * n) for n, store in enumerate(stores)]
    sources = [
        TrainStore(stores[0], "a", 0.6), TrainStore(stores[1], "b", 0.3), TrainStore(stores[2], "c", 0.1, repeat=False)
    ]  # fmt: skip
    settings = {"sequence_length": 4, "packing": True, "seed": 1, "global_batch_size": 10, "micro_batch_size": 3,
                "pad_id": 0}  # fmt: skip
    return make_batches(sources, **{**settings, **changes})


def origins(batch: StepBatch) -> Counter[int]:
    return Counter(
        int(token) // 1000 for micro in batch.micro_batches if micro for token in micro.input_ids[::4].tolist()
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mixture_does_not_depend_on_the_world_size(world_size: int) -> None:
    made = mixed()
    for step in (0, 5, 17):
        alone = made.step_batch(step, 0, 1)
        shares = [mixed().step_batch(step, rank, world_size) for rank in range(world_size)]
        together = in_order([share.micro_batches for share in shares])
        assert [facts(micro) for micro in together] == [facts(micro) for micro in alone.micro_batches if micro]
        assert {(share.predicted_of, share.tokens_of) for share in shares} == {(alone.predicted_of, alone.tokens_of)}
        for micro in together:
            assert {int(token) // 1000 for token in micro.input_ids} == {micro.source}, "one source each"
        predicted = [sum(micro.predicted for micro in together if micro.source == source) for source in range(3)]
        assert tuple(predicted) == alone.predicted_of


def test_ranks_have_as_much_of_a_mixture_as_the_plan_counts_on() -> None:
    """Of each of three sources a whole micro-batch and a rest: in the order of sources one rank has all whole ones."""
    sources = [TrainStore(numbered([4] * 33), name, 1.0) for name in "abc"]
    made = make_batches(
        sources, sequence_length=4, packing=True, seed=1, global_batch_size=33, micro_batch_size=8, pad_id=0
    )
    shares = [made.step_batch(0, rank, 2) for rank in range(2)]
    of_ranks = [sum(len(micro.input_ids) // 4 for micro in share.micro_batches if micro) for share in shares]
    assert of_ranks == [19, 14] and max(of_ranks) == BatchSize(33, 8).sequences(2, sources=3)


def test_sources_repeat_reshuffled_or_end() -> None:
    made = mixed()
    seen: list[list[int]] = [[], [], []]
    for step in range(40):
        batch = made.step_batch(step, 0, 1)
        for micro in batch.micro_batches:
            assert micro is not None
            seen[micro.source] += micro.input_ids[::4].tolist()
    assert len(seen[2]) == len(set(seen[2])) == 6, "each once"
    assert [len(set(part)) for part in (seen[0][:30], seen[0][30:60], seen[1][:10], seen[1][10:20])] == [30, 30, 10, 10]
    assert seen[1][:10] != seen[1][10:20]
    assert len(seen[0]) == pytest.approx(2 * len(seen[1]), abs=2)


def test_without_weights_an_epoch_is_every_sequence_once() -> None:
    sources = [dataclasses.replace(source, weight=None, repeat=True) for source in mixed().sources]
    made = make_batches(
        sources, sequence_length=4, packing=True, seed=1, global_batch_size=23, micro_batch_size=1, pad_id=0
    )
    assert made.epoch_sequences == 46
    whole = sum((origins(made.step_batch(step, 0, 1)) for step in range(2)), Counter())
    assert whole == {0: 30, 1: 10, 2: 6}


def test_two_sources_of_the_same_data_are_shuffled_apart() -> None:
    store = numbered([4] * 30)
    made = make_batches(
        [TrainStore(store, "a"), TrainStore(store, "b")], sequence_length=4, packing=True, seed=1, global_batch_size=60,
        micro_batch_size=1, pad_id=0,
    )  # fmt: skip
    orders: list[list[int]] = [[], []]
    for micro in made.step_batch(0, 0, 1).micro_batches:
        assert micro is not None
        orders[micro.source].append(int(micro.input_ids[0]))
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_run_ends_with_all_sources() -> None:
    sources = [dataclasses.replace(source, repeat=False) for source in mixed().sources]
    made = make_batches(
        sources, sequence_length=4, packing=True, seed=1, global_batch_size=10, micro_batch_size=1, pad_id=0
    )
    assert made.total_steps(None) == 5
    assert made.step_batch(4, 0, 1).sequences == 6
    with pytest.raises(UserError, match=r"all of data\.sources end after 5 steps, before train\.max_steps 6"):
        made.total_steps(6)
    one_epoch = make_batches(
        sources, sequence_length=4, packing=True, seed=1, global_batch_size=10, micro_batch_size=1, pad_id=0, epochs=1
    )
    assert one_epoch.total_steps(None) == 5, "one epoch is all of them, whatever their weights"
    with pytest.raises(UserError, match="no source repeats"):
        make_batches(
            sources, sequence_length=4, packing=True, seed=1, global_batch_size=10, micro_batch_size=1, pad_id=0,
            epochs=3,
        )  # fmt: skip


def test_determinants_of_the_data_order() -> None:
    found = mixed().determinants()
    sources = mixed().sources
    heavier = [dataclasses.replace(sources[0], weight=0.7), *sources[1:]]
    settings = {"sequence_length": 4, "packing": True, "seed": 1, "global_batch_size": 10, "micro_batch_size": 3}
    changed = make_batches(heavier, **settings, pad_id=0).determinants()
    assert {key for key in found if found[key] != changed[key]} == {"data.sources, a: weight"}


def test_shares_of_real_text_are_the_weights(shared: Path, tmp_path: Path) -> None:
    weights = {"tinystories-train-head": 0.5, "tinyshakespeare": 0.3, "wikitext2-raw-valid": 0.2}
    for name in weights:
        (tmp_path / f"{name}.txt").write_text((shared / "data" / f"{name}.txt").read_text()[:200_000])
    sources = [
        {"name": name, "path": str(tmp_path / f"{name}.txt"), "document": "block", "weight": weight}
        for name, weight in weights.items()
    ]
    section = DataSection(sources=sources, cache_directory=tmp_path / "cache", sequence_length=256)
    prepared = prepare(section, shared / "models" / "stories260K", 512)
    for packing, sequences in ((True, 1000), (False, 20_000)):
        batches = Batches.of(
            prepared, section.model_copy(update={"packing": packing}), 1, BatchSize(total=8, micro=1), None
        )
        ranges = zip(batches.streams, batches.mixture.drawn(sequences), strict=True)
        tokens = {stream.source.name: stream.counts(0, count)[1] for stream, count in ranges}
        shares = {name: own / sum(tokens.values()) for name, own in tokens.items()}
        assert shares == pytest.approx(weights, abs=0.005)


@given(size=st.integers(1, 9), stages=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_stages_take_sequences_once_in_order(size: int, stages: list[int]) -> None:
    """A run that ends at one sequence after the other, each time told to go on from where it was."""
    taken: list[range] = []
    ends: tuple[int, ...] = ()
    stop = 0
    for length in stages:
        stop += length
        steps = Steps(size, stop, ends)
        before = len(taken)
        assert not steps.of(steps.until(stop))
        taken += [steps.of(step) for step in range(before, steps.until(stop))]
        assert [steps.of(step) for step in range(len(taken))] == taken, "earlier steps are what they were"
        ends = Steps(size, None, ends).continued_at(len(taken), stop).ends
    assert [each.start for each in taken] == [0, *(each.stop for each in taken[:-1])] and taken[-1].stop == stop
    assert all(0 < len(each) <= size for each in taken)
    # Within a stage only the last step is short.
    short = [each.stop for each in taken if len(each) < size]
    assert set(short) <= {sum(stages[:number]) for number in range(1, len(stages) + 1)}


@given(size=st.integers(1, 9), step=st.integers(0, 50))
def test_run_ended_between_batches_continues_unchanged(size: int, step: int) -> None:
    assert Steps(size).continued_at(step, step * size) == Steps(size)
    assert Steps(size).of(step) == range(step * size, (step + 1) * size)


@pytest.mark.parametrize(("step", "sequence"), [(0, 1), (2, 5), (2, 11), (3, 0)])
def test_impossible_end_positions(step: int, sequence: int) -> None:
    with pytest.raises(ValueError, match=f"{step} steps do not end at sequence {sequence}"):
        Steps(5).continued_at(step, sequence)


def test_lowering_the_end_leaves_no_step() -> None:
    steps = Steps(5, 7, (12,))
    assert (steps.until(7), [len(step) for step in map(steps.of, range(4))]) == (2, [5, 2, 0, 0])


def test_all_of_the_stream_is_covered_after_an_end() -> None:
    taken = [Steps(5, None, (7, 9)).of(step) for step in range(5)]
    assert taken == [range(5), range(5, 7), range(7, 9), range(9, 14), range(14, 19)]
    assert all(one.stop == other.start for one, other in pairwise(taken))
