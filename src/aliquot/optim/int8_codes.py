"""Eight bits an element and one fp32 scale a block, the block's largest magnitude.

Codes are spread by a power, which gives small values relative precision: scale * (code / 127)^2 with a sign for the
first moment, scale * (code / 255)^4 for the second. What was decoded is encoded as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decoded(codes: Tensor, scales: Tensor, block: int, squared: bool) -> Tensor:
    """codes int8 (or uint8 if `squared`) [n], scales fp32 [n / block] -> fp32 [n]."""
    values = codes.float().view(-1, block)
    if squared:
        values = values.div_(255).square_().square_().mul_(scales[:, None])
    else:
        values.div_(127)
        values = values.mul_(values.abs()).mul_(scales[:, None])
    return values.view(-1)


def encoded(values: Tensor, block: int, squared: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp32 [n] -> (codes, as fp32 [n], scales [n / block]). With `noise`, uniform in [0, 1), rounded at random."""
    blocks = values.view(-1, block)
    scales = blocks.abs().amax(1)
    # A block of zeros has scale 0 and codes 0.
    codes = blocks.abs().div_(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).sqrt_()
    codes = codes.sqrt_().mul_(255) if squared else codes.mul_(127)
    codes = codes.view(-1)
    codes.add_(0.5 if noise is None else noise[: values.numel()]).floor_()
    if squared:
        # A second moment that is not zero never becomes zero: the update divides by its root.
        codes.clamp_(max=255)
        codes.copy_(torch.where(values > 0, codes.clamp(min=1), codes))
    else:
        codes.clamp_(max=127).mul_(values.sign())
    return codes, scales
