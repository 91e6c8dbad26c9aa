"""train.compile: each decoder layer through torch.compile, attention left as it is.

Fuses what lies between the matrix products. The first step takes half a minute longer; compiled kernels are kept, so
that the next run starts faster.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import torch

from aliquot.core.errors import MissingToolError
from aliquot.machine.compile_cache import compiled
from aliquot.machine.inductor import kernel_options
from aliquot.machine.kernels import copies_transposed
from aliquot.models.copying_linear import copy_in_backward
from aliquot.models.structure import decoder_layers
from aliquot.nn.attention.document_attention import register
from aliquot.nn.experts.sorted_experts import register as register_experts

if TYPE_CHECKING:
    from torch import nn

    from aliquot.distributed.topology import Topology
    from aliquot.engines.base import EngineSpec

_COMPILERS = ("g++", "clang++", "c++")


def compile_or_copy(model: nn.Module, spec: EngineSpec, topology: Topology) -> None:
    """Compile the layers if that is wanted; if not, have their products made from copies where that is faster. To be
    called before anything wraps the layers. Raises UserError as `compile_layers` does."""
    if spec.compile == "layers":
        compile_layers(model, topology.threads)
    elif copies_transposed(topology.device, spec.compute_dtype):
        copy_in_backward(model)


def compile_layers(model: nn.Module, threads: int) -> None:
    """To be called before anything wraps the layers. Raises UserError where there is no C++ compiler."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), *_COMPILERS) if name):
        raise MissingToolError(
            "train.compile: layers needs a C++ compiler (g++ or clang++), and none is installed: use none"
        )
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    register(compiled=True)
    register_experts(compiled=True)
    options = _options()
    for layer in decoder_layers(model):
        # Not layer.compile(): it compiles the hooks, too, in which a layer waits for its weights.
        layer.forward = compiled(layer.forward, options=options)


def _options() -> dict[str, Any] | None:
    options = kernel_options()
    if not copies_transposed("cpu", torch.bfloat16):
        return options
    try:
        from aliquot.engines.transposing_pass import TransposingPass
    except ImportError:
        return options
    return {**(options or {}), "post_grad_custom_post_pass": TransposingPass()}
