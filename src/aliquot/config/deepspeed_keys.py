"""The rule for every key of a DeepSpeed JSON: honoured, overridden with a reason, or rejected. No key is ignored.

docs/guides/deepspeed.md contains the same table; a test compares both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KeyRule:
    """How aliquot treats a key of a DeepSpeed JSON.

    `fills` is the key of the run config that gets the value. `harmless` are the values that a rejected key may have.
    """

    kind: Literal["honoured", "overridden", "rejected"]
    note: str
    fills: str | None = None
    harmless: tuple[object, ...] = ()


def _passed(note: str = "passed to DeepSpeed") -> KeyRule:
    return KeyRule("honoured", note)


def _fills(key: str, note: str | None = None) -> KeyRule:
    return KeyRule("honoured", note or f"is {key}", fills=key)


def _overridden(note: str) -> KeyRule:
    return KeyRule("overridden", note)


def _rejected(note: str, *harmless: object) -> KeyRule:
    return KeyRule("rejected", note, harmless=harmless)


_NO_NVME = "only with offload to NVMe, which is rejected"
_IN_MEMORY = "offload to NVMe is not supported, since checkpoints read parts in memory: use cpu or none"
_STAGE_12 = "acts in ZeRO stages 1 and 2 only"
_NO_GATHERING = "the export is written from all ranks, nothing is gathered"
_OWN_CHECKPOINTS = "checkpoints are aliquot's"
_OTHER_MODEL = "changes what is trained: not part of aliquot"
_OTHER_DATA = "changes the data: aliquot's data section says it"

_ZERO_OPTIMIZATION = {
    "stage": _rejected("only stage 3; for the rest use engine fsdp or host", 3),
    **dict.fromkeys(("offload_optimizer", "offload_param"), _passed()),
    **dict.fromkeys(("offload_optimizer.device", "offload_param.device"), _rejected(_IN_MEMORY, "cpu", "none")),
    **dict.fromkeys(("offload_optimizer.nvme_path", "offload_param.nvme_path"), _overridden(_NO_NVME)),
    "offload_optimizer.ratio": _rejected("a part of the states on the GPU is not tested", 1),
    "offload_optimizer.super_offload": _rejected("not tested", False),
    "overlap_comm": _passed("passed to DeepSpeed; without effect on CPU, where nothing overlaps"),
    "reduce_bucket_size": _passed('passed to DeepSpeed; "auto" is hidden_size^2'),
    "stage3_prefetch_bucket_size": _passed('passed to DeepSpeed; "auto" is 0.9 x hidden_size^2'),
    "stage3_param_persistence_threshold": _passed('passed to DeepSpeed; "auto" is 10 x hidden_size'),
    **dict.fromkeys(
        (
            "contiguous_gradients", "reduce_scatter", "sub_group_size", "stage3_model_persistence_threshold",
            "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "memory_efficient_linear",
            "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module",
        ),
        _passed(),
    ),
    "stage3_gather_16bit_weights_on_model_save": _overridden(_NO_GATHERING),
    "stage3_gather_fp16_weights_on_model_save": _overridden(_NO_GATHERING),
    "zero_quantized_nontrainable_weights": _overridden("every weight is trained"),
    "zero_quantized_weights": _rejected("gathers inexact weights", False),
    "zero_quantized_gradients": _rejected("reduces inexact gradients", False),
    "zero_hpz_partition_size": _rejected("keeps a second copy of weights", 0, 1),
    "mics_shard_size": _rejected("replicates shards", -1),
    "mics_hierarchical_params_gather": _rejected("replicates shards", False),
    "load_from_fp32_weights": _overridden(_OWN_CHECKPOINTS),
    "elastic_checkpoint": _overridden("checkpoints are aliquot's, for any number of ranks"),
    "pipeline_loading_checkpoint": _overridden(_OWN_CHECKPOINTS),
    "cpu_offload": _rejected("write offload_optimizer", False, None),
    "cpu_offload_param": _rejected("write offload_param", False, None),
    "cpu_offload_use_pin_memory": _rejected("write offload_optimizer and offload_param with pin_memory", False, None),
    "zenflow": _rejected("updates late: not the same optimizer", None),
    "save_muon_momentum_buffer_in_memory": _overridden("the optimizer is AdamW"),
    **dict.fromkeys(
        (
            "allgather_partitions", "allgather_bucket_size", "ignore_unused_parameters", "legacy_stage1",
            "round_robin_gradients", "use_multi_rank_bucket_allreduce", "parameter_alignment", "compute_grad_norm",
        ),
        _overridden(_STAGE_12),
    ),
}  # fmt: skip

# A rule for a section holds for every key below it that has no rule of its own.
RULES: dict[str, KeyRule] = {
    "train_batch_size": _fills("train.global_batch_size"),
    "train_micro_batch_size_per_gpu": _fills("train.per_device_train_batch_size"),
    "gradient_accumulation_steps": _fills("train.gradient_accumulation_steps"),
    "gradient_clipping": _fills("train.max_grad_norm"),
    "bf16.enabled": _fills("train.precision", "true is train.precision: bf16, false is fp32"),
    "bf16.check_grad_overflow": _passed(),
    "bf16.immediate_grad_update": _overridden(_STAGE_12),
    "bf16.bf16_master_weights_and_grads": _rejected("checkpoints hold fp32 masters", False),
    "bf16.bf16_optimizer_states": _rejected("use engine host and train.optimizer_states: bf16", False),
    "fp16": _rejected("loss scaling is not supported: use bf16"),
    "optimizer.type": _passed("Adam (as AdamW, DeepSpeed's default) or AdamW; others are rejected"),
    "optimizer.params.lr": _fills("train.learning_rate"),
    "optimizer.params.betas": _passed("is train.adam_beta1 and train.adam_beta2"),
    "optimizer.params.eps": _fills("train.adam_epsilon"),
    "optimizer.params.weight_decay": _fills("train.weight_decay"),
    "optimizer.params.torch_adam": _overridden("torch's AdamW, fused on GPUs, unless states are offloaded"),
    "optimizer.params.adam_w_mode": _rejected("only decoupled weight decay", True),
    "scheduler.type": _fills(
        "train.lr_scheduler_type",
        "WarmupLR is train.lr_scheduler_type: constant, WarmupDecayLR linear, WarmupCosineLR cosine",
    ),
    "scheduler.params.warmup_num_steps": _fills("train.warmup_steps"),
    "scheduler.params.total_num_steps": _fills("train.max_steps"),
    "scheduler.params.warmup_max_lr": _fills("train.learning_rate"),
    "scheduler.params.warmup_min_lr": _rejected("warm-up starts at 0", 0),
    "scheduler.params.warmup_min_ratio": _rejected("warm-up starts at 0", 0),
    "scheduler.params.warmup_type": _rejected("warm-up is linear", "linear"),
    "scheduler.params.cos_min_ratio": _rejected("cosine ends at 0", 0),
    "scheduler.params.last_batch_iteration": _rejected("checkpoint.resume says where to go on", -1),
    **{f"zero_optimization.{key}": rule for key, rule in _ZERO_OPTIMIZATION.items()},
    "communication_data_type": _passed("passed to DeepSpeed; fp32 by default"),
    "data_types.grad_accum_dtype": _passed("passed to DeepSpeed; fp32 by default"),
    "zero_allow_untested_optimizer": _overridden("AdamW is tested"),
    "zero_force_ds_cpu_optimizer": _passed("false: torch's AdamW where states are offloaded; needs no compiler"),
    "prescale_gradients": _rejected("not with ZeRO-3", False),
    "gradient_predivide_factor": _rejected("not with ZeRO-3", 1),
    "gradient_allreduce_op": _rejected("gradients are summed over tokens", "avg", "average", "mean"),
    "managed_gradient_accumulation": _overridden("aliquot says which micro-batch is the last"),
    "sparse_gradients": _rejected("gradients are dense", False),
    "disable_allgather": _rejected("not with ZeRO-3", False),
    "steps_per_print": _overridden("train.logging_steps says when to print"),
    **dict.fromkeys(
        ("wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "disable_python_gc"), _passed()
    ),
    "seed": _rejected("run.seed says it"),
    **dict.fromkeys(
        ("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config", "flops_profiler"),
        _overridden("the observe section says what is written"),
    ),
    **dict.fromkeys(
        ("checkpoint", "load_universal_checkpoint", "use_node_local_storage", "nebula"), _overridden(_OWN_CHECKPOINTS)
    ),
    "activation_checkpointing": _overridden(
        "Hugging Face models do not call it: train.gradient_checkpointing says it"
    ),
    "aio": _overridden(_NO_NVME),
    "dataloader_drop_last": _overridden("aliquot's batches drop nothing"),
    **dict.fromkeys(
        ("data_efficiency", "curriculum_learning", "data_sampling", "elasticity", "autotuning"), _rejected(_OTHER_DATA)
    ),
    **dict.fromkeys(
        (
            "amp", "torch_autocast", "compression_training", "quantize_training", "progressive_layer_drop",
            "eigenvalue", "hybrid_engine", "sparse_attention", "pipeline", "tensor_parallel", "autotp_size",
            "sequence_parallel_size", "expert_parallel", "compile", "weight_quantization",
        ),
        _rejected(_OTHER_MODEL),
    ),
}  # fmt: skip


def rule_for(path: str) -> KeyRule | None:
    """Return the rule of a dotted key, or else of the innermost section around the key that has a rule."""
    while path:
        if path in RULES:
            return RULES[path]
        path = path.rpartition(".")[0]
    return None
