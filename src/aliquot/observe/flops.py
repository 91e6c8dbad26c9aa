"""How many floating point operations one optimizer step of a decoder-only model needs: the numerator of MFU."""

from __future__ import annotations

from collections.abc import Iterable


def attention_pairs(lengths: Iterable[int]) -> int:
    """(query, key) pairs of causal attention inside documents of these lengths."""
    return sum(length * (length + 1) // 2 for length in lengths)


def model_flops(matmul_parameters: int, tokens: int, pairs: int, attention_width: int) -> int:
    """Forward and backward of `tokens` real tokens; `attention_width` is layers x heads x head size.

    PaLM (Chowdhery et al. 2022, appendix B) counts 6 N + 12 L H Q T a token: 2 N forward and twice that backward for
    N weights in matrix products, and for attention 4 L H Q forward (scores and values) for each of T keys, three times
    that with backward. Here N leaves out the input embedding, which is a look-up, and T is replaced by the keys that a
    causal query really has inside its own document. Recomputation is not counted.
    """
    return 6 * matmul_parameters * tokens + 12 * attention_width * pairs
