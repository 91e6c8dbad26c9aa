"""Find the parts of a transformers model: its decoder layers, and the matrices that multiply each token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of the model, in order.

    These are the listed modules that transformers says not to split, else the modules of the longest list.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    named = [layer for layers in lists for layer in layers if type(layer).__name__ in names]
    alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    return named or max(alike, key=len, default=[])


_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")


def fp32_weights(model: nn.Module) -> frozenset[str]:
    """Return the names of weights that transformers keeps in fp32 in a bf16 model, such as biases of routers."""
    parts: set[str] = getattr(model, "_keep_in_fp32_modules_strict", None) or set()
    return frozenset(name for name in model.state_dict() if any(part in name for part in parts))


def matmul_parameters(model: PreTrainedModel) -> int:
    """Count the parameters that multiply each token; of experts, as many as a token uses."""
    return int(sum(numel for _, numel in _matrices(model)))


def matmul_flops(model: PreTrainedModel) -> int:
    """Count the FLOPs of a token in matrices, forward and backward.

    Each weight costs 2 for its output, 2 for the gradient of its input if an earlier weight learns, and 2 for its own
    gradient if it learns.
    """
    order = {id(parameter): at for at, parameter in enumerate(model.parameters())}
    first = min((at for at, parameter in enumerate(model.parameters()) if parameter.requires_grad), default=len(order))
    embedding = model.get_input_embeddings().weight
    flops = 0.0
    for matrix, numel in _matrices(model):
        after = matrix is embedding or order[id(matrix)] > first  # a tied head comes last
        flops += numel * (2 + 2 * (after and first < len(order)) + 2 * matrix.requires_grad)
    return int(flops)


def _matrices(model: PreTrainedModel) -> Iterator[tuple[nn.Parameter, float]]:
    """Yield (matrix, number of its elements that multiply a token)."""
    config = model.config
    experts = next((n for key in EXPERTS if isinstance(n := getattr(config, key, None), int) and n), 0)
    chosen = next((n for key in CHOSEN if isinstance(n := getattr(config, key, None), int) and n), experts)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for parameter in model.parameters():
        holds_experts = parameter.ndim >= 3 and parameter.shape[0] == experts
        if parameter.ndim >= 2 and (tied or parameter is not embedding.weight):
            yield parameter, parameter.numel() * (chosen / experts if holds_experts else 1)


def attention_widths(config: PretrainedConfig) -> dict[int | None, int]:
    """Return layers x heads x head size, by the window of the layers (None: all keys).

    This is the cost of one (query, key) pair in attention, in multiply-adds of each product. Layers without attention
    (state-space, linear) do not count.
    """
    config = config.get_text_config(decoder=True)
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if not heads:
        return {}
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    window = getattr(config, "sliding_window", None)
    everywhere = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    widths: Counter[int | None] = Counter()
    for kind in kinds or [everywhere] * int(config.num_hidden_layers):
        if kind in _ATTENTION:
            widths[window if kind == "sliding_attention" else None] += heads * head_dim
    return dict(widths)
