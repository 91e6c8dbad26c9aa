"""The kernels that compute a model: compiled decoder layers, faster matrix products, and their warm-up.

With `train.compile: layers`, torch.compile compiles each decoder layer and fuses the operations between matrix
products. On CPU, attention is not part of the compiled graphs. The first step takes half a minute longer. torch caches
the compiled kernels, so that the next run starts faster.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aliquot.core.errors import MissingToolError
from aliquot.engines.base import EngineSpec
from aliquot.machine import matmul
from aliquot.machine.matmul import caches_kernels, copy_pays, multiplies_with_amx
from aliquot.machine.torch_compile import compile_function, cpp_compiler, inductor_options
from aliquot.models.backward_pass import copy_in_backward, enable_checkpointing
from aliquot.models.structure import decoder_layers
from aliquot.nn.attention.document_attention import DYNAMIC_SOURCES, AttentionBackend, register
from aliquot.nn.attention.tiled_attention import TiledAttention
from aliquot.nn.experts.sorted_experts import register as register_experts
from aliquot.nn.head_loss import FusedLoss, head_loss_on

if TYPE_CHECKING:
    from torch import nn
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch.fx import Graph

    from aliquot.distributed.topology import Topology

_MANY = 1 << 20
_PERMUTE, _MM = torch.ops.aten.permute.default, torch.ops.aten.mm.default
# By default, torch's partitioner saves results of cheap operations that are inputs of matrix products in the backward
# pass, such as norms and activation functions. It never recomputes products, attention and other costly operations.
_SELECTIVE = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}


def prepare_layers(model: nn.Module, spec: EngineSpec, topology: Topology) -> None:
    """Enable activation checkpointing and compile the layers, as far as `spec` asks for them.

    Layers that are not compiled copy transposed matrices if copies speed up products. Call this before anything wraps
    the layers. Raises MissingToolError without a C++ compiler.
    """
    enable_checkpointing(model, spec.eager_checkpointing, spec.dropout)
    if spec.compile == "layers":
        compile_layers(model, topology, spec.gradient_checkpointing == "selective")
    elif multiplies_with_amx(topology.device, spec.precision):
        copy_in_backward(model)


def run_head_loss(spec: EngineSpec, device: str) -> FusedLoss:
    """Return the fused loss with the kernels of a run."""
    copies = multiplies_with_amx(device, spec.precision)
    return head_loss_on(device, copies_transposed=copies, compiled=spec.compile == "layers")


def compile_layers(model: nn.Module, topology: Topology, selective: bool = False) -> None:
    """Compile every decoder layer, before anything wraps the layers. Raises MissingToolError without a C++ compiler.

    With `selective`, the backward pass recomputes all operations of a layer except for matrix products, reductions and
    attention. The policy of torch.utils.checkpoint would not do that, because it does not see the operations of a
    compiled graph.
    """
    if cpp_compiler(os.environ) is None:
        raise MissingToolError(
            "train.compile: layers needs a C++ compiler (g++ or clang++), and none is installed: use none"
        )
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(topology.threads))
    register(splits_graphs=topology.device == "cpu")
    register_experts(compiled=True)
    options = _compile_options()
    for layer in decoder_layers(model):
        # layer.compile() would also compile the hooks in which a layer waits for its weights.
        layer.forward = _with_settings(
            compile_function(layer.forward, options=options), _SELECTIVE if selective else {}
        )


def _with_settings(compiled: Callable[..., Any], partitioner: dict[str, bool]) -> Callable[..., Any]:
    """Return a compiled function that sets torch's global settings of compilations for the time of its calls.

    The first call for each kind of input compiles the function. `partitioner`: settings of the code that chooses what a
    graph saves for its backward pass.
    """
    from torch._functorch import config as partitioner_config

    @functools.wraps(compiled)
    def call(*arguments: Any, **options: Any) -> Any:
        settings = torch.compiler.config
        sources = ",".join(filter(None, (settings.dynamic_sources, DYNAMIC_SOURCES)))
        with settings.patch(dynamic_sources=sources), partitioner_config.patch(partitioner):  # type: ignore[attr-defined]
            return compiled(*arguments, **options)

    return call


def _compile_options() -> dict[str, Any] | None:
    options = inductor_options()
    if multiplies_with_amx("cpu", "bf16"):
        return {**(options or {}), "post_grad_custom_post_pass": transposing_pass()}
    return options


def warm_up_kernels(attention: AttentionBackend | None, spec: EngineSpec, edges: tuple[int, ...]) -> None:
    """Create the CPU attention kernels for all document lengths of a run, so that memory does not grow later.

    Call this after every backward pass: only the first call for a row length creates kernels.
    """
    if isinstance(attention, TiledAttention) and caches_kernels(spec.precision):
        attention.warm_up_shapes(edges, spec.document_tokens)


@functools.cache
def transposing_pass() -> CustomGraphPass:
    """Return a torch.compile pass that copies transposed left operands of matrix products, for faster products.

    oneDNN's AMX kernels take 2.6 times as long if the left operand is a transposed view. The gradient of every linear
    layer's weight is such a product: the transposed gradient of the output, times the input. The copy costs half of
    the gain.
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
            """Return the part of torch.compile's cache key that identifies this pass."""
            return get_hash_for_files((__file__, matmul.__file__))

    return TransposingPass()


def _is_transposed(node: Any) -> bool:
    """Whether the node is the transposed view of a bf16 matrix on CPU."""
    if node.target is not _PERMUTE:
        return False
    value = node.meta["val"]
    return bool(value.dtype == torch.bfloat16 and value.device.type == "cpu" and value.stride(-1) != 1)


def _size(node: Any, dimension: int) -> int:
    """Return the size of a dimension, or a large number for a symbolic size, which rows of several lengths cause."""
    size = node.meta["val"].shape[dimension]
    return size if isinstance(size, int) else _MANY


@functools.cache
def _kernel() -> Callable[[Tensor], Tensor]:
    """Return a compiled function that copies a transposed matrix, twice as fast as torch's own copy."""
    return compile_function(lambda matrix: matrix.t().contiguous(), dynamic=True, options=inductor_options())


@torch.no_grad()
def _transposed_copy(matrix: Tensor) -> Tensor:
    return _kernel()(matrix)


# A custom operation, because torch.compile does not inline custom operations. An inlined copy would be fused into the
# loop that computes the matrix, and would be written column by column. The cache lines of a column evict each other
# if the rows are a multiple of 4 KiB apart.
torch.library.define("aliquot::transposed_copy", "(Tensor matrix) -> Tensor")
torch.library.impl("aliquot::transposed_copy", "CPU", _transposed_copy)
torch.library.register_fake("aliquot::transposed_copy", lambda matrix: matrix.new_empty(matrix.shape[::-1]))
