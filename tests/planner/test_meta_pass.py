"""Bytes and products of the meta pass, against a real pass on CPU.

Memory traffic of compiled layers; and the meta trace of each backend equals its run on CPU.

The bound on kernel shapes holds for all document lengths, and is not far too high.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from aliquot.config.schema import RunConfig
from aliquot.data.workload import Workload
from aliquot.distributed.topology import RankLayout
from aliquot.engines.model_engine import ActivationMeter
from aliquot.machine import matmul
from aliquot.models import meta, model_calls
from aliquot.models.backward_pass import enable_checkpointing
from aliquot.models.shaped_model import ShapedModel, shaped_model
from aliquot.models.structure import materialise
from aliquot.nn.attention.document_attention import Documents, Scoring, attention_on
from aliquot.nn.attention.tiled_attention import TiledAttention
from aliquot.nn.head_loss import FusedLoss, GradientRows, head_loss_on
from aliquot.nn.logits_gradient import IGNORE
from aliquot.nn.product_shapes import filled_row
from aliquot.planner.meta_pass import micro_batch_costs
from aliquot.planner.meta_trace import MetaTrace
from aliquot.planner.micro_batch_cost import MicroBatchCost, Step, Work
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from tests.planner.shapes import GEMMA2, LLAMA, MISTRAL, QWEN3, planned_config

EDGES = (0, 300, 340, 400, 512)
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "mistral": MISTRAL}


def step(mode: str, precision: str = "bf16") -> Step:
    return Step(precision, mode, "cpu", looks_up=True, head_gradient=False)  # type: ignore[arg-type]


def cost_of(model: ShapedModel, how: Step, edges: tuple[int, ...], predicted: int) -> MicroBatchCost:
    return micro_batch_costs(model, how, edges, predicted)[0]


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.long), "mistral"])
def test_saved_bytes_match_a_real_forward_pass(name: str, mode: str) -> None:
    config = planned_config(MODELS[name])
    foreseen = cost_of(shaped_model(config), step(mode), EDGES, 500).saved_bytes

    saved_bytes = measured(meta.build(shaped_model(config).config).model, mode)
    # Alive, but not saved by autograd: the masks of the tiles and a few tensors [tokens, width], in and out.
    beside = 180_000 + 3 * 512 * 128 * 2
    assert 0.99 * saved_bytes <= foreseen <= 1.02 * saved_bytes + beside


def measured(model: nn.Module, mode: str) -> int:
    materialise(model, torch.device("cpu"), torch.device("cpu"), torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    enable_checkpointing(model, mode)  # type: ignore[arg-type]
    model.train()
    ids = torch.zeros(EDGES[-1], dtype=torch.int64)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    rows = embedding(ids).detach().requires_grad_(embedding.weight.requires_grad)
    saved = ActivationMeter(mode)  # type: ignore[arg-type]
    with saved.measure():
        model_calls.hidden_states(
            model, rows, ids, Documents(EDGES, attention_on("cpu", selective=mode == "selective"))
        )
    return saved.peak_bytes


def lora_config(folder: Path) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    whole = planned_config(LLAMA).model_dump(by_alias=True)
    return RunConfig(**{**whole, "model": {"path": str(folder)}, "adapter": {"r": 8}})


def test_saved_bytes_beside_a_frozen_model(tmp_path: Path) -> None:
    """Without gradients of their own its matrices keep no inputs."""
    config = lora_config(tmp_path)
    foreseen = cost_of(shaped_model(config), step("none"), EDGES, 500).saved_bytes
    of_whole = cost_of(shaped_model(planned_config(LLAMA)), step("none"), EDGES, 500).saved_bytes
    saved_bytes = measured(meta.build(shaped_model(config).config, adapter=config.adapter).model, "none")
    assert 0.99 * saved_bytes <= foreseen <= 1.02 * saved_bytes + 180_000 + 3 * 512 * 128 * 2
    assert foreseen != of_whole


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "model",
    [LLAMA, GEMMA2, *(pytest.param(model, marks=pytest.mark.long) for model in (QWEN3, MISTRAL))],
    ids=lambda model: model["model_type"],
)
def test_layers_add_up(model: dict[str, object]) -> None:
    """Few layers are run; twice as many must cost what running them all would."""
    few = cost_of(shaped_model(planned_config(model)), step("none"), EDGES, 500)
    more = cost_of(shaped_model(planned_config({**model, "num_hidden_layers": 8})), step("none"), EDGES, 500)
    whole = cost_of(shaped_model(planned_config({**model, "num_hidden_layers": 2})), step("none"), EDGES, 500)
    assert more.saved_bytes - few.saved_bytes == 2 * (few.saved_bytes - whole.saved_bytes)
    assert more.saved_bytes > few.saved_bytes > whole.saved_bytes


def test_checkpointing_saves_memory_and_costs_products() -> None:
    model = shaped_model(planned_config(LLAMA))
    costs = [cost_of(model, step(mode), EDGES, 500) for mode in ("none", "selective", "full")]
    saved = [cost.saved_bytes for cost in costs]
    assert saved[0] > saved[1] > saved[2]
    products = [sum(v * k[1] * k[2] * k[3] * k[4] for k, v in c.backward.items() if k[0] == "matmul") for c in costs]
    assert products[2] > products[1] >= products[0]


@pytest.mark.parametrize(
    ("frozen", "part"),
    [([], 1.0), (["model.embed_tokens.*", "model.layers.[01].*"], 0.75), (["lm_head.*"], 0.9), (None, 0.7)],
)
def test_products_match_the_flops_formula(frozen: list[str] | None, part: float, tmp_path: Path) -> None:
    """6 x matmul parameters x tokens where all learn, attention apart: the dispatch mode misses no product. None: an
    adapter."""
    config = lora_config(tmp_path) if frozen is None else planned_config(LLAMA, train={"freeze": frozen})
    model = shaped_model(config)
    cost = cost_of(model, step("none"), (0, 512), 512)
    flops = sum(
        2 * v * k[1] * k[2] * k[3] * k[4]
        for work in (cost.forward, cost.backward)
        for k, v in work.items()
        if k[0] == "matmul" and k[1] == 1
    )
    # The first layer's own inputs need no gradient where nothing below it learns; the formula goes by whole weights.
    assert flops == pytest.approx(
        model.built.matmul_flops * 512, rel=0.01 if not frozen and frozen is not None else 0.05
    )
    multiplied = sum(
        weight.numel()
        for name, weight in model.built.model.named_parameters()
        if weight.ndim == 2 and "embed_tokens" not in name
    )
    assert model.built.matmul_flops / (6 * multiplied) == pytest.approx(part, abs=0.07)


def test_logits_exist_once_and_in_the_compute_dtype() -> None:
    """As what the plan's forward pass holds beyond what is saved."""
    model = shaped_model(planned_config(LLAMA))
    cost = cost_of(model, step("none"), (0, 512), 512)
    logits = 512 * model.shape.vocabulary * 2
    assert logits <= cost.forward_bytes - cost.saved_bytes <= logits + (8 << 20)


SIZE = 1000 * 4


def memory_bytes(work: Work) -> float:
    return sum(amount for key, amount in work.items() if key[0] == "memory")


def moved(compiled: bool, fusing: bool = True) -> tuple[float, float]:
    """(bytes, calls) of two runs of elementwise operations with a product between them."""
    x, y = torch.empty(1000, device="meta"), torch.empty(1000, device="meta")
    matrix = torch.empty(10, 10, device="meta")
    with MetaTrace([]) as live:
        live.fusing = fusing
        total = (x * y).add_(x).view(10, 100).sigmoid().view(1000)
        product = matrix @ matrix
        total = total * 2
        assert product.shape == (10, 10) and total.shape == x.shape
        work = live.take_work()[compiled]
    return memory_bytes(work), work["calls",]


def test_a_run_is_one_pass() -> None:
    assert moved(compiled=True) == (3 * SIZE + 2 * SIZE, 3)  # x and y to total; total to total; and the product
    assert moved(compiled=False) == moved(compiled=True, fusing=False) == ((3 + 2 + 2 + 2) * SIZE, 7)


def test_compiled_layers_change_time_only() -> None:
    model = PlannedModel(planned_config(LLAMA))
    plain, compiled = (
        model.cost(Step("bf16", "none", "cpu", True, False, compiled), (0, 300, 512), 500) for compiled in (False, True)
    )
    for name in ("forward", "backward"):
        before, after = getattr(plain, name), getattr(compiled, name)
        assert 0.3 * memory_bytes(before) < memory_bytes(after) < 0.95 * memory_bytes(before)
        assert {key: n for key, n in before.items() if key[0] == "matmul"} == {
            key: n for key, n in after.items() if key[0] == "matmul"
        }
    assert compiled.saved_bytes == plain.saved_bytes and compiled.backward_bytes == plain.backward_bytes


def test_copies_convert_permute_or_transpose() -> None:
    rows = torch.empty(8, 6, 4, device="meta")
    with MetaTrace([]) as live:
        kept = [
            rows.clone(),
            rows.transpose(0, 1).contiguous(),  # pieces of four elements lie elsewhere
            rows.mT.contiguous(),  # every element does
            rows.bfloat16(),
            rows.mT.bfloat16().contiguous(),
        ]
        work, _ = live.take_work()
    assert len(kept) == 5
    assert {key[1] for key in work if key[0] == "memory"} == {"clone", "permute", "transpose", "convert"}


def test_copies_for_amx_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_FEWEST_COLUMNS", 64)
    monkeypatch.setattr(matmul, "_SMALLEST_RIGHT_SIDE", 1)
    model = PlannedModel(planned_config(LLAMA))
    plain, copying = (
        model.cost(Step("bf16", "none", "cpu", True, False, copies_transposed=copies), (0, 300, 512), 500)
        for copies in (False, True)
    )

    def of(kind: str, work: Work) -> float:
        return sum(amount for key, amount in work.items() if key[:2] == ("memory", kind))

    assert of("transpose", copying.backward) > of("transpose", plain.backward)
    # The same products, of sides that were exchanged.
    flops = [
        sum(n * key[1] * key[2] * key[3] * key[4] for key, n in each.backward.items() if key[0] == "matmul")
        for each in (plain, copying)
    ]
    assert flops[0] == flops[1]


TOKENS, LABELLED, WIDTH, VOCABULARY = 75, 61, 16, 101
SHORT_EDGES = (0, 700, 701, 760, 1060)
Followed = tuple[int, int, int, Work]  # bytes kept for the backward pass, most in each pass; operations


def followed(device: str, weights: list[Tensor], work: object) -> Followed:
    with MetaTrace(weights, device) as live:
        loss = work(live)  # type: ignore[operator]
        kept, forward_bytes, live.peak_bytes = live.live_bytes, live.peak_bytes, live.live_bytes
        loss.backward()
        return kept, forward_bytes, live.peak_bytes, live.take_work()[0]


def products(work: Work) -> dict[tuple[object, ...], float]:
    return {key: count for key, count in work.items() if key[0] == "matmul"}


def assert_alike(planned: Followed, real: Followed, beside: int) -> None:
    """`beside`: bytes of labels and indices, which are on CPU in both."""
    assert products(planned[3]) == products(real[3])
    for ours, theirs in zip(planned[:3], real[:3], strict=True):
        assert theirs - beside <= ours <= theirs
    for key, moved in planned[3].items():
        if key[0] == "memory" and key[2] > beside:
            assert moved == pytest.approx(real[3][key], abs=beside), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_head(dtype: torch.dtype, by_rows: bool, chunks: int) -> None:
    fused = FusedLoss(4 * VOCABULARY * 4, logits_bytes=VOCABULARY * dtype.itemsize * (-(-LABELLED // chunks)))
    labels = torch.zeros(TOKENS, dtype=torch.int64)
    labels[LABELLED:] = IGNORE

    def on(device: str) -> Followed:
        hidden = torch.zeros(TOKENS, WIDTH, dtype=dtype, device=device, requires_grad=True)
        weight = torch.zeros(VOCABULARY, WIDTH, dtype=dtype, device=device, requires_grad=True)
        room = torch.empty(50, WIDTH, dtype=dtype, device=device)
        rows = GradientRows((0, 50, 100, 101), lambda a, b: room[: b - a], lambda: None) if by_rows else None

        def work(live: MetaTrace) -> Tensor:
            own = replace(fused, blocks=live.two_for_all) if device == "meta" else fused
            return own(hidden, weight, labels, 0.5, rows)[1]

        return followed(device, [hidden, weight, room], work)

    assert_alike(on("meta"), on("cpu"), beside=64 * TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("selective", [False, True])
def test_attention(dtype: torch.dtype, window: int | None, selective: bool) -> None:
    def on(device: str) -> Followed:
        attention = attention_on("cpu", selective=selective)
        query, key, value = (
            torch.zeros(1, heads, SHORT_EDGES[-1], 8, dtype=dtype, device=device, requires_grad=True)
            for heads in (4, 2, 2)
        )
        documents = Documents(SHORT_EDGES, attention)

        def work(live: MetaTrace) -> Tensor:
            return attention.attend(query, key, value, documents, Scoring(0.5, window)).sum()

        return followed(device, [query, key, value], work)

    assert_alike(on("meta"), on("cpu"), beside=40 * SHORT_EDGES[-1])


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
