"""A decoder layer with a GPU's attention compiles to one graph, for all documents; a stand-in computes on the CPU."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.models import model_calls
from aliquot.nn.attention.cuda_attention import CudaAttention
from aliquot.nn.attention.document_attention import (
    DYNAMIC_SOURCES,
    IMPLEMENTATION,
    Documents,
    ReferenceAttention,
    Scoring,
    register,
)

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
