"""What a model is made of, by transformers' own words: its repeated layers, and what multiplies each token."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the model, in order: the modules of a list that transformers says not to split, else those
    of its longest list."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    named = [layer for layers in lists for layer in layers if type(layer).__name__ in names]
    alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    return named or max(alike, key=len, default=[])


_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")


def matmul_parameters(model: PreTrainedModel) -> int:
    """Of experts, of which each token sees a few, as many as it sees."""
    config = model.config
    experts = next((n for key in EXPERTS if isinstance(n := getattr(config, key, None), int) and n), 0)
    chosen = next((n for key in CHOSEN if isinstance(n := getattr(config, key, None), int) and n), experts)
    matrices = 0.0
    for parameter in model.parameters():
        of_experts = parameter.ndim >= 3 and parameter.shape[0] == experts
        matrices += parameter.numel() * (chosen / experts if of_experts else 1) if parameter.ndim >= 2 else 0
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    return int(matrices if tied else matrices - embedding.weight.numel())


def attention_widths(config: PretrainedConfig) -> dict[int | None, int]:
    """Layers x heads x head size by the layers' window (None: all keys): what one (query, key) pair costs in attention,
    in multiply-adds of each product. Layers without attention (state-space, linear) are not in it.
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
