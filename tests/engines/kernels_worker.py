"""A rank trains on rows with all kinds of documents: how many shapes of attention's products does it meet, and when?
And when is there memory for logits?"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aliquot.engines import model_kernels
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.host.host_engine import HostEngine
from aliquot.nn.head_loss import FusedLoss
from tests.engines.cases import SMALL, llama, micro_batch
from tests.processes import as_ranks

# Of equal length, the first with a document that is cut into blocks.
ROWS = ([300, 84], [64] * 6, [128] * 3, [384], [150, 100, 90, 44], [20] * 19 + [4], [250, 134])


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    seen: set[object] = set()
    multiply = torch.bmm

    def watched(left: Tensor, right: Tensor) -> Tensor:
        seen.add(tuple((x.shape, x.stride(-1) == 1, x.stride(0) == x.shape[1] * x.shape[2]) for x in (left, right)))
        return multiply(left, right)

    torch.bmm = watched  # type: ignore[assignment]
    model_kernels.caches_kernels = lambda _: True  # whatever this CPU has
    kind, model = {"host": HostEngine, "fsdp": FsdpEngine}[arguments[0]], {**SMALL, "max_position_embeddings": 384}
    settings = {"precision": "bf16", "document_tokens": 384, "gradient_checkpointing": arguments[1]}
    engine, _ = llama(kind, model, rank, world_size, 384, seed=1, **settings)
    logits = watch_logits(engine) if isinstance(engine, HostEngine) else []
    counts = []
    for lengths in ROWS:
        engine.backward(micro_batch([torch.arange(length) % 60 for length in lengths]), 1 / 384, last=True)
        engine.step(1e-3, 1.0)
        counts.append(len(seen))
    engine.close()
    (folder / f"{rank}.json").write_text(json.dumps({"kernels": counts, "logits": logits}))


def watch_logits(engine: HostEngine) -> list[str]:
    """What happens in the next micro-batch, in this order."""
    happened: list[str] = []
    taken: list[weakref.ref[Tensor]] = []
    head_loss = engine._head_loss

    class Watched(FusedLoss):
        def room(self, *arguments: Any) -> Tensor:
            taken.append(weakref.ref(room := super().room(*arguments)))
            happened.append("taken")
            return room

        def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            happened.append("used" if arguments[-1] is taken[-1]() else "not used")
            return super().__call__(*arguments)

    engine._head_loss = Watched(head_loss.scratch_bytes, head_loss.logits_bytes)
    layer = engine._model.get_decoder().layers[0]
    layer.register_forward_pre_hook(lambda *_: happened.append("layer"))

    def backward(*_: object) -> None:
        happened.append("backward, there" if taken[-1]() is not None else "backward, gone")

    layer.register_full_backward_hook(backward)
    return happened


if __name__ == "__main__":
    as_ranks(work)
