"""The bound on kernel shapes holds for all document lengths, and is not far too high."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aliquot.config.schema import RunConfig
from aliquot.data.workload import Workload
from aliquot.distributed.topology import RankLayout
from aliquot.models import model_calls
from aliquot.models.shaped_model import shaped_model
from aliquot.models.structure import materialise
from aliquot.nn.attention.document_attention import Documents
from aliquot.nn.attention.tiled_attention import TiledAttention
from aliquot.nn.head_loss import IGNORE, head_loss_on
from aliquot.nn.product_shapes import filled_row
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from tests.planner.shapes import LLAMA, planned_config

SMALL = LLAMA | {"num_hidden_layers": 1, "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
EXPERTS = SMALL | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
}  # fmt: skip
LENGTH, SEQUENCES = 384, 2


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shapes and orders of all matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm) and args[0].numel():
            self.seen.add(tuple((tuple(each.shape), each.stride(-1) == 1) for each in args[:2]))
        return func(*args, **(kwargs or {}))


def row(draw: random.Random) -> tuple[int, ...]:
    lengths: list[int] = []
    for _ in range(SEQUENCES):
        longest, room = draw.choice((10, 60, 200, 300, LENGTH)), LENGTH
        while room:
            lengths.append(min(room, draw.randint(1, longest)))
            room -= lengths[-1]
    return (0, *accumulate(lengths))


def planned(config: RunConfig) -> int | None:
    machine = replace(Machine.from_numbers(64, 2, 10), isa=("amx_bf16",))  # where micro-batches are filled up
    planner = Planner(PlannedModel(config), machine)
    return planner.plan(config, RankLayout(1, 1, 2, "cpu"), Workload.assumed(config)).kernel_shapes


def unpacked_row(draw: random.Random) -> tuple[int, ...]:
    lengths = [draw.randint(1, LENGTH) for _ in range(draw.randint(1, SEQUENCES))]
    edges = (0, *accumulate(lengths))
    filled = filled_row(edges[-1], len(lengths), LENGTH)
    return edges if filled == edges[-1] else (*edges, filled)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "rows"),
    [(SMALL, row), (EXPERTS, row), (SMALL, unpacked_row)],
    ids=["llama", "qwen3_moe", "not-packed"],
)
def test_a_model_meets_no_more(model: dict[str, Any], rows: Callable[[random.Random], tuple[int, ...]]) -> None:
    config = planned_config(
        model,
        data={"sequence_length": LENGTH, "packing": rows is row},
        train={"per_device_train_batch_size": SEQUENCES},
        shard={"engine": "fsdp"},
    )
    real: Any = shaped_model(config).built.model.train()
    materialise(real, torch.device("cpu"), torch.device("cpu"))
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    for weight in real.parameters():
        weight.data.normal_(generator=generator)
    with Products() as products:
        for _ in range(30):
            edges = rows(draw)
            ids = torch.randint(0, 256, (edges[-1],), generator=generator)
            labels = torch.where(torch.rand(len(ids), generator=generator) < draw.random(), IGNORE, ids)
            positions = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])
            hidden = model_calls.hidden_states(real, ids, positions, Documents(edges, TiledAttention()))
            head_loss_on("cpu")(hidden, real.get_output_embeddings().weight, labels, 1.0)[1].backward()
    most = planned(config)
    # The head's rows and those of a micro-batch are of any combination, few of which come in thirty draws.
    assert most is not None and most / (2 if rows is row else 8) < len(products.seen) <= most


def test_one_document_a_call_has_no_bound() -> None:
    recurrent = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 256, "state_size": 4}
    assert planned(planned_config(recurrent)) is None


def test_remainder_of_a_batch_is_another_row_length() -> None:
    even, odd = (
        planned(planned_config(SMALL, train={"global_batch_size": total, "per_device_train_batch_size": 2}))
        for total in (16, 17)
    )
    assert even is not None and odd is not None and even < odd
