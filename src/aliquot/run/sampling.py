"""Sample continuations of prompts during training, with the weights as they train, divided among the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, StoppingCriteria

from aliquot.core.errors import UsageError
from aliquot.core.on_rank_0 import run_on_all_ranks
from aliquot.data.data_order import drawn_seed
from aliquot.nn.token_loss import TokenSequence
from aliquot.run.caller_batch import check_ids

if TYPE_CHECKING:
    from aliquot.run.trainer import Trainer

_MOST_ROWS = 64  # samples that are drawn together
_DRAW_BYTES = 32  # for each entry of the vocabulary: scores, probabilities and their sums, some in fp64
_COLD = 1e-4  # below this temperature, the most likely token is drawn


@dataclass(frozen=True)
class Sample:
    """A continuation of a prompt.

    Attributes:
        prompt: The index of the prompt.
        ids: The token ids of the prompt and of the continuation, with its last token, which may be an end.
        prompt_tokens: The number of ids of the prompt.
        logprobs: The log-probability of each drawn token, at temperature 1 and without `top_p`, as `forward` gives it.
        text: The continuation as text, without special tokens, but with the stop text.
        is_complete: Whether the continuation ended by itself, at an end or a stop text, before `max_tokens`.
    """

    prompt: int
    ids: list[int]
    prompt_tokens: int
    logprobs: list[float]
    text: str
    is_complete: bool

    def sequence(self, **arrays: float | Sequence[float]) -> TokenSequence:
        """Return the sequence for `forward_backward`, which learns the continuation.

        Args:
            arrays: values of the drawn tokens, one for each, or one number for all. `logprobs` is there already.
        """
        learned = [index >= self.prompt_tokens for index in range(len(self.ids))]
        return TokenSequence(self.ids, learned, {"logprobs": self.logprobs, **arrays})


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn."""

    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...]


@dataclass(frozen=True)
class _Row:
    prompt: int
    ids: list[int]
    seed: int


def sample_all(
    trainer: Trainer,
    prompts: Sequence[str | Sequence[int]],
    copies: int,
    drawing: Drawing,
    seed: int,
    between_turns: Callable[[], None],
) -> list[Sample]:
    """Return `copies` samples of each prompt, in their order, on every rank. Collective."""
    rows = run_on_all_ranks(trainer.ranks, lambda: _rows(trainer, prompts, copies, drawing, seed))
    # Prompts of like length together: a longer prompt is read token by token from the length of the shortest one.
    ordered = sorted(range(len(rows)), key=lambda index: len(rows[index].ids))
    rank, world_size = trainer.ranks.rank, trainer.ranks.world_size
    longest = max((len(row.ids) for row in rows), default=0) + drawing.max_tokens
    count = max(1, min(rows_at_once(trainer, longest), -(-len(ordered) // world_size)))
    turns = [ordered[start : start + count] for start in range(0, len(ordered), count)]
    results: list[tuple[int, list[Any]]] = []
    for first in range(0, len(turns), world_size):
        if first:
            between_turns()
        # A rank without rows draws the last ones again, because engines may gather weights in every forward pass.
        turn = turns[min(first + rank, len(turns) - 1)]
        drawn = _draw(trainer, [rows[index] for index in turn], drawing)
        if first + rank < len(turns):
            results += zip(turn, drawn, strict=True)
        trainer.watchdog.beat()
    gathered = dict(result for rank_results in trainer.ranks.gather(results) for result in rank_results)
    return [Sample(rows[index].prompt, *gathered[index]) for index in range(len(rows))]


def rows_at_once(trainer: Trainer, tokens: int) -> int:
    """Return how many samples of so many tokens a rank draws together: those whose caches fit beside its state."""
    text, plan = trainer.resolved.source.config.get_text_config(decoder=True), trainer.resolved.plan
    if plan is None:
        return _MOST_ROWS
    heads = getattr(text, "num_attention_heads", None) or 1
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    width = head_width * (getattr(text, "num_key_value_heads", None) or heads)
    itemsize = 2 if plan.precision == "bf16" else 4
    cache_bytes = 2 * text.num_hidden_layers * width * itemsize * tokens
    return max(1, min(_MOST_ROWS, int(plan.unused_bytes // (cache_bytes + _DRAW_BYTES * text.vocab_size))))


def _rows(
    trainer: Trainer, prompts: Sequence[str | Sequence[int]], copies: int, drawing: Drawing, seed: int
) -> list[_Row]:
    if not (drawing.temperature >= 0 and 0 < drawing.top_p <= 1 and drawing.max_tokens > 0 and all(drawing.stop)):
        raise UsageError(
            f"sample: {drawing} is impossible: temperature must be 0 or more, top_p above 0 and at most 1,"
            " max_tokens positive, and stop texts not empty"
        )
    if isinstance(prompts, str) or copies < 1:
        raise UsageError("sample: give a list of prompts, not one text, and n of at least 1")
    run, rows = trainer.resolved, list[_Row]()
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = [*run.data.prefix, *run.tokenizer.encode(prompt, add_special_tokens=False)]
        else:
            ids = [int(token) for token in prompt]
        check_ids(trainer, torch.tensor(ids))
        most = run.source.positions or math.inf
        if not ids or len(ids) + drawing.max_tokens > most:
            raise UsageError(
                f"prompt {number} has {len(ids)} tokens, max_tokens is {drawing.max_tokens}, and the model's context"
                f" has {most}: give a prompt of at least one token, or lower max_tokens"
            )
        seeds = (drawn_seed("sample", trainer.config.run.seed, f"{seed}:{number}:{copy}") for copy in range(copies))
        rows += [_Row(number, ids, row_seed) for row_seed in seeds]
    return rows


def _draw(trainer: Trainer, rows: list[_Row], drawing: Drawing) -> list[list[Any]]:
    """Return the fields of a sample for each row. The rows are sorted by the lengths of their prompts."""
    run, shortest = trainer.resolved, len(rows[0].ids)
    ids = torch.tensor([row.ids[:shortest] for row in rows])
    ends = {token for token in [run.tokenizer.eos_token_id, *run.answer_ends] if token is not None}
    draw, stop = _RowDraws(rows, drawing), _RowEnds(run.tokenizer, rows, ends, drawing)
    generated = trainer.model.engine.generate(
        ids, max_new_tokens=len(rows[-1].ids) - shortest + drawing.max_tokens, do_sample=False,
        logits_processor=[draw], stopping_criteria=[stop], eos_token_id=None, pad_token_id=0,
        attention_mask=torch.ones_like(ids), use_cache=True,
    )  # fmt: skip
    fields, logprobs = list[list[Any]](), torch.stack(draw.logprobs, 1).tolist()
    for index, (row, tokens, values) in enumerate(zip(rows, generated.tolist(), logprobs, strict=True)):
        length, is_complete = stop.lengths[index]
        text = run.tokenizer.decode(tokens[len(row.ids) : length], skip_special_tokens=True)
        drawn = values[len(row.ids) - shortest : length - shortest]
        fields.append([tokens[:length], len(row.ids), drawn, text, is_complete])
    return fields


class _RowDraws(LogitsProcessor):  # type: ignore[misc]
    """Draws the next token of each row by random numbers of its own, so that rows do not depend on each other.

    transformers then takes the only token whose score is finite. Within its prompt, a row gets the next prompt token.
    """

    def __init__(self, rows: Sequence[_Row], drawing: Drawing) -> None:
        self._drawing = drawing
        draws = [torch.rand(drawing.max_tokens, generator=torch.Generator().manual_seed(row.seed)) for row in rows]
        self._uniform = torch.stack(draws)
        self._lengths = torch.tensor([len(row.ids) for row in rows])
        self._prompts = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)
        self._scores: Tensor | None = None  # what transformers gets: the same buffer in every step
        self.logprobs: list[Tensor] = []  # of the chosen tokens, [rows] each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position, device = input_ids.shape[1], scores.device
        number = (position - self._lengths).clamp(0, self._drawing.max_tokens - 1)
        chosen = self._choose(scores, self._uniform.gather(1, number[:, None]).to(device))
        if position < self._prompts.shape[1]:
            is_prompt = (position < self._lengths)[:, None].to(device)
            chosen = torch.where(is_prompt, self._prompts[:, position, None].to(device), chosen)
        self.logprobs.append((scores.gather(1, chosen) - scores.logsumexp(1, keepdim=True))[:, 0].cpu())
        if self._scores is None:
            self._scores = torch.full_like(scores, -math.inf)
        else:
            self._scores.scatter_(1, input_ids[:, -1:], -math.inf)
        return self._scores.scatter_(1, chosen, 0.0)

    def _choose(self, scores: Tensor, uniform: Tensor) -> Tensor:
        """Return the drawn token of each row, [rows, 1], by inverting the cumulative distribution."""
        drawing = self._drawing
        if drawing.temperature < _COLD:
            return scores.argmax(-1, keepdim=True)
        probabilities = (scores if drawing.temperature == 1 else scores / drawing.temperature).softmax(-1)
        if drawing.top_p == 1:
            return _invert(probabilities, uniform)
        # The smallest set of the most likely tokens with at least `top_p` together.
        ordered, tokens = probabilities.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= drawing.top_p] = 0
        return tokens.gather(1, _invert(ordered, uniform))


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the place in each row of weights [rows, V] up to which a share `uniform` [rows, 1] of its sum lies."""
    sums = weights.double().cumsum(-1)
    drawn = torch.searchsorted(sums, uniform.double() * sums[:, -1:], right=True)
    return drawn.clamp(max=weights.shape[1] - 1)


class _RowEnds(StoppingCriteria):  # type: ignore[misc]
    """Ends a row after an end token, a stop text or `max_tokens`."""

    def __init__(self, tokenizer: Any, rows: Sequence[_Row], ends: set[int], drawing: Drawing) -> None:
        self._tokenizer, self._ends, self._drawing = tokenizer, ends, drawing
        self._starts = [len(row.ids) for row in rows]
        # Of each row that has ended: its length in tokens, with its prompt, and whether it ended before `max_tokens`.
        self.lengths: dict[int, tuple[int, bool]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        length = input_ids.shape[1]
        for row, (ids, start) in enumerate(zip(input_ids.tolist(), self._starts, strict=True)):
            if row not in self.lengths and length > start:
                text = self._tokenizer.decode(ids[start:]) if self._drawing.stop else ""
                is_end = ids[-1] in self._ends or any(stop in text for stop in self._drawing.stop)
                if is_end or length - start == self._drawing.max_tokens:
                    self.lengths[row] = length, is_end
        return torch.tensor([row in self.lengths for row in range(len(self._starts))], device=input_ids.device)
