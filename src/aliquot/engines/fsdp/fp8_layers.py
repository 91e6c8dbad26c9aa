"""Matrix products in fp8 in the linear layers of engine fsdp on one GPU, by torchao.

Each product scales both operands, as whole tensors, to the range of fp8. Master weights stay fp32, and layers pass bf16
to each other. GPUs from Ada and Hopper on multiply in fp8. On a CPU, torchao rounds the operands to fp8 and multiplies
in fp32, for tests.
"""

from __future__ import annotations

import torch
from torch import nn

from aliquot.core.errors import EngineError, MissingToolError, SelfTestError
from aliquot.models.structure import decoder_layers

_ADA = (8, 9)  # the first compute capability with products in fp8
_MULTIPLE = 16  # tensor cores need sizes that are multiples of 16
# With smaller weights, the conversions to fp8 take longer than the products save (torchao's _auto_filter_for_recipe).
_SMALL_INPUT, _SMALL_OUTPUT = 4096, 1024
_TOLERANCE = 2**-3  # relative to the norm: operands with 2 or 3 bits of mantissa give about 2^-4


def use_fp8(model: nn.Module, device: torch.device) -> None:
    """Compute products of the decoder layers' large linear layers in fp8. Call this before anything wraps the layers.

    Raises MissingToolError without torchao, EngineError if the GPU or the model does not suit, and SelfTestError if the
    device multiplies wrongly.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _ADA:
        raise EngineError(
            f"train.fp8: {torch.cuda.get_device_name(device)} cannot multiply in fp8, as GPUs from Ada and Hopper on"
            " can: leave it out"
        )
    _prove(device)
    converted = [layer for layer in decoder_layers(model) if _convert(layer, device)]
    if not converted:
        raise EngineError(
            f"train.fp8: {type(model).__name__} has no linear layer that is large enough to gain from fp8: leave it out"
        )


def _convert(module: nn.Module, device: torch.device) -> list[str]:
    """Convert linear layers inside `module`, and return their names."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise MissingToolError("train.fp8 needs torchao: pip install 'aliquot[fp8]'") from None
    names = [name for name, part in module.named_modules() if _suits(part)]
    # With padding, a micro-batch may have any number of tokens: the gradient of a weight is a sum over tokens.
    config = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    convert_to_float8_training(module, module_filter_fn=lambda _, name: name in names, config=config)
    return names


def _suits(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
        return False
    return module.in_features > _SMALL_INPUT or module.out_features > _SMALL_OUTPUT


def _prove(device: torch.device) -> None:
    """Compare the products of an fp8 layer with those of a bf16 layer. Raises SelfTestError."""
    generator = torch.Generator().manual_seed(0)
    values, gradient, weight = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((_MULTIPLE + 1, _MULTIPLE), (_MULTIPLE + 1, 2 * _SMALL_OUTPUT), (2 * _SMALL_OUTPUT, _MULTIPLE))
    )
    results = []
    for converts in (False, True):
        layer = nn.Linear(_MULTIPLE, 2 * _SMALL_OUTPUT, bias=False, device=device, dtype=torch.bfloat16)
        layer.weight.data.copy_(weight)
        model = nn.Sequential(layer)
        if converts:
            _convert(model, device)
        inputs = values.clone().requires_grad_()
        output = model(inputs)
        leaves = [inputs, *model.parameters()]
        results.append([output.detach(), *torch.autograd.grad(output, leaves, gradient)])
    for name, exact, ours in zip(("output", "input's gradient", "weight's gradient"), *results, strict=True):
        error = float((ours.float() - exact.float()).norm() / exact.float().norm())
        if not error <= _TOLERANCE:
            raise SelfTestError(f"a product in fp8 on {device} is wrong: its {name} differs by {error:.1%}")
