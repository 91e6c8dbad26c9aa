"""Load a model under DeepSpeed ZeRO-3 without full-size parameters: files fill partitions of meta parameters.

Stock `deepspeed.zero.Init` allocates every parameter at full size on each rank, broadcasts the parameter from rank 0,
and keeps 1/N. DeepSpeed has no extension point to avoid this, so `MetaInit` overrides private methods of Init.
`MetaInit` runs only with tested versions of DeepSpeed: tests/loaders compares its parameters and gathered bytes with
those of stock Init. With other versions, stock Init runs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aliquot.core.decode import decode_json, read_json
from aliquot.core.errors import DeepspeedConfigError, MissingToolError, UsageError
from aliquot.distributed.ranks import Members
from aliquot.loaders.sharded import HeldWeights, tensors_of, whole
from aliquot.models.load import LoadOptions, load_weights
from aliquot.models.stored_weights import StoredNames, published_of
from aliquot.models.structure import compute_buffers, replace_tensors, saved_buffers, tied_weights
from aliquot.models.untrusted_code import without_code
from aliquot.tensor_io.parts import Part
from aliquot.tensor_io.transfer import Watch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_TESTED = ("0.19.8",)
_log = logging.getLogger(__name__)


def load_zero3(
    model: PretrainedConfig | Path | str,
    directory: Path | str | None = None,
    *,
    config: dict[str, Any] | Path | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    watch: Watch | None = None,
    **options: object,
) -> PreTrainedModel:
    """Load a causal language model partitioned for ZeRO-3; each rank reads only its own bytes. Collective.

    This function replaces `AutoModelForCausalLM.from_pretrained(directory)` in a script that uses DeepSpeed or HF
    Trainer. Call `deepspeed.init_distributed()` first, and pass the returned model to `deepspeed.initialize` or
    `Trainer`. The peak of a rank's private memory is its partitions + 64 MiB. With an untested version of DeepSpeed,
    the peak also includes the largest tensor, and a warning is logged.

    Args:
        model: a directory of safetensors files, or a configuration whose weights are in `directory`.
        config: DeepSpeed's JSON or its path, which decides the device of partitions. Default: the JSON of HF Trainer
            (`TrainingArguments(deepspeed=...)` or `HfDeepSpeedConfig`), if there is one.
        dtype: the dtype in which DeepSpeed trains.
        options: `attn_implementation`, as in transformers.

    Raises:
        UserError: files are missing or malformed, tensors do not fit the model, or DeepSpeed is not installed.
    """
    from transformers import AutoConfig, GenerationConfig

    if isinstance(model, str | Path):
        model, directory = without_code(AutoConfig.from_pretrained)(model), model
    if directory is None:
        raise UsageError("load_zero3 of a configuration needs the directory of the weights")
    settings = _settings(config)
    with torch.device("meta"):
        built = _construct(model, dtype, options)
    tied = tied_weights(built)
    tensors = tensors_of(built)
    published, names = published_of(built, tensors), StoredNames.from_model(built)
    compute_buffers(built)
    device = partition(built, settings)
    load_weights(
        zero_weights(built), Path(directory), tensors, tied, Members(device), LoadOptions(watch, published, names=names)
    )
    if (generation := Path(directory) / "generation_config.json").exists():
        built.generation_config = GenerationConfig.from_dict(read_json(generation))
    return built.eval()


def zero_weights(model: nn.Module) -> HeldWeights:
    """Return a part store over this rank's ZeRO-3 partitions of a model. Every rank holds all persistent buffers.

    DeepSpeed's partition of a flat tensor is elements [rank x P, (rank + 1) x P), where P = ceil(numel / ranks).
    """
    partitions = [_held(name, weight) for name, weight in model.named_parameters()]
    return HeldWeights([*partitions, *(whole(name, buffer) for name, buffer in saved_buffers(model).items())])


def partition(model: nn.Module, settings: Mapping[str, Any] | None) -> torch.device:
    """Turn the meta parameters of `model` into ZeRO-3 partitions without values, and return the compute device.

    The compute device is the device on which DeepSpeed gathers weights. Buffers move to this device. `settings`:
    DeepSpeed's JSON; with None, partitions are on the compute device.
    """
    deepspeed = import_deepspeed()
    if deepspeed.__version__ not in _TESTED:
        _log.warning(
            "DeepSpeed %s was not tested with partitions made from meta parameters: stock zero.Init runs instead,"
            " and a rank's memory peaks at its partitions and the largest tensor",
            deepspeed.__version__,
        )
        device = _partition_whole(model, settings)
    else:
        init = _meta_init_class()
        config = None if settings is None else dict(settings)
        device = init(module=model, config_dict_or_path=config, mem_efficient_linear=False).local_device
    replace_tensors(model, {name: buffer.to(device) for name, buffer in model.named_buffers()})
    return device


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast meta parameters to `dtype`. `model.to` would also round buffers, such as rotary frequencies."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


def import_deepspeed() -> Any:
    """Import DeepSpeed and set its log level to WARNING. Raises UserError if DeepSpeed is not installed."""
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise MissingToolError("DeepSpeed is not installed: pip install 'aliquot[deepspeed]'") from None
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # torch 2.13 repeats this warning at each of DeepSpeed's collectives.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    return deepspeed


def partition_range(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return DeepSpeed's partition of a flat tensor on `rank`, without padding; the last partitions may be empty."""
    share = -(-numel // world_size)
    return min(rank * share, numel), min((rank + 1) * share, numel)


def _meta_init_class() -> Any:
    from deepspeed.runtime.zero.partition_parameters import Init, PartitionedParamStatus, ZeroParamStatus

    class MetaInit(Init):  # type: ignore[misc]
        """zero.Init for a module on the meta device: turns each parameter into a partition, without its full size."""

        def _convert_to_zero_parameters(self, param_list: Any) -> None:
            for param in param_list:
                if not hasattr(param, "ds_id"):
                    self._zero_init_param(param)

        def _zero_init_param(self, param: Any) -> None:
            self._convert_to_deepspeed_param(param)
            aligned = self._aligned_size(param)
            share = aligned // self._partition_world_size(param)
            device = self.local_device if param.ds_persist else self.remote_device
            shard: Any = torch.empty(share, dtype=param.dtype, device=device)
            if self.pin_memory and shard.device.type == "cpu":
                from deepspeed.accelerator import get_accelerator

                shard = get_accelerator().pin_memory(shard)
            start, stop = partition_range(
                param.ds_numel, self._partition_rank(param), self._partition_world_size(param)
            )
            shard[stop - start :].zero_()  # the padding, which stock Init leaves uninitialised
            shard.requires_grad = False
            shard.ds_numel, shard.status, shard.final_location = share, PartitionedParamStatus.AVAILABLE, None
            param.ds_tensor, param.ds_numel_aligned = shard, aligned
            # Assigning `.data` cannot give memory to a meta tensor. Swapping does, and keeps the parameter object, to
            # which modules and tied names refer.
            attributes = dict(param.__dict__)
            torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
                param, nn.Parameter(torch.empty(0, dtype=param.dtype, device=self.local_device), param.requires_grad)
            )
            param.__dict__.update(attributes)
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE

    return MetaInit


def _partition_whole(model: nn.Module, settings: Mapping[str, Any] | None) -> torch.device:
    """Run stock zero.Init on one parameter at a time, so that only one parameter has its full size."""
    from deepspeed.runtime.zero.partition_parameters import Init

    init = Init(config_dict_or_path=None if settings is None else dict(settings), mem_efficient_linear=False)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_meta:
                whole = nn.Parameter(torch.zeros_like(weight, device=init.local_device), weight.requires_grad)
                torch.utils.swap_tensors(weight, whole)  # type: ignore[no-untyped-call]
            init._post_init_method(_only(name, weight))
    return cast(torch.device, init.local_device)


def _only(name: str, weight: nn.Parameter) -> nn.Module:
    holder = nn.Module()
    holder.register_parameter(name, weight)
    return holder


def _construct(config: PretrainedConfig, dtype: torch.dtype, options: dict[str, object]) -> PreTrainedModel:
    """Build the model from its class.

    `AutoModelForCausalLM.from_config` would run stock zero.Init if HF's DeepSpeed integration is active.
    """
    from transformers import AutoModelForCausalLM

    if "attn_implementation" in options:
        config._attn_implementation = options.pop("attn_implementation")
    if options:
        raise UsageError(f"load_zero3 does not know {', '.join(sorted(options))}: only attn_implementation")
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    config.dtype = dtype
    built: PreTrainedModel = kind(config)
    cast_parameters(built, dtype)
    return built


def _settings(config: dict[str, Any] | Path | str | None) -> dict[str, Any] | None:
    """Return the settings of DeepSpeed's JSON that zero.Init needs; None without JSON.

    The JSON itself cannot be passed to zero.Init, because its batch size may still be "auto".
    """
    from transformers.integrations.deepspeed import deepspeed_config

    deepspeed_json: dict[str, Any] | None = config if isinstance(config, dict) else deepspeed_config()
    if isinstance(config, str | Path):
        try:
            deepspeed_json = decode_json(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DeepspeedConfigError(f"cannot read this DeepSpeed config: {error}", Path(config)) from None
    if deepspeed_json is None:
        return None
    zero = deepspeed_json.get("zero_optimization", {})
    if zero.get("zero_hpz_partition_size", 1) > 1:
        raise DeepspeedConfigError(
            "zero_hpz_partition_size keeps a second copy that load_zero3 does not make: leave it out"
        )
    zero_settings = {key: zero[key] for key in ("offload_param", "memory_efficient_linear") if key in zero}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero_settings}}


def _held(name: str, weight: Any) -> tuple[Part, Tensor]:
    group = weight.ds_process_group
    start, stop = partition_range(weight.ds_numel, dist.get_rank(group), dist.get_world_size(group))
    return Part(name, tuple(weight.ds_shape), "weight", start, stop), weight.ds_tensor[: stop - start]
