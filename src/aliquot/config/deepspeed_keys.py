"""The rule for every key of a DeepSpeed JSON: honoured, overridden with a reason, or rejected. No key is ignored.

docs/deepspeed.md holds this table; a test keeps the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KeyRule:
    """What happens to a key of the JSON.

    `fills` is the key of the run config that takes the value. `harmless` are values that a rejected key may have.
    """

    kind: Literal["honoured", "overridden", "rejected"]
    note: str
    fills: str | None = None
    harmless: tuple[object, ...] = ()


def _passed(note: str = "passed to DeepSpeed") -> KeyRule:
    return KeyRule("honoured", note)


def _fills(key: str) -> KeyRule:
    return KeyRule("honoured", f"is {key}", fills=key)


_NO_NVME = "only with offload to NVMe, which is rejected"
_STAGE_12 = "acts in ZeRO stages 1 and 2 only"
_OTHER_MODEL = "changes what is trained: not part of aliquot"
_OTHER_DATA = "changes the data: aliquot's data section says it"

# A rule for a section holds for every key below it that has no rule of its own.
RULES: dict[str, KeyRule] = {
    "train_batch_size": _fills("train.global_batch_size"),
    "train_micro_batch_size_per_gpu": _fills("train.per_device_train_batch_size"),
    "gradient_accumulation_steps": _fills("train.gradient_accumulation_steps"),
    "gradient_clipping": _fills("train.max_grad_norm"),
    "bf16.enabled": KeyRule("honoured", "true is train.precision: bf16, false is fp32", fills="train.precision"),
    "bf16.check_grad_overflow": _passed(),
    "bf16.immediate_grad_update": KeyRule("overridden", _STAGE_12),
    "bf16.bf16_master_weights_and_grads": KeyRule("rejected", "checkpoints hold fp32 masters", harmless=(False,)),
    "bf16.bf16_optimizer_states": KeyRule(
        "rejected", "use engine host and train.optimizer_states: bf16", harmless=(False,)
    ),
    "fp16": KeyRule("rejected", "loss scaling is not supported: use bf16"),
    "optimizer.type": KeyRule("honoured", "Adam (as AdamW, DeepSpeed's default) or AdamW; others are rejected"),
    "optimizer.params.lr": _fills("train.learning_rate"),
    "optimizer.params.betas": KeyRule("honoured", "is train.adam_beta1 and train.adam_beta2"),
    "optimizer.params.eps": _fills("train.adam_epsilon"),
    "optimizer.params.weight_decay": _fills("train.weight_decay"),
    "optimizer.params.torch_adam": KeyRule("overridden", "torch's AdamW unless states are offloaded"),
    "optimizer.params.adam_w_mode": KeyRule("rejected", "only decoupled weight decay", harmless=(True,)),
    "scheduler.type": KeyRule(
        "honoured",
        "WarmupLR is train.lr_scheduler_type: constant, WarmupDecayLR linear, WarmupCosineLR cosine",
        fills="train.lr_scheduler_type",
    ),
    "scheduler.params.warmup_num_steps": _fills("train.warmup_steps"),
    "scheduler.params.total_num_steps": _fills("train.max_steps"),
    "scheduler.params.warmup_max_lr": _fills("train.learning_rate"),
    "scheduler.params.warmup_min_lr": KeyRule("rejected", "warm-up starts at 0", harmless=(0,)),
    "scheduler.params.warmup_min_ratio": KeyRule("rejected", "warm-up starts at 0", harmless=(0,)),
    "scheduler.params.warmup_type": KeyRule("rejected", "warm-up is linear", harmless=("linear",)),
    "scheduler.params.cos_min_ratio": KeyRule("rejected", "cosine ends at 0", harmless=(0,)),
    "scheduler.params.last_batch_iteration": KeyRule(
        "rejected", "checkpoint.resume says where to go on", harmless=(-1,)
    ),
    "zero_optimization.stage": KeyRule("rejected", "only stage 3; for the rest use engine fsdp or host", harmless=(3,)),
    "zero_optimization.offload_optimizer": _passed("passed to DeepSpeed; device cpu or none"),
    "zero_optimization.offload_optimizer.nvme_path": KeyRule("overridden", _NO_NVME),
    "zero_optimization.offload_param": _passed("passed to DeepSpeed; device cpu or none"),
    "zero_optimization.offload_param.nvme_path": KeyRule("overridden", _NO_NVME),
    "zero_optimization.overlap_comm": _passed("passed to DeepSpeed; without effect on CPU, where nothing overlaps"),
    "zero_optimization.contiguous_gradients": _passed(),
    "zero_optimization.reduce_scatter": _passed(),
    "zero_optimization.reduce_bucket_size": _passed('passed to DeepSpeed; "auto" is hidden_size^2'),
    "zero_optimization.sub_group_size": _passed(),
    "zero_optimization.stage3_prefetch_bucket_size": _passed('passed to DeepSpeed; "auto" is 0.9 x hidden_size^2'),
    "zero_optimization.stage3_param_persistence_threshold": _passed('passed to DeepSpeed; "auto" is 10 x hidden_size'),
    "zero_optimization.stage3_model_persistence_threshold": _passed(),
    "zero_optimization.stage3_max_live_parameters": _passed(),
    "zero_optimization.stage3_max_reuse_distance": _passed(),
    "zero_optimization.stage3_module_granularity_threshold": _passed(),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _passed(),
    "zero_optimization.stage3_allgather_sequential": _passed(),
    "zero_optimization.memory_efficient_linear": _passed(),
    "zero_optimization.override_module_apply": _passed(),
    "zero_optimization.log_trace_cache_warnings": _passed(),
    "zero_optimization.enable_sanity_checks": _passed(),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": KeyRule(
        "overridden", "the export is written from all ranks, nothing is gathered"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": KeyRule(
        "overridden", "the export is written from all ranks, nothing is gathered"
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": KeyRule("overridden", "every weight is trained"),
    "zero_optimization.zero_quantized_weights": KeyRule("rejected", "gathers inexact weights", harmless=(False,)),
    "zero_optimization.zero_quantized_gradients": KeyRule("rejected", "reduces inexact gradients", harmless=(False,)),
    "zero_optimization.zero_hpz_partition_size": KeyRule("rejected", "keeps a second copy of weights", harmless=(0, 1)),
    "zero_optimization.mics_shard_size": KeyRule("rejected", "replicates shards", harmless=(-1,)),
    "zero_optimization.mics_hierarchical_params_gather": KeyRule("rejected", "replicates shards", harmless=(False,)),
    "zero_optimization.load_from_fp32_weights": KeyRule("overridden", "checkpoints are aliquot's"),
    "zero_optimization.elastic_checkpoint": KeyRule("overridden", "checkpoints are aliquot's, for any number of ranks"),
    "zero_optimization.pipeline_loading_checkpoint": KeyRule("overridden", "checkpoints are aliquot's"),
    "zero_optimization.cpu_offload": KeyRule("rejected", "write offload_optimizer", harmless=(False, None)),
    "zero_optimization.cpu_offload_param": KeyRule("rejected", "write offload_param", harmless=(False, None)),
    "zero_optimization.cpu_offload_use_pin_memory": KeyRule(
        "rejected", "write offload_optimizer and offload_param with pin_memory", harmless=(False, None)
    ),
    "zero_optimization.zenflow": KeyRule("rejected", "updates late: not the same optimizer", harmless=(None,)),
    "zero_optimization.leaf_module": _passed(),
    "zero_optimization.save_muon_momentum_buffer_in_memory": KeyRule("overridden", "the optimizer is AdamW"),
    **{
        f"zero_optimization.{key}": KeyRule("overridden", _STAGE_12)
        for key in (
            "allgather_partitions",
            "allgather_bucket_size",
            "ignore_unused_parameters",
            "legacy_stage1",
            "round_robin_gradients",
            "use_multi_rank_bucket_allreduce",
            "parameter_alignment",
            "compute_grad_norm",
        )
    },
    "communication_data_type": _passed(),
    "data_types.grad_accum_dtype": _passed(),
    "zero_allow_untested_optimizer": KeyRule("overridden", "AdamW is tested"),
    "zero_force_ds_cpu_optimizer": _passed("false: torch's AdamW where states are offloaded; needs no compiler"),
    "prescale_gradients": KeyRule("rejected", "not with ZeRO-3", harmless=(False,)),
    "gradient_predivide_factor": KeyRule("rejected", "not with ZeRO-3", harmless=(1,)),
    "gradient_allreduce_op": KeyRule(
        "rejected", "gradients are summed over tokens", harmless=("avg", "average", "mean")
    ),
    "managed_gradient_accumulation": KeyRule("overridden", "aliquot says which micro-batch is the last"),
    "sparse_gradients": KeyRule("rejected", "gradients are dense", harmless=(False,)),
    "disable_allgather": KeyRule("rejected", "not with ZeRO-3", harmless=(False,)),
    "steps_per_print": KeyRule("overridden", "train.logging_steps says when to print"),
    "wall_clock_breakdown": _passed(),
    "memory_breakdown": _passed(),
    "dump_state": _passed(),
    "comms_logger": _passed(),
    "disable_python_gc": _passed(),
    "seed": KeyRule("rejected", "run.seed says it"),
    **{
        key: KeyRule("overridden", "the observe section says what is written")
        for key in ("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config", "flops_profiler")
    },
    **{
        key: KeyRule("overridden", "checkpoints are aliquot's")
        for key in ("checkpoint", "load_universal_checkpoint", "use_node_local_storage", "nebula")
    },
    "activation_checkpointing": KeyRule(
        "overridden", "Hugging Face models do not call it: train.gradient_checkpointing says it"
    ),
    "aio": KeyRule("overridden", _NO_NVME),
    "dataloader_drop_last": KeyRule("overridden", "aliquot's batches drop nothing"),
    **{
        key: KeyRule("rejected", _OTHER_DATA)
        for key in ("data_efficiency", "curriculum_learning", "data_sampling", "elasticity", "autotuning")
    },
    **{
        key: KeyRule("rejected", _OTHER_MODEL)
        for key in (
            "amp",
            "torch_autocast",
            "compression_training",
            "quantize_training",
            "progressive_layer_drop",
            "eigenvalue",
            "hybrid_engine",
            "sparse_attention",
            "pipeline",
            "tensor_parallel",
            "autotp_size",
            "sequence_parallel_size",
            "expert_parallel",
            "compile",
            "weight_quantization",
        )
    },
}


def rule_for(path: str) -> KeyRule | None:
    """Return the rule of a dotted key, else of the nearest section around the key."""
    while path:
        if path in RULES:
            return RULES[path]
        path = path.rpartition(".")[0]
    return None
