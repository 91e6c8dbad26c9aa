"""Packed documents are exactly isolated: no logit and no gradient of one depends on a token of another.

A decoder layer with a GPU's attention compiles to one graph, for all documents.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.core.errors import UnsupportedModelError
from aliquot.models import model_calls
from aliquot.nn.attention.cuda_attention import CudaAttention
from aliquot.nn.attention.document_attention import (
    DYNAMIC_SOURCES,
    IMPLEMENTATION,
    Documents,
    ReferenceAttention,
    Scoring,
    attention_on,
    document_attention,
    register,
)
from aliquot.nn.logits_gradient import token_cross_entropy
from tests.engines.cases import SMALL, micro_batch

MODELS = [
    {"model_type": "llama"},
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "qwen3"},
    {"model_type": "mistral", "sliding_window": 5},
]


def build(shape: dict[str, object], implementation: str = IMPLEMENTATION) -> torch.nn.Module:
    register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SMALL, **shape})
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()


def logits_of(model: torch.nn.Module, sequence: list[torch.Tensor]) -> torch.Tensor:
    batch = micro_batch(sequence)
    documents = Documents(batch.edges, attention_on("cpu"))
    return model_calls.logits(model, batch.input_ids, batch.position_ids, documents)


def three_documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 67, (n,), generator=generator) for n in (11, 1, 17)]


@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s["model_type"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changing_one_document_changes_no_logit_of_another(shape: dict[str, object], dtype: torch.dtype) -> None:
    model = build(shape).to(dtype)
    sequence = three_documents()
    before = logits_of(model, sequence)[0]
    for position in range(11):
        changed = [d.clone() for d in sequence]
        changed[0][position] = (changed[0][position] + 1) % 67
        after = logits_of(model, changed)[0]
        assert torch.equal(after[11:], before[11:])
        assert not torch.equal(after[position], before[position])


@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s["model_type"])
def test_changing_one_document_changes_no_gradient_contribution_of_another(shape: dict[str, object]) -> None:
    model = build(shape)

    def gradients_of_last(sequence: list[torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        labels = micro_batch(sequence).labels.clone()
        labels[:12] = -100  # only the third document's loss
        token_cross_entropy(logits_of(model, sequence), labels).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    sequence = three_documents()
    before = gradients_of_last(sequence)
    changed = [(sequence[0] + 5) % 67, (sequence[1] + 9) % 67, sequence[2]]
    for ours, theirs in zip(gradients_of_last(changed), before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s["model_type"])
def test_packed_equals_each_document_alone_in_stock_transformers(shape: dict[str, object]) -> None:
    model, stock = build(shape), build(shape, "eager")
    stock.load_state_dict(model.state_dict())
    sequence = three_documents()
    alone = torch.cat([stock(input_ids=document[None]).logits[0] for document in sequence])
    torch.testing.assert_close(logits_of(model, sequence)[0], alone, rtol=1e-4, atol=1e-5)


def test_generation_equals_stock_transformers() -> None:
    model, stock = build({"model_type": "llama"}), build({"model_type": "llama"}, "eager")
    stock.load_state_dict(model.state_dict())
    ids = three_documents()[0][None]
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))


def test_what_attention_does_not_know_is_an_error() -> None:
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    for more in ({"dropout": 0.1}, {"position_bias": query}):
        with pytest.raises(UnsupportedModelError, match=next(iter(more))):
            document_attention(torch.nn.Identity(), query, key, value, None, **more)
    with pytest.raises(UnsupportedModelError, match="a mask"):
        document_attention(torch.nn.Identity(), query, key, value, torch.zeros(1, 1, 4, 4))
    document_attention(torch.nn.Identity(), query, key, value, None, position_bias=None, position_ids=key)


MODEL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
ROWS = [(20, 30, 14), (5, 3, 2, 20, 34), (64,), (33, 31)]  # document lengths


@torch.library.custom_op("aliquot_tests::varlen", mutates_args=())
def kernel(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: float, window: int) -> Tensor:
    edges = tuple(offsets.tolist())
    assert longest >= max(b - a for a, b in pairwise(edges))
    scoring = Scoring(scale, None if window < 0 else window + 1)
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    return ReferenceAttention().attend(*rows, Documents(edges, None), scoring)[0]


@kernel.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: float, window: int) -> Tensor:
    return torch.empty_like(q)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, _: Tensor, longest: int, __: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    return kernel(q, k, v, offsets, longest, scale, window_size[0])


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("qwen3", "mistral"))]
)
@torch.compiler.config.patch(dynamic_sources=DYNAMIC_SOURCES)
def test_layer_is_one_graph_for_all_documents(kind: str) -> None:
    torch._dynamo.reset()
    register()
    config = AutoConfig.for_model(kind, **MODEL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=torch.bfloat16)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[object]) -> object:
        graphs.append(graph)
        return graph.forward

    ids, positions = torch.arange(64), torch.arange(64)
    compiled = torch.compile(model.model.layers[0].forward, backend=backend)
    plain = model.model.layers[0].forward
    for number, lengths in enumerate(ROWS):
        documents = Documents((0, *accumulate(lengths)), CudaAttention(varlen=varlen)).on(torch.device("cpu"))
        with torch.no_grad():
            expected = model_calls.logits(model, ids, positions, documents)
            model.model.layers[0].forward = compiled
            found = model_calls.logits(model, ids, positions, documents)
            model.model.layers[0].forward = plain
        assert torch.equal(found, expected)
        assert len(graphs) == 1, f"row {number} compiled again"
    assert any("varlen" in str(node.target) for node in graphs[0].graph.nodes)
