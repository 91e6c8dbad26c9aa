"""How many floating point operations one optimizer step of a decoder-only model needs: the numerator of MFU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt


def attention_pairs(lengths: npt.ArrayLike, window: int | None = None) -> int:
    """(query, key) pairs of causal attention inside documents of these lengths; a query sees `window` keys at most."""
    of_document = np.asarray(lengths, np.int64)
    unseen = np.maximum(0, of_document - window) if window is not None else np.zeros_like(of_document)
    return int((of_document * (of_document + 1) - unseen * (unseen + 1)).sum()) // 2


def model_flops(
    matmul_flops: int, tokens: int, lengths: npt.ArrayLike, attention_widths: Mapping[int | None, int]
) -> int:
    """Forward and backward of `tokens` real tokens in documents of `lengths`. `matmul_flops`: of a token in all
    products with weights (models/structure.py); `attention_widths` is layers x heads x head size, by the window of
    those layers.

    PaLM (Chowdhery et al. 2022, appendix B) counts 6 N + 12 L H Q T a token: 2 N forward and twice that backward for
    N weights in matrix products, and for attention 4 L H Q forward (scores and values) for each of T keys, three times
    that with backward. Here N leaves out the input embedding, which is a look-up, and the gradients of weights that
    learn nothing; T is replaced by the keys that a causal query really has inside its own document and window.
    Recomputation is not counted.
    """
    attention = sum(width * attention_pairs(lengths, window) for window, width in attention_widths.items())
    return matmul_flops * tokens + 12 * attention
