"""A pass over what torch.compile makes of a layer: a product's transposed left side becomes a copy of it.

oneDNN's AMX kernels take 2.6 times as long for a product whose left side is transposed, and every gradient of a linear
layer's weight is one: of the gradient of its output, transposed, and its input. The copy takes half of what it saves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from aliquot.machine import kernels
from aliquot.machine.compile_cache import compiled
from aliquot.machine.inductor import kernel_options
from aliquot.machine.kernels import copy_pays

if TYPE_CHECKING:
    from torch.fx import Graph

_MANY = 1 << 20
_PERMUTE, _MM = torch.ops.aten.permute.default, torch.ops.aten.mm.default


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
        return get_hash_for_files((__file__, kernels.__file__))


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
    return compiled(lambda matrix: matrix.t().contiguous(), dynamic=True, options=kernel_options())


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
