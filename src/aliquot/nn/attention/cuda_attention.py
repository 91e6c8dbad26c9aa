"""Attention over packed documents on a GPU, with one kernel call per row.

`varlen_attn` runs if flash attention supports the layer (grouped heads, windows), inside the graph of a compiled
layer; the other kernels split the graph. `flex_attention` with a document mask
runs for soft-caps, sinks, fp32, and values that are wider or narrower than keys. Heads that are too narrow for both
kernels run one document at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from aliquot.machine.device_copies import send
from aliquot.machine.torch_compile import compile_function, outside_of_graphs
from aliquot.nn.attention.document_attention import Documents, Scoring, causal

_FLASH_HEAD_DIM = 256  # the widest head of flash attention
_FLEX_HEAD_DIM = 16  # the narrowest head of flex_attention
_BLOCK = 128  # tokens of a block of a mask of flex_attention
_GRAPHS = 64  # limit of compiled graphs of flex_attention; torch's limit of 8 is too low
_HALF = (torch.bfloat16, torch.float16)
_LARGE_SHARED_MEMORY = 160 << 10  # bytes of a GPU's thread block, which the kernels of flex_attention may need
# Kernels of flex_attention that need at most 69,632 bytes, for Gemma 2, DeepSeek and Llama in fp32 as well.
_SMALL_KERNELS: dict[str, Any] = {
    **dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 32), "num_stages": 1
}  # fmt: skip


@cache
def compiled_flex(backend: str = "inductor") -> Callable[..., Any]:
    """Compile flex_attention. A failed compilation raises, because the uncompiled function would store all scores.

    torch compiles a graph for each combination of window, scale, need of gradients, heads and dtype (the startup proof
    uses fp32), and graphs for rows of one token or one block.
    """
    return compile_function(flex_attention, fullgraph=True, backend=backend, recompile_limit=_GRAPHS)


@cache
def kernel_options(device: torch.device) -> dict[str, Any] | None:
    """Return options of flex_attention for a GPU with little shared memory, such as A10G, L4 and L40S (99 KiB).

    torch chooses blocks by the GPU's generation and the width of heads. The kernels of wide heads would not start.
    """
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # torch's type lacks the attribute
    return _SMALL_KERNELS if properties.shared_memory_per_block_optin < _LARGE_SHARED_MEMORY else None


@dataclass(frozen=True)
class CudaAttention:
    varlen: Callable[..., Any] = varlen_attn
    flex: Callable[..., Any] = field(default_factory=compiled_flex)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        if _flash_can(query, value, scoring):
            return self._by_varlen(query, key, value, documents, scoring)
        if min(query.shape[-1], value.shape[-1]) < _FLEX_HEAD_DIM:
            return attend_separately(query, key, value, documents, scoring, causal)
        return self._by_flex(query, key, value, documents, scoring)

    def _by_varlen(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        offsets, longest = documents.offsets, documents.longest
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D], as in the projections
        before = -1 if scoring.window is None else scoring.window - 1
        out: Tensor = self.varlen(
            q, k, v, offsets, offsets, longest, longest,
            scale=scoring.scaling, window_size=(before, 0), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return out[None]

    @outside_of_graphs
    def _by_flex(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        kind = (scoring.window, torch.bool)
        if kind not in documents.cuts:
            documents.cuts[kind] = _mask(documents.edges, scoring.window, query.device)
        # A tensor, because a number that changes between calls would break the graph.
        number = torch.promote_types(query.dtype, torch.float32)
        cap = None if scoring.softcap is None else torch.full((), scoring.softcap, dtype=number, device=query.device)

        def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
            assert cap is not None
            return cap * torch.tanh(score / cap)

        out, aux = self.flex(
            query, key, value, score_mod=None if cap is None else capped, block_mask=documents.cuts[kind],
            scale=scoring.scaling, enable_gqa=query.shape[1] != key.shape[1], return_aux=AuxRequest(lse=True),
            kernel_options=kernel_options(query.device),
        )  # fmt: skip
        if scoring.sinks is not None:
            # A sink adds its exponential to the denominator of the softmax, but has no value vector.
            share = torch.sigmoid(aux.lse - scoring.sinks.to(aux.lse.dtype)[None, :, None])
            out = out * share[..., None].to(out.dtype)
        result: Tensor = out.transpose(1, 2)
        return result.contiguous()


@outside_of_graphs
def attend_separately(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scoring: Scoring,
    attention: Callable[[Tensor, Tensor, Tensor, Scoring], Tensor],
) -> Tensor:
    """Attend to each document separately, by `attention`, which returns [1, H, T, D_v]."""
    slices = [slice(a, b) for a, b in pairwise(documents.edges)]
    outputs = [attention(query[:, :, at], key[:, :, at], value[:, :, at], scoring) for at in slices]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _flash_can(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    width = query.shape[-1]
    fits = width == value.shape[-1] and width <= _FLASH_HEAD_DIM and width % 8 == 0
    return fits and query.dtype in _HALF and scoring.softcap is None and scoring.sinks is None


def _mask(edges: tuple[int, ...], window: int | None, device: torch.device) -> BlockMask:
    """Return the document mask: a token attends to at most `window` tokens of its document, up to the token itself.

    The blocks of keys that a block of queries sees are known from `edges`. torch's create_block_mask would compute the
    mask of all pairs of tokens to find them.
    """
    length, blocks = edges[-1], -(-edges[-1] // _BLOCK)
    ends = send(torch.tensor(edges[1:]), device)
    document = torch.bucketize(torch.arange(length, device=device), ends, right=True)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (document[query] == document[key]) & (query >= key)
        return visible if window is None else visible & (query - key < window)

    def first_key(query: int) -> int:
        start = edges[bisect_right(edges, query) - 1]
        return start if window is None else max(start, query - window + 1)

    # A block of queries sees all blocks of keys from `first` up to the block itself. From `whole` on, each query of the
    # block sees all keys of these blocks, except for the block itself. At a partial block at the end of the row, torch
    # evaluates the mask in all blocks.
    first = [first_key(_BLOCK * block) // _BLOCK for block in range(blocks)]
    whole = [min(block, -(-first_key(_BLOCK * (block + 1) - 1) // _BLOCK)) for block in range(length // _BLOCK)]
    table = torch.tensor([first, whole if length % _BLOCK == 0 else [*whole, blocks - 1]], dtype=torch.int32)
    start, full = send(table, device)[:, :, None]
    columns = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    diagonal = columns.T
    masked = torch.where(columns < full - start, start + columns, diagonal)
    unmasked = torch.minimum(full + columns, diagonal)
    return BlockMask.from_kv_blocks(
        (full - start + 1)[None, None, :, 0], masked[None, None], (diagonal - full)[None, None, :, 0],
        unmasked[None, None], BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(length, length),
    )  # fmt: skip
