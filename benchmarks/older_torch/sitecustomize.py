"""Names of torch 2.13 in torch 2.11, for a GPU machine that has no newer torch and cannot install one.

Python imports this module when it starts, if this directory is in PYTHONPATH. benchmarks/gpu_all.py sets PYTHONPATH.
aliquot itself requires torch 2.13.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import varlen

_compile, _varlen_attn = torch.compile, varlen.varlen_attn


@functools.wraps(_compile)
def compile(*arguments: Any, recompile_limit: int | None = None, **settings: Any) -> Any:
    """torch 2.11 has one limit for all functions."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, recompile_limit or 0)
    return _compile(*arguments, **settings)


@functools.wraps(_varlen_attn)
def varlen_attn(*arguments: Any, enable_gqa: bool = False, **settings: Any) -> Any:
    """torch 2.11 takes grouped heads without being asked."""
    return _varlen_attn(*arguments, **settings)


if not hasattr(dist, "reduce_scatter_single"):
    torch.compile, varlen.varlen_attn = compile, varlen_attn
    dist.reduce_scatter_single = dist.reduce_scatter_tensor
    dist.all_gather_single = dist.all_gather_into_tensor
