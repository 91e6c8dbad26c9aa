"""A micro-batch: one row of tokens that consists of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Self, SupportsFloat

import torch
from torch import Tensor

from aliquot.nn.head_loss import Chosen, choose
from aliquot.nn.logits_gradient import IGNORE
from aliquot.nn.preference_loss import RatedAnswers
from aliquot.nn.row_loss import RowLoss


@dataclass(frozen=True)
class MicroBatch:
    """T tokens of one or several packed sequences, concatenated in one row.

    `labels[t]` is the token that follows token t (already shifted), or -100 for no prediction: at the last token of a
    document, at padding, and before a token that is not trained on, such as a token of a user's message.
    `edges` are the document boundaries 0 = e0 < e1 < ... = T; attention and positions never cross a boundary. Padding
    at the end of the row is a separate document whose labels are all -100.
    """

    input_ids: Tensor  # int64 [T]
    labels: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], restart at 0 at every document boundary
    edges: tuple[int, ...]
    seed: int = 0  # seed of dropout
    calls: int = 0  # the largest number of documents of any rank, if the model runs one forward pass per document
    source: int = 0  # index of the data source
    chosen: Chosen | None = None  # tokens for which the loss is computed; None: the loss selects them by `labels`
    row_loss: RowLoss | None = None  # replaces the cross-entropy
    mismatched: MicroBatch | None = None  # answers to the prompts of rated answers, for the divergence of KTO

    @property
    def predicted(self) -> int:
        """Return the number of tokens with a label, over which the loss is summed."""
        return int((self.labels != IGNORE).sum())

    def metrics(self, result: SupportsFloat | Tensor) -> dict[str, float]:
        """Return the summed loss, and for preferences sums of further metrics, from the result of an engine."""
        if self.row_loss is None:
            return {"loss": float(result)}
        assert isinstance(result, Tensor)
        return self.row_loss.metrics(result)

    def to(self, device: torch.device) -> MicroBatch:
        """Copy the micro-batch to `device` asynchronously.

        Counts of labels are computed before the copy, because reading them from a GPU later would wait for the GPU.
        """
        if self.input_ids.device.type == device.type:
            return self
        chosen = self.chosen or choose(self.labels, self.row_loss)
        rows = torch.stack([self.input_ids, self.labels, self.position_ids]).pin_memory()
        ids, labels, positions = rows.to(device, non_blocking=True)
        return replace(
            self,
            input_ids=ids,
            labels=labels,
            position_ids=positions,
            chosen=chosen.to(device),
            row_loss=self.row_loss and self.row_loss.to(device),
            mismatched=self.mismatched and self.mismatched.to(device),
        )

    def with_divergence(self, divergence: float) -> MicroBatch:
        """Return the micro-batch of rated answers without `mismatched`, from which `divergence` was computed."""
        answers, chosen = self.row_loss, self.chosen
        if not isinstance(answers, RatedAnswers):
            return self
        if chosen is not None and isinstance(chosen.row_loss, RatedAnswers):
            chosen = replace(chosen, row_loss=replace(chosen.row_loss, divergence=divergence))
        answers = replace(answers, divergence=divergence)
        return replace(self, row_loss=answers, chosen=chosen, mismatched=None)

    def with_equal_calls(self) -> MicroBatch:
        """Add one-token documents without a label, so that all ranks run the same number of forward passes.

        Engines that all-gather weights in every forward pass need the same number on all ranks.
        """
        missing_calls = self.calls - (len(self.edges) - 1)
        if missing_calls <= 0:
            return self
        mismatched = self.mismatched and self.mismatched.with_equal_calls()
        zeros = torch.zeros(missing_calls, dtype=torch.int64, device=self.input_ids.device)
        ids, positions = (torch.cat([row, zeros]) for row in (self.input_ids, self.position_ids))
        labels = torch.cat([self.labels, torch.full_like(zeros, IGNORE)])
        edges = (*self.edges, *range(self.edges[-1] + 1, self.edges[-1] + 1 + missing_calls))
        return replace(self, input_ids=ids, labels=labels, position_ids=positions, edges=edges, mismatched=mismatched)

    @classmethod
    def empty(cls, calls: int = 0) -> Self:
        """Return a micro-batch of one token without a label, for a rank that has no sequences.

        The rank joins every collective with this micro-batch and contributes gradients of zero.
        """
        zero = torch.zeros(1, dtype=torch.int64)
        return cls(zero, torch.full_like(zero, IGNORE), zero, (0, 1), calls=calls)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a micro-batch or in another dataclass, also in inner dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for attribute in vars(value).values():
            yield from tensors_in(attribute)
