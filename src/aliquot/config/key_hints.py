"""Suggest what to write instead of an unknown key of a config.

The tables contain key names of transformers' TrainingArguments, TRL, axolotl, LLaMA-Factory and torchtitan.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from aliquot.config.key_locations import KeyPath
from aliquot.config.schema import RunConfig

# A key of aliquot, with a value if the value is part of the meaning -> names of the key in other trainers. A dotted
# name is a key of that section only.
_EQUIVALENTS = {
    # run
    "run.name": "run_name experiment_name wandb_name wandb_run_id job_name",
    "run.directory": "output_dir output_directory overwrite_output_dir logging_dir dump_folder out_dir save_dir"
    " checkpoint.folder",
    "run.seed": "seed data_seed random_seed",
    # model
    "model.path": "model_name_or_path base_model base_model_config model_name model_id pretrained_model_name_or_path"
    " hf_assets_path initial_load_path model.name model.id model.directory",
    "model.config": "config_name train_from_scratch reinit_weights flavor rope_scaling model.type",
    "model.dtype": "torch_dtype export_dtype infer_dtype merge_dtype",
    "model.add_tokens": "new_special_tokens_config additional_special_tokens special_tokens tokens"
    " resize_vocab added_tokens_overrides resize_token_embeddings_to_32x init_special_tokens",
    # data
    "data.path": "train_file train_files dataset_dir data_files data_path dataset_path tokenized_path",
    "data.dataset": "dataset_name data.name",
    "data.dataset_config": "dataset_config_name dataset_kwargs",
    "data.split": "dataset_split train_split",
    "data.sources": "datasets dataset_mixture dataset_mixer mix_strategy interleave_probs pretraining_dataset",
    "data.text_field": "dataset_text_field text_column text_key",
    "data.messages": "field_messages",
    "data.tokenizer": "tokenizer_name tokenizer_config tokenizer_path tokenizer_name_or_path tokenizer_type"
    " use_fast_tokenizer tokenizer_use_fast",
    "data.chat_template": "chat_template_path chat_template_jinja template",
    "data.train_on": "train_on_inputs train_on_prompt completion_only_loss assistant_only_loss mask_history",
    "data.add_eos": "eos_token eot_tokens add_eos_token",
    "data.add_bos": "bos_token add_bos_token",
    "data.sequence_length": "max_seq_length max_seq_len max_length sequence_len seq_length seq_len cutoff_len"
    " model_max_length block_size context_length eval_sequence_len max_sequence_length",
    "data.packing": "sample_packing neat_packing packing_strategy padding_free eval_packing eval_sample_packing"
    " pad_to_sequence_len pad_to_multiple_of sample_packing_eff_est block_diag_attn batch_flattening",
    "data.shuffle_buffer": "buffer_size streaming_buffer_size shuffle_buffer_size",
    "data.eval_path": "validation_file validation_files eval_file eval_dataset test_datasets eval_data",
    "data.eval_split": "validation_split test_split eval_dataset_split",
    "data.eval_fraction": "val_size val_set_size validation_split_percentage eval_size",
    "data.num_proc": "dataset_num_proc preprocessing_num_workers dataset_processes num_workers",
    "data.cache_directory": "cache_dir dataset_prepared_path overwrite_cache dataset_cache_dir",
    # train
    "train.max_steps": "num_steps total_steps max_iters train_steps steps max_train_steps train_iters",
    "train.num_train_epochs": "num_epochs epochs n_epochs max_epochs epoch",
    "train.objective": "rl stage rlhf preference",
    "train.beta": "pref_beta dpo_beta rl_beta orpo_alpha",
    "train.desirable_weight": "kto_desirable_weight",
    "train.undesirable_weight": "kto_undesirable_weight",
    "train.label_smoothing": "label_smoothing_factor",
    "train.loss_type": "dpo_loss_type pref_loss",
    "train.global_batch_size": "train_batch_size batch_size effective_batch_size total_batch_size",
    "train.per_device_train_batch_size": "micro_batch_size per_gpu_train_batch_size local_batch_size mbs"
    " device_batch_size",
    "train.per_device_train_batch_size: auto": "auto_find_batch_size",
    "train.gradient_accumulation_steps": "grad_accum grad_accumulation_steps accumulate_grad_batches grad_acc_steps",
    "train.learning_rate": "lr peak_lr max_lr base_lr warmup_max_lr",
    "train.lr_scheduler_type": "lr_scheduler scheduler scheduler_type lr_schedule decay_type lr_decay_style",
    "train.lr_scheduler_kwargs": "cosine_min_lr_ratio cosine_constant_lr_ratio min_lr min_lr_rate min_lr_ratio"
    " min_lr_factor decay_ratio num_cycles num_decay_steps num_stable_steps lr_end lr_scheduler_args",
    "train.warmup_steps": "num_warmup_steps warmup_iters warmup lr_warmup_steps",
    "train.warmup_ratio": "warmup_fraction",
    "train.weight_decay": "wd",
    "train.adam_beta1": "beta1 betas",
    "train.adam_beta2": "beta2",
    "train.adam_epsilon": "adam_eps epsilon eps",
    "train.max_grad_norm": "max_norm gradient_clipping grad_clip clip_grad gradient_clip_val clip_grad_norm",
    "train.gradient_checkpointing: full": "activation_checkpointing activation_checkpoint use_gradient_checkpointing"
    " recompute recompute_layer_types",
    "train.gradient_checkpointing: selective": "selective_checkpointing",
    "train.precision: bf16": "bf16 bfloat16 pure_bf16 mixed_precision mixed_precision_param compute_dtype amp autocast"
    " training.dtype train.dtype model.precision",
    "train.precision: fp32": "fp32 float32",
    "train.optimizer_states: int8": "use_8bit_adam adam_8bit bnb_optimizer",
    "train.compile: layers": "torch_compile torch_compile_backend torch_compile_mode torch_compile_options"
    " use_torch_compile compile_model",
    "train.freeze": "freeze_layers frozen_layers unfrozen_parameters freeze_trainable_layers trainable_layers"
    " freeze_trainable_modules freeze_extra_modules",
    "train.logging_steps": "logging_strategy log_interval log_every log_freq log_every_n_steps logging_first_step",
    "train.eval_steps": "eval_strategy evaluation_strategy eval_interval eval_every evals_per_epoch eval_delay do_eval"
    " val_check_interval validation_freq",
    "train.early_stopping_patience": "early_stopping early_stopping_steps",
    "train.metric_for_best_model": "greater_is_better",
    # shard
    "shard.engine: fsdp": "fsdp fsdp_config fsdp_version fsdp_transformer_layer_cls_to_wrap parallelism_config"
    " data_parallel_shard_degree dp_shard_size fsdp_reshard_after_forward",
    "shard.deepspeed_config": "deepspeed deepspeed_plugin zero_stage deepspeed_config_file ds_config",
    "shard.reduce_dtype": "mixed_precision_reduce ddp_comm_hook",
    "shard.replicate: nodes": "hsdp hybrid_shard data_parallel_replicate_degree dp_replicate_size"
    " sharding_strategy fsdp_sharding_strategy",
    "shard.offload": "cpu_offload enable_cpu_offload offload_optimizer offload_param fsdp_offload_params"
    " layer_offloading activation_offloading offload_params",
    "shard.offload_directory": "offload_folder nvme_path",
    "shard.memory": "max_memory gpu_memory_limit",
    # adapter
    "adapter.type: lora": "lora use_lora use_peft peft peft_config finetuning_type peft_type lora_config",
    "adapter.base: nf4": "load_in_4bit qlora quantization quantization_bit quantization_config bnb_4bit_quant_type",
    "adapter.base: int8": "load_in_8bit",
    "adapter.r": "lora_r lora_rank lora_dim",
    "adapter.alpha": "lora_alpha",
    "adapter.loraplus_lr_ratio": "loraplus_lr_ratio",
    "adapter.use_rslora": "peft_use_rslora",
    "adapter.dropout": "lora_dropout",
    "adapter.experts: true": "target_parameters lora_target_parameters",
    "adapter.target_modules": "lora_target_modules lora_target lora_target_linear lora_modules",
    # checkpoint
    "checkpoint.every": "save_steps save_strategy save_interval saves_per_epoch save_every checkpoint_interval"
    " checkpointing_steps save_freq checkpoint.interval checkpoint.enable",
    "checkpoint.last": "last_save_model_only",
    "checkpoint.keep": "save_total_limit keep_latest_k max_checkpoints keep_last_n",
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints load_checkpoint load_step load_folder",
    "checkpoint.best": "load_best_model_at_end save_best",
    "checkpoint.export": "last_save_in_hf save_safetensors save_final_model",
    "checkpoint.async": "async_mode enable_jit_checkpoint async_save",
    "checkpoint.mirror": "hub_strategy s3_path upload_dir remote_path",
    # observe
    "observe.report_to": "observe.tensorboard use_wandb wandb wandb_project wandb_entity wandb_watch wandb_mode mlflow"
    " mlflow_tracking_uri mlflow_experiment_name comet_project_name use_comet use_mlflow trackio_space_id"
    " trackio_bucket_id trackio_static_space_id project enable_wandb swanlab_project use_swanlab loggers",
    "observe.report_to: [tensorboard]": "use_tensorboard tensorboard_dir enable_tensorboard save_tb_folder",
    "observe.console": "disable_tqdm log_level log_level_replica verbose quiet progress_bar",
    "observe.profile": "profiler profiler_steps profiler_steps_start enable_profiling profile_freq profiling",
    "observe.sample_prompt": "sample_prompts generate_samples num_generation_samples",
    "observe.sample_tokens": "max_new_tokens generation_max_new_tokens",
    # launch
    "launch.device: cpu": "use_cpu no_cuda",
    "launch.device": "use_mps_device accelerator device_map",
    "launch.ranks": "num_processes nproc_per_node nproc num_gpus gpus devices world_size n_gpu",
    "launch.nodes": "num_machines nnodes num_nodes",
    "launch.node_rank": "machine_rank",
    "launch.master_address": "main_process_ip master_addr",
    "launch.master_port": "main_process_port",
    "launch.threads_per_rank": "num_cpu_threads_per_process omp_num_threads num_threads",
    "launch.step_timeout_s": "ddp_timeout train_timeout_seconds nccl_timeout",
    "launch.join_timeout_s": "init_timeout_seconds",
}

# The reason why aliquot has no such key -> names of the key in other trainers.
_UNSUPPORTED = {
    "the optimizer is always AdamW; train.optimizer_states sets the dtype of its moments":
    "optim optimizer optim_args optimizer.name optimizer.type",
    "bf16 needs no loss scaling; use train.precision: bf16":
    "fp16 float16 fp16_full_eval",
    "products are computed in train.precision, bf16 or fp32":
    "tf32",
    "an evaluation takes train.per_device_train_batch_size sequences at a time, in train.precision":
    "per_device_eval_batch_size eval_batch_size eval_accumulation_steps bf16_full_eval eval_do_concat_batches"
    " eval_use_gather_object batch_eval_metrics val_batch_size",
    "an evaluation is loss, perplexity and bits per byte":
    "prediction_loss_only include_for_metrics label_names do_predict predict_with_generate compute_metrics",
    "the loss is cross-entropy, a mean over all real tokens of the global batch":
    "average_tokens_across_devices",
    "a text or chat longer than data.sequence_length is cut into pieces; a pair of answers, or a"
    " rated answer, is left out":
    "truncation_mode max_prompt_length max_completion_length",
    "all documents are read; name fewer files in data.path":
    "max_samples max_train_samples max_eval_samples",
    "the order of the documents is drawn from run.seed and the epoch":
    "shuffle_dataset shuffle train_sampling_strategy length_column_name",
    "batches are made from mapped tokens without worker processes, and nothing is dropped":
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor"
    " dataloader_drop_last drop_last dataloader_multiprocessing_context dataloader_in_order"
    " remove_unused_columns accelerator_config",
    "a resumed run continues with the next batch, and random draws need no state":
    "ignore_data_skip restore_callback_states_from_checkpoint",
    "on CPUs every run is deterministic, on GPUs up to the order of attention's atomic additions":
    "full_determinism deterministic",
    "the optimizer is AdamW with one rate for all":
    "optim_target_modules use_muon use_galore momentum embedding_lr lr_groups",
    "weights and embeddings are trained without noise and without averages":
    "neftune_noise_alpha ema_decay",
    "kernels of attention, loss and experts follow from device and model":
    "use_liger_kernel liger_kernel_config flash_attention flash_attn attn_implementation"
    " use_flash_attention_2 use_unsloth",
    "train.gradient_checkpointing alone sets what is recomputed":
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
    "the plan accounts for memory before the start":
    "torch_empty_cache_steps skip_memory_metrics",
    "training keeps no keys and values":
    "use_cache",
    "every logged step has its number of tokens, and a loss that is not finite ends the run":
    "logging_nan_inf_filter debug include_num_input_tokens_seen",
    "rank 0 alone writes on the console":
    "log_on_each_node",
    "a checkpoint is complete, in a directory that all nodes share":
    "save_only_model save_on_each_node",
    "the run keeps its files; `aliquot export CHECKPOINT OUT --push-to-hub REPOSITORY` uploads a model":
    "push_to_hub hub_model_id hub_token hub_private_repo hub_always_push",
    "a hub id means the newest revision; set model.path to the directory of another one":
    "model_revision hub_revision",
    "Python that comes with a model is never run":
    "trust_remote_code",
    "the command is `aliquot train`":
    "do_train",
    "rewards are for a loop of your own (aliquot.Trainer, examples/grpo.py); train.objective has dpo, simpo, orpo, kto":
    "trl vllm reward_model reward_funcs reward_weights num_generations",
    "the model before training is the reference, and no second model is loaded":
    "ref_model precompute_ref_log_probs sync_ref_model",
    "the section launch sets how ranks connect":
    "local_rank ddp_backend",
    "each engine has its way of reducing gradients":
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
    "all ranks share the state, 1/N each: there is no tensor, pipeline, context or expert parallelism":
    "tensor_parallel_degree tensor_parallel_size pipeline_parallel_degree context_parallel_degree"
    " context_parallel_size expert_parallel_degree sequence_parallel_size",
    "config.json, or model.config, sets the auxiliary loss of a mixture":
    "router_aux_loss_coef",
    "the model's config.json, or model.config, sets it":
    "model_init_kwargs",
    "the tokenizer's files set it":
    "pad_token",
    "the adapter is plain LoRA":
    "use_dora",
}  # fmt: skip

EQUIVALENTS = {name: key for key, names in _EQUIVALENTS.items() for name in names.split()}
UNSUPPORTED = {name: reason for reason, names in _UNSUPPORTED.items() for name in names.split()}

_MIN_SIMILARITY = 0.8  # of a spelling to a key; below it a suggestion would be absurd
_MIN_SIMILARITY_IN_SECTION = 0.75  # two letters of a short key in the wrong order
_MAX_LISTED = 12  # keys of a section that an error lists
_OPTIONAL_SECTIONS = ("adapter", "cluster")  # their keys are not meant by a user who writes into another section


def suggestion(keys: KeyPath, value: object) -> str:
    """Return what to write instead of an unknown key, to append to an error; empty if there is no suggestion.

    The first of these that exists: keys for the contents of a section of another trainer, the equivalent of a key of
    another trainer, the only key of the same name in another section, the key whose spelling, or whose name in another
    trainer, is most similar, the keys of the section if they are few.
    """
    section, name = [key for key in keys[:-1] if not key.isdigit()], keys[-1]  # without its place in a list
    siblings = {path[-1]: ".".join(path) for path in known_keys() if list(path[:-1]) == section}
    foreign = {known: key for known, key in EQUIVALENTS.items() if "." not in known}
    spellings = {known: key for known, key in foreign.items() if not key.startswith(_OPTIONAL_SECTIONS)} | siblings
    near = difflib.get_close_matches(name, sorted(spellings), 1, _MIN_SIMILARITY)
    answer = _hint_for_section(value) if isinstance(value, dict) and not near else None
    answer = answer or hint(".".join(keys))
    if answer is not None:
        return f"; {answer}"
    if place := place_of(name, also_optional=not section):
        return f"; did you mean {place}?"
    if near:
        return f"; did you mean {spellings[near[0]]}?"
    longer = [key for key in siblings if set(name.split("_")) <= set(key.split("_"))]
    if near := difflib.get_close_matches(name, siblings, 1, _MIN_SIMILARITY_IN_SECTION) or longer:
        return f"; did you mean {siblings[near[0]]}?"
    if section and len(siblings) <= _MAX_LISTED and siblings:
        return f"; keys of {'.'.join(section)}: {', '.join(siblings)}"
    return ""


def argument_for(name: str, value: str | None) -> str:
    """Return what to write instead of an option `--name value` that only another trainer has; empty if nothing fits."""
    plain = name.lstrip("-").replace("-", "_")
    dotted = plain if tuple(plain.split(".")) in known_keys() else place_of(plain)
    key, colon, fixed = (dotted or EQUIVALENTS.get(plain, "")).partition(": ")
    if key:
        return f"write {key}={fixed if colon else value or 'VALUE'}"
    return hint(plain) or ""


def place_of(name: str, also_optional: bool = False) -> str | None:
    """Return the dotted key called `name` if only one section has it, among the sections that all runs have.

    With `also_optional`, a key that none of these sections has may be in another section.
    """
    sections = [path[0] for path in known_keys() if path[1:] == (name,)]
    common = [section for section in sections if section not in _OPTIONAL_SECTIONS]
    places = common or (sections if also_optional else [])
    return f"{places[0]}.{name}" if len(places) == 1 else None


def hint(name: str) -> str | None:
    """Return what aliquot has for the key, or dotted key, `name` of another trainer; None for an unknown name."""
    plain = name.lower().replace("-", "_")
    last = plain.rpartition(".")[2]
    known = next((key for key in (plain, last) if key in EQUIVALENTS or key in UNSUPPORTED), "")
    if known in EQUIVALENTS:
        return f"write {EQUIVALENTS[known]}"
    return f"aliquot has no such key: {UNSUPPORTED[known]}" if known in UNSUPPORTED else None


def _hint_for_section(values: dict[Any, Any]) -> str | None:
    """Return the keys of aliquot for the keys in a section of another trainer, or None."""
    places = {path[-1]: ".".join(path) for path in reversed(known_keys()) if len(path) == 2} | EQUIVALENTS
    hints = [f"{places[name]} for {name}" for name in map(str, values) if name in places]
    return f"write {', '.join(hints)}" if hints else None


def section_advice(section: str, value: object) -> str:
    """Return what to write in a file instead of `value`, which is no mapping, as the whole section `section`."""
    if isinstance(value, list):
        return f"write the keys of {section} without dashes"
    if isinstance(value, str) and ":" in value and (name := value.partition(":")[0]) in _choices(section):
        return f"put a space after the colon of {name}"
    key = key_for(section, value)
    return f"write {section}: {{{key}: {value}}}" if key is not None else f"write its keys below the line `{section}:`"


def key_for(section: str, value: object) -> str | None:
    """Return the key of a section that has `value` among its choices, or else `path` for model and data, or None."""
    named = (key for key, options in _choices(section).items() if value in options)
    return next(named, "path" if section in ("model", "data") else None) if isinstance(value, str) else None


def _choices(section: str) -> dict[str, tuple[Any, ...]]:
    """Return the keys of a section, with the values that a key may have, if the schema lists them."""
    kind = RunConfig.model_fields[section].annotation
    models = [model for model in (kind, *get_args(kind)) if isinstance(model, type) and issubclass(model, BaseModel)]
    return {field.alias or name: get_args(field.annotation) for name, field in models[0].model_fields.items()}


@cache
def known_keys() -> list[KeyPath]:
    """Return the path of every key in the schema: sections, their keys, and keys of nested sections and of lists."""
    return list(dict.fromkeys(_keys_below(RunConfig, ())))


def _keys_below(model: type[BaseModel], prefix: KeyPath) -> Iterator[KeyPath]:
    for name, field in model.model_fields.items():
        path = (*prefix, field.alias or name)
        yield path
        types = [field.annotation, *get_args(field.annotation)]  # a section, `section | None`, a list of sections
        for candidate in [*types, *(inner for outer in types for inner in get_args(outer))]:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                yield from _keys_below(candidate, path)
