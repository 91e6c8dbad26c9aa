"""Global batches: the same at every world size and after any interruption; padding and edges by position alone.

The next batch is laid out ahead and copied to a GPU while the current one is computed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aliquot.data.batch_prefetch import BatchCopier, BatchPrefetcher
from aliquot.data.batches import Batches, Position, StepBatch
from aliquot.data.data_order import TrainStore
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.micro_batch_rows import SequenceFormat
from aliquot.data.mismatched_answers import answers_to_other_prompts
from aliquot.data.token_store import TokenStore
from aliquot.models.micro_batch import IGNORE, MicroBatch
from aliquot.nn.preference_loss import Answers, Objective, RatedAnswers
from aliquot.nn.product_shapes import filled_row, row_lengths
from tests.data.stores import make_batches, memory_store, numbered

SIZES = [3, 17, 2, 9, 40, 5, 5, 8, 1, 12, 31, 4, 6, 2, 7]


def batches(store: TokenStore, **changes: object) -> Batches:
    settings = {"sequence_length": 16, "packing": True, "seed": 1, "global_batch_size": 5, "micro_batch_size": 2,
                "pad_id": 0}  # fmt: skip
    return make_batches([TrainStore(store)], **{**settings, **changes})


def in_order(shares: list[list[MicroBatch | None]]) -> list[MicroBatch]:
    """The micro-batches of all ranks in the order of the global batch."""
    assert len({len(share) for share in shares}) == 1
    row = [micro for turn in zip(*shares, strict=True) for micro in turn]
    present = [micro for micro in row if micro is not None]
    assert row[: len(present)] == present, "only the last ranks of the last turn may have nothing"
    return present


def facts(micro: MicroBatch) -> tuple[object, ...]:
    return micro.input_ids.tolist(), micro.labels.tolist(), micro.position_ids.tolist(), micro.edges


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_global_batch_does_not_depend_on_the_world_size(world_size: int, packing: bool) -> None:
    made = batches(numbered(SIZES), packing=packing, epochs=2)
    seen = 0
    for step in range(made.total_steps(None)):
        alone = made.step_batch(step, 0, 1)
        shares = [made.step_batch(step, rank, world_size) for rank in range(world_size)]
        together = in_order([share.micro_batches for share in shares])
        assert [facts(micro) for micro in together] == [facts(micro) for micro in alone.micro_batches]
        assert alone.predicted == sum(micro.predicted for micro in together) > 0
        assert {dataclasses.replace(share, micro_batches=()).__repr__() for share in shares} == {
            dataclasses.replace(alone, micro_batches=()).__repr__()
        }
        seen += alone.predicted
    assert seen == 2 * sum(size - 1 for size in SIZES)


def test_short_rank_ends_with_empty_micro_batches() -> None:
    made = batches(numbered([16] * 20), micro_batch_size=1)
    lists = [made.step_batch(0, rank, 3).micro_batches for rank in range(3)]
    assert [[micro is None for micro in share] for share in lists] == [[False, False], [False, False], [False, True]]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=12),
    st.integers(2, 9),
    st.booleans(),
    st.data(),
)
def test_labels_are_next_tokens_within_a_document(
    documents: list[list[int]], length: int, packing: bool, data: st.DataObject
) -> None:
    """Token ids are from a handful, so that pad, bos and eos all occur inside of documents."""
    documents.append([1, 2])  # one at least predicts something
    store = memory_store(documents)
    made = batches(store, sequence_length=length, packing=packing, pad_id=data.draw(st.integers(0, 3)), epochs=1)
    transitions: list[tuple[int, int]] = []
    for step in range(made.total_steps(None)):
        batch = made.step_batch(step, 0, 1)
        real = 0
        for micro in batch.micro_batches:
            assert micro is not None
            assert micro.edges[0] == 0
            assert micro.edges[-1] == len(micro.input_ids) == len(micro.labels)
            assert list(micro.edges) == sorted(set(micro.edges))
            if packing:
                assert set(range(0, micro.edges[-1], length)) < set(micro.edges), "a sequence ends at an edge"
            for start, stop in zip(micro.edges[:-1], micro.edges[1:], strict=True):
                assert micro.position_ids[start:stop].tolist() == list(range(stop - start))
                assert micro.labels[stop - 1] == IGNORE
                if stop - start > 1 and (micro.labels[start : stop - 1] != IGNORE).any():
                    assert torch.equal(micro.labels[start : stop - 1], micro.input_ids[start + 1 : stop])
                    inputs, labels = micro.input_ids[start : stop - 1].tolist(), micro.labels[start : stop - 1].tolist()
                    transitions += zip(inputs, labels, strict=True)
                    real += stop - start
                else:
                    assert packing, "nothing is padded"
                    assert (micro.input_ids[start:stop] == made.format.pad_id).all()
                    assert (micro.labels[start:stop] == IGNORE).all()
        assert batch.tokens == real
    expected = [pair for document in documents for pair in pairwise(document)]
    assert sorted(transitions) == sorted(expected)


@given(st.lists(st.integers(2, 600), min_size=1, max_size=60), st.integers(1, 40))
def test_padded_micro_batches_have_few_lengths(sizes: list[int], micro: int) -> None:
    """oneDNN keeps a kernel of each, with AMX of nearly a MiB."""
    made = batches(numbered(sizes), packing=False, sequence_length=512, micro_batch_size=micro, epochs=1, fills_up=True)
    found = [each for step in range(made.total_steps(None)) for each in made.step_batch(step, 0, 1).micro_batches]
    lengths = {each.edges[-1] for each in found if each is not None}
    possible = {filled_row(tokens, count, 512) for count in range(1, micro + 1) for tokens in range(1, count * 512 + 1)}
    assert lengths <= possible and len(possible) == row_lengths(micro, 512)
    for each in found:
        assert each is not None
        real = int((each.input_ids != made.format.pad_id).sum())
        assert each.edges[-1] < real + max(32, real / 8)
        assert all(b - a <= 64 for a, b in pairwise(each.edges) if a >= real)


def test_pad_equal_to_eos_hides_no_real_eos() -> None:
    eos = 2
    made = batches(memory_store([[1, 5, eos], [1, 6, 7, eos]]), pad_id=eos, sequence_length=5)
    rows = {
        tuple(micro.input_ids[at : at + 5].tolist()): micro.labels[at : at + 5].tolist()
        for micro in made.step_batch(0, 0, 1).micro_batches
        for at in range(0, len(micro.input_ids), 5)
    }
    assert rows == {
        (1, 5, eos, eos, eos): [5, eos, IGNORE, IGNORE, IGNORE],
        (1, 6, 7, eos, eos): [6, 7, eos, IGNORE, IGNORE],
    }


def test_ranks_make_equal_document_calls() -> None:
    made = batches(numbered(SIZES), packs=False, micro_batch_size=1)
    lists = [made.step_batch(0, rank, 3).micro_batches for rank in range(3)]
    for turn in zip(*lists, strict=True):
        assert all(micro is not None and micro.edges[-1] <= 16 for micro in turn), "nothing is padded"
        equal = [micro.with_equal_calls() for micro in turn]
        assert len({len(micro.edges) for micro in equal}) == 1
        assert [micro.predicted for micro in equal] == [micro.predicted for micro in turn]


def test_dropout_seeds_depend_only_on_data() -> None:
    made = batches(numbered(SIZES))
    seeds = [micro.seed for micro in in_order([made.step_batch(1, rank, 2).micro_batches for rank in range(2)])]
    assert seeds == [micro.seed for micro in made.step_batch(1, 0, 1).micro_batches]
    assert len(set(seeds)) == len(seeds)


def test_chat_labels_follow_the_mask() -> None:
    made = batches(memory_store([[1, 2, 3, 4, 5]], [[0, 0, 1, 0, 1]]), sequence_length=6, global_batch_size=1)
    batch = made.step_batch(0, 0, 1)
    (micro,) = batch.micro_batches
    assert micro.labels.tolist() == [IGNORE, 3, IGNORE, 5, IGNORE, IGNORE]
    assert (batch.predicted, batch.tokens) == (2, 5)


def test_step_batch_needs_no_earlier_steps() -> None:
    store = numbered(SIZES * 3)
    through = batches(store)
    steps = [through.step_batch(step, 0, 1) for step in range(25)]
    assert steps[-1].epoch > 2

    def content(batch: StepBatch) -> object:
        return [facts(micro) for micro in batch.micro_batches], batch.predicted, batch.tokens, batch.epoch

    for step in (24, 3, 11):
        assert content(batches(store).step_batch(step, 0, 1)) == content(steps[step])
        assert content(through.step_batch(step, 0, 1)) == content(steps[step])
    assert content(batches(store, seed=2).step_batch(0, 0, 1)) != content(steps[0])


def test_batches_may_straddle_epochs() -> None:
    store = numbered([4] * 6)
    made = batches(store, sequence_length=4, global_batch_size=15, micro_batch_size=1)
    stream = [micro.input_ids.tolist()[0] for step in range(2) for micro in made.step_batch(step, 0, 1).micro_batches]
    epochs = [stream[at : at + 6] for at in range(0, 30, 6)]
    assert all(sorted(epoch) == [1, 5, 9, 13, 17, 21] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert made.position(1) == Position(epoch=2, index=3)
    assert made.step_batch(1, 0, 1).epoch == 5.0
    assert made.step_batch(0, 0, 1).predicted == 15 * 3


def test_the_last_batch_of_the_last_epoch_is_smaller() -> None:
    store = numbered([4] * 7)
    made = batches(store, sequence_length=4, epochs=1.5)
    assert made.epoch_sequences == 7
    steps = [batches(store, sequence_length=4, epochs=epochs).total_steps(None) for epochs in (1, 1.5, 10 / 7, 0.001)]
    assert steps == [2, 3, 2, 1]
    assert [made.step_batch(step, 0, 1).sequences for step in range(3)] == [5, 5, 1]
    assert [made.step_batch(2, rank, 2).micro_batches[0] is None for rank in range(2)] == [False, True]
    with pytest.raises(IndexError):
        made.step_batch(3, 0, 1)
    assert batches(store, sequence_length=4).step_batch(2, 0, 1).sequences == 5


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_sees_every_token_once_in_a_fixed_order(world_size: int) -> None:
    def shares(world_size: int) -> list[list[MicroBatch | None]]:
        made = EvalBatches(numbered(SIZES), SequenceFormat(16, 0, packed=True), 2)
        assert made.predicted == sum(size - 1 for size in SIZES)
        return [list(made.micro_batches(rank, world_size)) for rank in range(world_size)]

    together = in_order(shares(world_size))
    assert [facts(micro) for micro in together] == [facts(micro) for micro in shares(1)[0]]
    labels = torch.cat([micro.labels for micro in together])
    firsts = np.cumsum([1, *SIZES])[:-1].tolist()
    assert sorted(labels[labels != IGNORE].tolist()) == sorted(set(range(1, sum(SIZES) + 1)) - set(firsts))


@pytest.mark.parametrize(("micro", "world_size"), [(2, 1), (2, 2), (3, 2), (2, 4), (100, 2)])
def test_first_and_last_equal_those_of_the_evaluation(micro: int, world_size: int) -> None:
    made = EvalBatches(numbered(SIZES), SequenceFormat(16, 0, packed=True), micro)
    for rank in range(world_size):
        whole = list(made.micro_batches(rank, world_size))
        found = list(made.first_and_last(rank, world_size))
        assert len(found) == min(2, len(whole))
        for one, other in zip((found[0], found[-1]), (whole[0], whole[-1]), strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or facts(one) == facts(other)


def test_ranks_read_only_their_sequences() -> None:
    store = numbered(SIZES)
    read: list[int] = []

    class Watched:
        def __getitem__(self, at: slice) -> np.ndarray:
            read.extend(range(at.start, at.stop))
            return store.tokens[at]

    watched = batches(dataclasses.replace(store, tokens=Watched()), global_batch_size=6)
    batch = watched.step_batch(0, 1, 3)
    own = [token for micro in batch.micro_batches for token in micro.input_ids[micro.input_ids > 0].tolist()]
    assert sorted(token - 1 for token in own) == sorted(read)
    assert len(read) < batch.tokens


def test_pairs_stay_together_and_know_their_answers() -> None:
    """Six pairs, of which one is longer than a sequence; the second answer of each begins with unlearned tokens."""
    lengths = [3, 4, 5, 2, 9, 9, 2, 2, 4, 3, 6, 4]
    store = numbered(lengths)
    mask = np.concatenate([[0, *[1] * (length - 1)] for length in lengths]).astype(np.uint8)
    reference = -np.arange(12, dtype=np.float32)
    store = replace(store, mask=mask, pairs=True)
    made = make_batches(
        [TrainStore(store)], sequence_length=12, packing=True, pad_id=0, seed=1, global_batch_size=4, micro_batch_size=2
    ).with_objective(Objective("dpo"), {"": reference})
    seen = []
    for world_size in (1, 2):
        batches = [made.step_batch(0, rank, world_size) for rank in range(world_size)]
        assert {batch.predicted for batch in batches} == {5}
        rows = [row for batch in batches for row in batch.micro_batches if row is not None]
        for row in rows:
            answers = row.row_loss
            assert isinstance(answers, Answers)
            assert (row.labels != -100).sum() == answers.lengths.sum()
            for number, document in enumerate(answers.places):
                first = int(store.tokens[store.offsets[document]])
                tokens = torch.arange(first, first + lengths[document])
                inside = answers.tokens[answers.numbers == number]
                assert torch.equal(row.input_ids[inside], tokens[:-1])
                assert torch.equal(row.labels[inside], tokens[1:])
                assert answers.lengths.view(-1)[number] == lengths[document] - 1
                assert answers.reference.view(-1)[number] == -document
            assert answers.places[1::2] == tuple(one + 1 for one in answers.places[::2])
        seen.append(sorted(document for row in rows for document in row.row_loss.places))
    assert seen == [[0, 1, 2, 3, 6, 7, 8, 9, 10, 11]] * 2


def test_a_pair_is_left_out_if_an_answer_exceeds_the_positions_of_the_model() -> None:
    lengths = [3, 4, 2, 9, 5, 5]
    mask = np.concatenate([[0, *[1] * (length - 1)] for length in lengths]).astype(np.uint8)
    store = replace(numbered(lengths), mask=mask, pairs=True, positions=8)
    batches = make_batches(
        [TrainStore(store)], sequence_length=12, packing=True, pad_id=0, seed=1, global_batch_size=9,
        micro_batch_size=1, epochs=1,
    )  # fmt: skip
    assert store.too_long(12).tolist() == store.too_long(12, 0, 3).tolist() == [False, True, False]
    assert batches.step_batch(0, 0, 1).predicted == 2


@pytest.mark.parametrize(
    "counts",
    [[1, 1], [1, 1, 1, 1, 1], [2, 2, 2], [1, 2, 3, 4], [5, 1], [9, 2, 1], [3, 3], [1, 40, 7, 2], [4, 5], [6, 6, 1]],
)
def test_mismatched_answers_are_to_other_prompts_in_any_order(counts: list[int]) -> None:
    draw = np.random.default_rng(0)
    prompts = np.repeat(draw.integers(0, 1 << 63, len(counts), np.uint64), counts)
    unpaired = np.resize(prompts[np.cumsum(counts) - 1], 2 * len(counts))  # all prompts, then again
    for order in (prompts, prompts[::-1], *(draw.permutation(prompts) for _ in range(5)), unpaired):
        others = answers_to_other_prompts(order)
        assert (order[others] != order).all()
        if np.unique(order, return_counts=True)[1].max() <= len(order) / 2:
            assert sorted(others) == list(range(len(order)))  # each answer is mismatched once
    distinct = np.arange(7, dtype=np.uint64)
    assert answers_to_other_prompts(distinct).tolist() == [3, 4, 5, 6, 0, 1, 2]


def test_rated_answers_bring_the_answer_to_another_prompt() -> None:
    """Five documents with prompts of two tokens; the answer of the third is too long behind another prompt.

    The first and the fourth answer the same prompt, so that their neighbours are half the store further on.
    """
    lengths, length = [4, 5, 12, 3, 6], 12
    store = numbered(lengths)
    mask = np.concatenate([[0, 0, *[1] * (length - 2)] for length in lengths]).astype(np.uint8)
    desirable = np.array([1, 0, 0, 1, 1], np.uint8)
    store = replace(store, mask=mask, desirable=desirable, prompts=np.array([7, 5, 9, 7, 3], np.uint64))
    prompts = dict(zip(range(5), [[1, 2], [5, 6], [10, 11], [22, 23], [25, 26]], strict=True))
    made = make_batches(
        [TrainStore(store)], sequence_length=length, packing=True, pad_id=0, seed=1, global_batch_size=3,
        micro_batch_size=1,
    ).with_objective(Objective("kto"), {"": -np.arange(10, dtype=np.float32)})  # fmt: skip
    for world_size in (1, 2):
        batches = [made.step_batch(0, rank, world_size) for rank in range(world_size)]
        assert {batch.predicted for batch in batches} == {5}
        for row in [row for batch in batches for row in batch.micro_batches if row is not None]:
            answers = row.row_loss
            assert isinstance(answers, RatedAnswers) and row.mismatched is not None
            other = row.mismatched
            assert isinstance(other.row_loss, Answers)
            for number, place in enumerate(answers.places):
                document = place // 2
                assert bool(answers.desirable[number]) == bool(desirable[document])
                assert float(answers.reference[number]) == -place
                assert float(other.row_loss.reference[number]) == -place - 1
                start, stop = other.edges[number : number + 2]
                mismatched = [1, 4, 0, 2, 3][document]
                answer = np.arange(store.offsets[mismatched] + 3, store.offsets[mismatched + 1] + 1).tolist()
                assert other.input_ids[start:stop].tolist() == (prompts[document] + answer)[:length]
                assert other.labels[start:stop].tolist() == [-100, *answer[: stop - start - 2], -100]


class Noted(Batches):
    """Tells which steps have been laid out."""

    def __init__(self, made: Batches, fails_at: int | None = None) -> None:
        vars(self).update(vars(made))
        self.laid_out = [threading.Event() for _ in range(10)]
        self.fails_at = fails_at

    def step_batch(self, step: int, rank: int, world_size: int) -> StepBatch:
        if step == self.fails_at:
            raise OSError(5, "Input/output error")
        batch = super().step_batch(step, rank, world_size)
        self.laid_out[step].set()
        return batch


def test_prefetched_batches_equal_direct_batches() -> None:
    made = Noted(batches(numbered([3, 17, 2, 9, 40, 5, 5, 8, 12, 31])))
    with BatchPrefetcher(made, 1, 2, first=3, stop=7) as ahead:
        for step in range(3, 7):
            taken, expected = ahead.take(step), batches(made.sources[0].store).step_batch(step, 1, 2)
            assert [micro and facts(micro) for micro in taken.micro_batches] == [
                micro and facts(micro) for micro in expected.micro_batches
            ]
            assert (taken.predicted, taken.tokens, taken.epoch) == (expected.predicted, expected.tokens, expected.epoch)
            if step < 6:  # nobody has asked for it yet
                assert made.laid_out[step + 1].wait(30)
    assert not made.laid_out[7].is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aliquot-batches")]


def test_prefetch_error_is_raised_at_its_step() -> None:
    with BatchPrefetcher(Noted(batches(numbered([16] * 20)), fails_at=1), 0, 1, first=0, stop=3) as ahead:
        ahead.take(0)
        with pytest.raises(OSError, match="Input/output"):
            ahead.take(1)


class Cuda:
    """As torch.cuda, and what was done in order. The GPU itself is the meta device: it has shapes alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, str]] = []  # what, in which thread
        self.pinned: list[Tensor] = []
        self.current = threading.local()
        cuda, to = self, Tensor.to

        class Event:
            def record(self) -> None:
                assert cuda.stream == "copies"
                cuda.note("event")

        class Stream:
            def __init__(self, name: str = "copies") -> None:
                self.name = name

            def wait_event(self, _: Event) -> None:
                assert self.name == "kernels"
                cuda.note("wait")

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            self.current.stream = chosen.name
            yield
            self.current.stream = "kernels"

        def pin_memory(tensor: Tensor) -> Tensor:
            self.pinned.append(tensor)
            return tensor

        def sent(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
            assert device == torch.device("cuda", 3) and non_blocking and self.stream == "copies"
            assert any(tensor is each for each in self.pinned), "from pageable memory it would be waited for"
            self.note("copy")
            return to(tensor, "meta")

        for name, stand_in in (
            ("Event", Event), ("Stream", Stream), ("stream", stream), ("current_device", lambda: 3),
            ("current_stream", lambda: Stream("kernels")), ("is_initialized", lambda: True),
            ("set_device", lambda gpu: self.note(f"GPU {gpu}")),
        ):  # fmt: skip
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(Tensor, "to", sent)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.note("kept"))

    @property
    def stream(self) -> str:
        return getattr(self.current, "stream", "kernels")

    def note(self, what: str) -> None:
        self.done.append((what, threading.current_thread().name.partition("_")[0]))


def test_copies_are_made_ahead_and_kernels_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = batches(numbered([3, 17, 2, 9, 40, 5, 5, 8, 12, 31]))
    expected = [made.step_batch(step, 1, 2) for step in range(3)]
    cuda = Cuda(monkeypatch)
    with BatchPrefetcher(made, 1, 2, first=0, stop=3, gpu_copier=BatchCopier()) as ahead:
        taken = [ahead.take(step) for step in range(3)]
    here = [each for batch in expected for each in batch.micro_batches if each is not None]
    there = [each for batch in taken for each in batch.micro_batches if each is not None]
    assert len(here) == len(there) > 0
    rows = [each for each in cuda.pinned if each.dim() == 2]
    for before, after, row in zip(here, there, rows, strict=True):
        assert torch.equal(row, torch.stack([before.input_ids, before.labels, before.position_ids]))
        assert after.input_ids.is_meta and after.edges == before.edges
        assert after.chosen is not None and after.chosen.learned == before.predicted
    own, main = "aliquot-batches", threading.current_thread().name
    assert {name for what, name in cuda.done if what in ("copy", "event")} == {own}
    assert {name for what, name in cuda.done if what in ("wait", "kept")} == {main}
    assert cuda.done[0] == ("GPU 3", own)  # leaving a stream would make a new thread return to GPU 0
    assert [what for what, _ in cuda.done].count("wait") == 3
    order = [what for what, _ in cuda.done if what in ("event", "wait")]
    assert order[0] == "event" and all(order[:i].count("event") >= order[:i].count("wait") for i in range(7))
    assert [batch.predicted for batch in taken] == [batch.predicted for batch in expected]
