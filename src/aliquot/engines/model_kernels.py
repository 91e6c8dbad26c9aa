"""train.compile: each decoder layer through torch.compile, attention left as it is.

Fuses what lies between the matrix products. The first step takes half a minute longer; compiled matmul are kept, so
that the next run starts faster.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aliquot.core.errors import MissingToolError
from aliquot.engines.base import EngineSpec
from aliquot.machine import matmul
from aliquot.machine.matmul import caches_kernels, copies_transposed, copy_pays
from aliquot.machine.torch_compile import compile_function, inductor_options
from aliquot.models.copying_linear import copy_in_backward
from aliquot.models.structure import decoder_layers
from aliquot.nn.attention.base import AttentionBackend
from aliquot.nn.attention.document_attention import register
from aliquot.nn.attention.tiled_attention import TiledAttention
from aliquot.nn.experts.sorted_experts import register as register_experts

if TYPE_CHECKING:
    from torch import nn
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch.fx import Graph

    from aliquot.distributed.topology import Topology
    from aliquot.engines.base import EngineSpec

_MANY = 1 << 20
_PERMUTE, _MM = torch.ops.aten.permute.default, torch.ops.aten.mm.default
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
        layer.forward = compile_function(layer.forward, options=options)


def _options() -> dict[str, Any] | None:
    options = inductor_options()
    if not copies_transposed("cpu", torch.bfloat16):
        return options
    try:
        return {**(options or {}), "post_grad_custom_post_pass": transposing_pass()}
    except ImportError:
        return options


def warm_up_kernels(attention: AttentionBackend | None, spec: EngineSpec, edges: tuple[int, ...]) -> None:
    """After each backward pass over a row with documents at `edges`: nothing, where all have been met."""
    if isinstance(attention, TiledAttention) and caches_kernels(spec.precision):
        attention.meet_all(edges, spec.document_tokens)


@functools.cache
def transposing_pass() -> CustomGraphPass:
    """A pass over what torch.compile makes of a layer: a product's transposed left side becomes a copy of it.

    oneDNN's AMX matmul take 2.6 times as long for a product whose left side is transposed, and every gradient of a
    linear layer's weight is one: of the gradient of its output, transposed, and its input. The copy takes half of what
    it saves.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class TransposingPass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for product in graph.find_nodes(op="call_function", target=_MM):
                left, right = product.args
                if not _is_transposed(left) or not copy_pays(_size(left, 0), _size(right, 0), _size(right, 1)):
                    continue
                with graph.inserting_before(product):
                    copy = graph.call_function(torch.ops.aliquot.transposed_copy.default, (left.args[0],))
                copy.meta["val"] = left.meta["val"].contiguous()
                product.replace_input_with(left, copy)

        def uuid(self) -> Any:
            """Of this pass in the key of what torch.compile keeps from run to run."""
            return get_hash_for_files((__file__, matmul.__file__))

    return TransposingPass()


def _is_transposed(node: Any) -> bool:
    """Whether this is the transposed view of a matrix in bf16 on CPU."""
    if node.target is not _PERMUTE:
        return False
    value = node.meta["val"]
    return bool(value.dtype == torch.bfloat16 and value.device.type == "cpu" and value.stride(-1) != 1)


def _size(node: Any, dimension: int) -> int:
    """Where rows have had several lengths, their number has a name and no size: taken for many."""
    size = node.meta["val"].shape[dimension]
    return size if isinstance(size, int) else _MANY


@functools.cache
def _kernel() -> Callable[[Tensor], Tensor]:
    """Twice as fast as torch's own copy."""
    return compile_function(lambda matrix: matrix.t().contiguous(), dynamic=True, options=inductor_options())


@torch.no_grad()
def _transposed_copy(matrix: Tensor) -> Tensor:
    return _kernel()(matrix)


def _planned_copy(matrix: Tensor) -> Tensor:
    return matrix.new_empty(matrix.shape[1], matrix.shape[0])


# An operation that torch.compile does not look into: it would write the copy in the loop that makes the matrix, column
# by column, whose lines of the cache drive each other out where its rows are a multiple of 4 KiB apart.
torch.library.define("aliquot::transposed_copy", "(Tensor matrix) -> Tensor")
torch.library.impl("aliquot::transposed_copy", "CPU", _transposed_copy)
torch.library.register_fake("aliquot::transposed_copy", _planned_copy)
