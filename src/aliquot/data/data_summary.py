"""Describe the data of a run before training: kinds of documents, share of learned tokens, omitted records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from aliquot.core.number_format import count_of
from aliquot.data.batches import Batches
from aliquot.data.data_order import TrainStore
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.formats import IMPLICIT_PROMPT, TITLES
from aliquot.data.packing import Packing
from aliquot.data.token_store import TokenStore, counted

FEW_STEPS = 20
_DOCUMENTS_AT_ONCE = 1 << 20


def header(batches: Batches, total_steps: int, held_out: Mapping[str, EvalBatches]) -> list[str]:
    """Return lines that describe the data of a run: totals, then each source and each evaluation set."""
    units = sum(len(source.store.unit_offsets) - 1 for source in batches.sources)
    unit = "pair" if all(source.store.pairs for source in batches.sources) else "document"
    packed = "packed" if batches.format.packed else f"a {unit} each"
    tokens = sum(len(source.store.tokens) for source in batches.sources)
    lines = [
        f"{count_of(units, unit)}, {count_of(tokens, 'token')}; {count_of(str(total_steps), 'step')} of"
        f" {count_of(str(batches.global_batch_size), 'sequence')} of {batches.format.length}, {packed}"
    ]
    if implicit := sum(source.store.left_out.get(IMPLICIT_PROMPT, 0) for source in batches.sources):
        lines[0] += f"; the prompt of {count_of(implicit, 'pair')} is the common beginning of their answers"
    for stream, share in zip(batches.streams, _shares(batches, total_steps), strict=True):
        name = stream.source.name or "data"
        described = _described(stream.source.store, stream.packing, batches.format.length, share)
        lines += [f"{name}: {text}" for text in described]
        if stream.source.stream is not None:
            share = f"{stream.known_share:.1%}"
            lines.append(f"{name}: streamed; all these numbers are of its beginning, about {share} of it")
    for name, batches_of_source in held_out.items():
        described = _described(batches_of_source.store, batches_of_source.epoch.packing, batches.format.length)
        lines += [f"{f'evaluation, {name}' if name else 'evaluation'}: {text}" for text in described]
    steps = batches.epoch_sequences / batches.global_batch_size
    # The last step of the run may be smaller than a global batch.
    epochs = batches.steps.of(total_steps - 1).stop / batches.epoch_sequences
    epoch = f"{count_of(batches.epoch_sequences, 'sequence')}, {count_of(f'{steps:,.4g}', 'step')}"
    lines.append(f"an epoch: {epoch}; this run: {count_of(f'{epochs:.3g}', 'epoch')}")
    return lines


def day_line(day: str) -> str:
    """Return a log line about the date that the chat template writes."""
    return (
        f"the chat template writes a date: today is {day} for all of this run, the day on which it began;"
        " data.chat_template_date sets another"
    )


def warnings(batches: Batches, total_steps: int, chosen: bool) -> Iterator[str]:
    """Yield a warning if the run has few steps, unless the configuration sets the number of steps (`chosen`)."""
    if total_steps < FEW_STEPS and not chosen:
        smaller = "a smaller train.global_batch_size, " if batches.global_batch_size > 1 else ""
        # Shorter sequences would leave out pairs and rated answers, which are never cut.
        shorter = (
            "" if any(source.store.keeps_whole for source in batches.sources) else "a shorter data.sequence_length, "
        )
        unpacked = ", or data.packing=false (a document is a sequence)" if batches.format.packed else ""
        sequences = count_of(batches.epoch_sequences, "sequence")
        yield (
            f"this run has only {count_of(total_steps, 'step')}: {sequences} an epoch, and {batches.global_batch_size}"
            f" a step. For more steps: {smaller}{shorter}more train.num_train_epochs{unpacked}"
        )


def _shares(batches: Batches, total_steps: int) -> list[str]:
    """Return a text about the share of each source in the run; an empty text for a run with one source."""
    if len(batches.streams) == 1:
        return [""]
    drawn = batches.mixture.drawn(batches.steps.of(total_steps - 1).stop)
    tokens = [float(stream.sequence_tokens) * count for stream, count in zip(batches.streams, drawn, strict=True)]
    epochs = [
        f"{count * stream.known_share / stream.packing.sequences:.3g}"
        for stream, count in zip(batches.streams, drawn, strict=True)
    ]
    return [
        f"; {source_tokens / sum(tokens):.2%} of the tokens of this run, {count_of(source_epochs, 'epoch')}"
        for source_tokens, source_epochs in zip(tokens, epochs, strict=True)
    ]


def _described(store: TokenStore, packing: Packing, sequence_length: int, share: str = "") -> Iterator[str]:
    tokens = len(store.tokens)
    learned = store.labels if store.keeps_whole else packing.labels
    kinds = ", ".join(count_of(count, *TITLES[kind]) for kind, count in store.formats.items())
    described_kinds = f"{kinds}; " if kinds else ""
    yield f"{described_kinds}{learned:,} of {tokens:,} tokens are learned ({learned / tokens:.1%}){share}"
    yield from irregularities(store)
    if store.keeps_whole:
        if note := store.length_note(sequence_length):
            yield note
        return
    cut, into, pieces = _pieces(store, sequence_length)
    if cut:
        empty = pieces - len(packing.pieces.start)
        advice = "; a longer one keeps answers with their prompts" if store.mask is not None else ""
        unlearned = f"; {empty:,} of all pieces are left out: nothing is learned in them" if empty else ""
        longer = count_of(cut, "document is", "documents are")
        yield f"{longer} longer than data.sequence_length: cut into {into:,} pieces{unlearned}{advice}"


def irregularities(store: TokenStore) -> Iterator[str]:
    """Yield a line about omitted records and other remarks on a token store, if there are any."""
    if store.left_out:
        yield "; ".join(counted(store.left_out, store.firsts))


class StreamedIrregularities:
    """Tells what is left out of the streams of a run after their first segments, which `header` describes."""

    def __init__(self, batches: Batches) -> None:
        self._streams = [stream for stream in batches.streams if stream.source.stream is not None]
        self._reported = {(stream, reason) for stream in self._streams for reason in stream.source.store.left_out}

    def news(self) -> Iterator[str]:
        """Yield a line for each reason that has occurred for the first time since the last call."""
        for stream in self._streams:
            left_out = stream.store.left_out
            for reason in [reason for reason in left_out if (stream, reason) not in self._reported]:
                self._reported.add((stream, reason))
                line = "".join(counted({reason: left_out[reason]}, stream.store.firsts))
                yield f"{stream.source.name or 'data'}: {line}"

    def totals(self) -> Iterator[str]:
        """Yield lines about all segments of the streams that the run has read."""
        for stream in self._streams:
            for line in irregularities(stream.store):
                yield f"{stream.source.name or 'data'}: in all segments {line}"


def _pieces(store: TokenStore, sequence_length: int) -> tuple[int, int, int]:
    """Return the numbers of (documents longer than a sequence, pieces of these documents, pieces of all documents)."""
    longer = into = pieces = 0
    for start in range(0, store.documents, _DOCUMENTS_AT_ONCE):
        lengths = np.diff(np.asarray(store.offsets[start : start + _DOCUMENTS_AT_ONCE + 1]))
        counts = -(-(lengths - 1) // (sequence_length - 1))
        longer += int((counts > 1).sum())
        into += int(counts[counts > 1].sum())
        pieces += int(counts.sum())
    return longer, into, pieces


_EXAMPLES = 2
_EXAMPLE_CHARACTERS = 400  # longest text of a stretch in a shortened example
_MAX_TOKENS = 8192  # tokens of an example; a document may be a file of any size
_MAX_STRETCHES = 8  # stretches (learned or not) of a shortened example
_LEARNED, _READ = "learned > ", "        | "


def examples(
    source: TrainStore, tokenizer: Any, max_characters: int | None = None, text: bool = False, first: int = 1
) -> Iterator[str]:
    """Yield two documents of a source, from number `first` on, as lines for the terminal; a prefix marks learned text.

    Plain text, which is learned as a whole, is shown only if `text` is true. `max_characters` shortens each stretch of
    learned or unlearned text and limits the number of stretches. None shows the first 8,192 tokens in full.
    """
    store = source.store
    if store.mask is None and not text:
        return
    name = f" of {source.name}" if source.name else ""
    documents = 2 if store.pairs else 1  # of an example
    for document in range(documents * (first - 1), min(documents * (first - 1 + _EXAMPLES), store.documents)):
        start, stop = int(store.offsets[document]), int(store.offsets[document + 1])
        # The first token has no context to be predicted from.
        learned = stop - start - 1 if store.mask is None else int(store.mask[start + 1 : stop].sum())
        lengths = f"{count_of(stop - start, 'token')}, {count_of(learned, 'is', 'are')} learned"
        pair = f"{document // 2 + 1}, {'rejected' if document % 2 else 'chosen'}"
        number = pair if store.pairs else f"{document + 1}"
        if store.desirable is not None:
            number += ", desirable" if store.desirable[document] else ", undesirable"
        yield f"example {number}{name}: {lengths}"
        ids = store.tokens[start : min(stop, start + _MAX_TOKENS)].tolist()
        mask = [0] + ([1] * (len(ids) - 1) if store.mask is None else store.mask[start + 1 : start + len(ids)].tolist())
        at, stretches = 0, [(bit, len(list(stretch))) for bit, stretch in groupby(mask)]
        for bit, length in stretches if max_characters is None else stretches[:_MAX_STRETCHES]:
            decoded = tokenizer.decode(ids[at : at + length], skip_special_tokens=False)
            at += length
            yield from (
                f"{_LEARNED if bit else _READ}{line}" for line in _shortened(decoded, max_characters).split("\n")
            )
        if at < stop - start:
            yield f"{_READ}[... {count_of(stop - start - at, 'more token')} ...]"


def first_samples(batches: Batches, tokenizer: Any, text: bool = False) -> list[str]:
    """Return the first documents of every source, shortened; plain text only if `text` is true."""
    sources = (stream.source for stream in batches.streams)
    return [line for source in sources for line in examples(source, tokenizer, _EXAMPLE_CHARACTERS, text)]


def _shortened(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {count_of(len(text) - 2 * half, 'character')} ...] {text[-half:]}"
