"""Keys of Axolotl's config files, except its datasets."""

from collections.abc import Mapping
from typing import Any

from trimtab.recipe.foreign_keys.answers import (
    AUTOMATIC,
    LAUNCH,
    NOT_YET,
    RESUME,
    UNSUPPORTED,
    UPLOAD,
    WORKERS,
    Answer,
    Rule,
    all_of,
    if_on,
    is_on,
    left_out,
    lose,
    omit,
    packing,
    renamed,
    steps_of,
    write,
    write_named,
    written,
)
from trimtab.recipe.foreign_keys.hugging_face import HF_TRAINER, lora_init

# Axolotl's defaults for missing keys that differ from a recipe's.
DEFAULTS: dict[str, Any] = {
    "num_epochs": 1.0,
    "lr_scheduler": "cosine",
    "optimizer": "adamw_torch_fused",
    "sequence_len": 512,
    "val_set_size": 0.0,
    "warmup_ratio": 0.03,  # and at most 100 steps
}
# The other key with the same meaning.
INSTEAD = {"val_set_size": "test_datasets", "warmup_ratio": "warmup_steps"}
# Keys of other kinds of training: without them, a recipe would be a different run.
REFUSED = {
    "rl": "preference and reinforcement learning",
    "reward_model": "training of reward models",
    "process_reward_model": "training of reward models",
    "processor_type": "training on images or sound",
}


def _model(value: Any, section: Mapping[str, Any]) -> Answer:
    has_more = section.get("tokenizer_config") or is_on(section.get("trust_remote_code"))
    return written({"model.name" if has_more else "model": value})


def _trusted(value: Any, section: Mapping[str, Any]) -> Answer:
    return written({"model.trust_remote_code": True}) if is_on(value) else left_out("false is the default")


def _adapter(value: Any, section: Mapping[str, Any]) -> Answer:
    kind = str(value).lower()
    if kind == "lora" and is_on(section.get("load_in_4bit")):
        kind = "qlora"
    if kind not in ("lora", "qlora"):
        return left_out(f"trimtab has no adapter {value!r}", is_lost=True)
    return written({"adapter.kind": kind})


def _in_adapter(rule: Rule) -> Rule:
    """Apply a rule only if the file has an adapter."""

    def of_adapter(value: Any, section: Mapping[str, Any]) -> Answer:
        if "adapter" in section and not section["adapter"]:
            return left_out("the file has no adapter, and Axolotl ignores it as well")
        return rule(value, section)

    return of_adapter


def _setting(key: str) -> Rule:
    return _in_adapter(write(f"adapter.{key}"))


def _targets(value: Any, section: Mapping[str, Any]) -> Answer:
    names = [value] if isinstance(value, str) else value
    is_all = is_on(section.get("lora_target_linear")) or value == "all-linear"
    return written({"adapter.targets": "all-linear" if is_all else names})


def _all_linear(value: Any, section: Mapping[str, Any]) -> Answer:
    return written({"adapter.targets": "all-linear"}) if is_on(value) else left_out("false is the default")


def _layers(value: Any, section: Mapping[str, Any]) -> Answer:
    blocks = value if isinstance(value, list) and all(isinstance(block, int) for block in value) else []
    if blocks and blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        return written({"adapter.layers": [blocks[0], blocks[-1]]})
    return left_out("adapter.layers takes the first and the last of consecutive blocks", is_lost=True)


def _initial(value: Any, section: Mapping[str, Any]) -> Answer:
    answer = lora_init(value, section)
    return written({"adapter.init": answer.settings["adapter.init"]}, answer.note)


def _four_bits(value: Any, section: Mapping[str, Any]) -> Answer:
    if not is_on(value):
        return left_out("false is the default")
    if not section.get("adapter"):
        return written({"adapter": "qlora"})
    return left_out("adapter: qlora stores the base in 4 bits")


def _eight_bits(value: Any, section: Mapping[str, Any]) -> Answer:
    if not is_on(value):
        return left_out("false is the default")
    cure = "the base stays in 16 bits; adapter: {kind: lora, base: fp8} uses fp8, adapter: qlora 4 bits"
    return left_out(f"int8 base weights are not supported: {cure}", is_lost=True)


def _batch(value: Any, section: Mapping[str, Any]) -> Answer:
    """Combine micro_batch_size, gradient_accumulation_steps and batch_size, of which a file has two."""
    rows: Any = section.get("micro_batch_size") or 1
    total: Any = section.get("batch_size")
    steps = section.get("gradient_accumulation_steps") or (total // rows if _are_counts(rows, total) else 1)
    if not _are_counts(rows, steps):
        return Answer("write train.batch_size: rows per optimizer step; memory.micro_batch: rows per forward pass")
    note = f"{rows} × {steps}, on one device"
    if is_on(section.get("sample_packing")):
        note += "; Axolotl counts packed sequences of sequence_len tokens, trimtab counts rows"
    text = f"write train.batch_size: {rows * steps} ({note}), and memory.micro_batch: {rows} to keep that split"
    return Answer(text, {"train.batch_size": rows * steps, "memory.micro_batch": rows}, note=note)


def _are_counts(*values: Any) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values)


def _precision(key: str) -> Rule:
    """Combine the flags of precision: one of them decides."""

    def rule(value: Any, section: Mapping[str, Any]) -> Answer:
        flags = {**section, key: value}
        pure = "bf16" if flags.get("adapter") else "bf16-pure"  # the few weights of an adapter are fp32
        deciding = (
            ("fp16", is_on(flags.get("fp16")), "fp16"),
            ("bfloat16", is_on(flags.get("bfloat16")), pure),
            ("bf16", flags.get("bf16") == "full", pure),
            ("bf16", is_on(flags.get("bf16")), "bf16"),
            ("bf16", str(flags.get("bf16")).lower() == "auto", "auto"),
            ("float16", is_on(flags.get("float16")), "fp16"),
            ("tf32", is_on(flags.get("tf32")), "tf32"),
            (key, True, "fp32"),
        )
        decider, precision = next((name, ours) for name, applies, ours in deciding if applies)
        if decider != key:
            return left_out(f"{decider} decides")
        return written({"train.precision": precision})

    return rule


def _recompute(value: Any, section: Mapping[str, Any]) -> Answer:
    word = str(value).lower()
    if word != "unsloth" and not word.startswith("offload"):
        return written({"memory.gradient_checkpointing": "all" if is_on(value) else "none"})
    note = "closest equivalent: in host memory, not on disk" if word == "offload_disk" else ""
    return written({"memory.gradient_checkpointing": "all", "memory.offload_activations": "all"}, note)


def _offload(value: Any, section: Mapping[str, Any]) -> Answer:
    note = "closest equivalent: in host memory, not on disk" if value == "disk" else ""
    return written({"memory.offload_activations": "none" if value is False else "all"}, note)


def _share(value: Any, section: Mapping[str, Any]) -> Answer:
    if isinstance(value, int | float) and value > 1:
        return left_out(f"data.eval_share takes a share, not {value:g} rows", is_lost=True)
    return written({"data.eval_share": value}, "no evaluation" if not value else "")


def _per_epoch(key: str, never: str | None) -> Rule:
    def rule(value: Any, section: Mapping[str, Any]) -> Answer:
        if not _are_counts(value):
            return written({key: never})
        return written({key: "epoch" if value == 1 else f"{1 / value:.4g} epochs"})

    return rule


def _interval(key: str) -> Rule:
    """Convert a number of steps, or a share of the run."""

    def rule(value: Any, section: Mapping[str, Any]) -> Answer:
        epochs = section.get("num_epochs") or DEFAULTS["num_epochs"]
        if not isinstance(value, float) or value >= 1 or not isinstance(epochs, int | float):
            return steps_of(key)(value, section)
        return written({key: f"{value * epochs:.4g} epochs"})

    return rule


def _epochs(value: Any, section: Mapping[str, Any]) -> Answer:
    if _are_counts(section.get("max_steps")):
        return left_out("max_steps decides")
    return written({"train.epochs": value})


def _length(value: Any, section: Mapping[str, Any]) -> Answer:
    is_text = section.get("pretraining_dataset") or "completion" in str(section.get("datasets"))  # cut into blocks
    drops = not is_text and section.get("excess_length_strategy") != "truncate"
    return written({"data.max_length": value}, "Axolotl drops longer rows, trimtab truncates them" if drops else "")


def _special_tokens(value: Any, section: Mapping[str, Any]) -> Answer:
    if isinstance(value, Mapping) and set(value) <= {"pad_token"}:
        return left_out("a pad token is chosen if the tokenizer has none")
    return left_out("set them in the folder of the tokenizer, and set model.tokenizer to it", is_lost=True)


def chat_template(value: Any, section: Mapping[str, Any]) -> Answer:
    """Answer for the name of a chat template, in the file or in a dataset."""
    if str(value).startswith("tokenizer_default"):
        return left_out("the template of the tokenizer is used")
    return left_out("the template of the tokenizer is used; to use another one, save it in the tokenizer", is_lost=True)


def _attention(value: Any, section: Mapping[str, Any]) -> Answer:
    kernels = {"eager": "math", "xformers": "efficient"}
    if str(value) in kernels:
        return written({"memory.attention_backend": kernels[str(value)]})
    return left_out("memory.attention_backend: auto chooses the kernel, flash attention where it runs")


def _only_if_on(answer: Answer) -> Rule:
    return lambda value, section: answer if is_on(value) else left_out("false is the default")


def _limit(value: Any, section: Mapping[str, Any]) -> Answer:
    return written({"memory.budget": f"{value}GiB" if isinstance(value, int | float) else value})


def _plugins(value: Any, section: Mapping[str, Any]) -> Answer:
    known = ("liger", "cut_cross_entropy")
    names = value if isinstance(value, list | tuple) else [value]
    others = [str(name) for name in names if not any(word in str(name).lower() for word in known)]
    if others:
        return left_out(f"trimtab has no plugins: {', '.join(others)}", is_lost=True)
    if any("cut_cross_entropy" in str(name).lower() for name in names):
        return written({"memory.loss": "chunked"})
    return left_out("memory.kernels and memory.loss choose these kernels")


_HF_NAMES = (
    *("weight_decay", "adam_epsilon", "adam_beta1", "adam_beta2", "max_grad_norm", "warmup_steps", "warmup_ratio"),
    *("max_steps", "group_by_length", "logging_steps", "save_total_limit", "early_stopping_patience", "output_dir"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "eval_strategy", "save_strategy"),
    *("save_only_model", "auto_find_batch_size", "report_to", "include_num_input_tokens_seen"),
)
_MLFLOW = "runs are tracked in MLflow (track.uri); `trimtab ui` shows them"
_CHOSEN = omit("memory.attention_backend: auto chooses the kernel, flash attention where it runs")
_SPEED = omit("only affects speed; memory.kernels and train.compile choose fused kernels")

AXOLOTL: dict[str, Rule] = {
    **{name: HF_TRAINER[name] for name in _HF_NAMES},
    **renamed("eval_batch_size=evaluate.batch_size mlflow_tracking_uri=track.uri"),
    **renamed("mlflow_experiment_name=track.experiment mlflow_run_name=name seed=seed"),
    "num_epochs": _epochs,
    "base_model": _model,
    "tokenizer_config": write("model.tokenizer"),
    "trust_remote_code": _trusted,
    "adapter": _adapter,
    "load_in_4bit": _four_bits,
    "load_in_8bit": _eight_bits,
    **all_of("lora_r lora_rank", _setting("rank")),
    "lora_alpha": _setting("alpha"),
    "lora_dropout": _setting("dropout"),
    "lora_target_modules": _in_adapter(_targets),
    "lora_target_linear": _in_adapter(_all_linear),
    "lora_modules_to_save": _setting("trains"),
    "peft_use_dora": _setting("dora"),
    "peft_use_rslora": _setting("rslora"),
    "loraplus_lr_ratio": _setting("lr_ratio"),
    "peft_init_lora_weights": _in_adapter(_initial),
    "peft_layers_to_transform": _in_adapter(_layers),
    "lora_model_dir": lose("merge the adapter first (trimtab merge), and write the merged folder as model"),
    **all_of("micro_batch_size gradient_accumulation_steps batch_size", _batch),
    "learning_rate": write("train.lr"),
    "optimizer": write_named("train.optimizer"),
    "lr_scheduler": write_named("train.schedule"),
    **{name: _precision(name) for name in ("bf16", "fp16", "tf32", "bfloat16", "float16", "float32")},
    "gradient_checkpointing": _recompute,
    "activation_offloading": _offload,
    "sequence_len": _length,
    "excess_length_strategy": lambda value, section: left_out("longer rows are truncated", is_lost=value != "truncate"),
    **all_of("sample_packing batch_flattening", packing),
    "val_set_size": _share,
    "evals_per_epoch": _per_epoch("evaluate.every", "1000 epochs"),
    "saves_per_epoch": _per_epoch("checkpoint.every", None),
    "evaluation_strategy": HF_TRAINER["eval_strategy"],
    "eval_steps": _interval("evaluate.every"),
    "save_steps": _interval("checkpoint.every"),
    "torch_compile": write("train.compile", lambda value: "auto" if value == "auto" else if_on("blocks", "off")(value)),
    "gpu_memory_limit": _limit,
    "hf_mlflow_log_artifacts": write("track.log_model", is_on),
    "special_tokens": _special_tokens,
    **all_of("chat_template chat_template_jinja", chat_template),
    "train_on_inputs": lambda value, section: left_out("task: chat has a loss on answers only", is_lost=is_on(value)),
    "attn_implementation": _attention,
    **all_of("flash_attention sdp_attention", _CHOSEN),
    "xformers_attention": _only_if_on(written({"memory.attention_backend": "efficient"})),
    "eager_attention": _only_if_on(written({"memory.attention_backend": "math"})),
    "plugins": _plugins,
    **all_of(
        "liger_rms_norm liger_layer_norm liger_glu_activation liger_rope",
        write("memory.kernels", if_on("liger", "plain")),
    ),
    "liger_fused_linear_cross_entropy": write("memory.loss", if_on("liger", "auto")),
    **all_of("cut_cross_entropy chunked_cross_entropy", write("memory.loss", if_on("chunked", "auto"))),
    **all_of("resume_from_checkpoint auto_resume_from_checkpoints", RESUME),
    **all_of("eval_sample_packing", omit("evaluation follows memory.padding")),
    **all_of("pad_to_sequence_len", omit("rows are padded to the longest of their micro-batch, or not at all")),
    **all_of(
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially multipack_real_batches "
        "pretrain_multipack_attn pretrain_multipack_buffer_size pretraining_sample_concatenation",
        omit("rows of a batch are packed by best fit"),
    ),
    **all_of(
        "dataset_prepared_path skip_prepare_dataset", omit("tokens are cached automatically; TRIMTAB_CACHE moves them")
    ),
    **all_of(
        "dataset_processes dataset_num_proc dataset_keep_in_memory dataloader_num_workers dataloader_pin_memory "
        "dataloader_prefetch_factor dataloader_drop_last",
        WORKERS,
    ),
    **all_of("hub_model_id hub_strategy hub_revision hf_use_auth_token push_dataset_to_hub", UPLOAD),
    **all_of(
        "cls_model_config tokenizer_use_mistral_common tokenizer_save_jinja_files merge_method save_first_step "
        "peft_autocast_adapter_dtype experimental_skip_move_to_device embeddings_skip_upcast is_preprocess "
        "preprocess_iterable total_num_tokens total_supervised_tokens sample_packing_eff_est axolotl_config_path "
        "strict debug model_type tokenizer_type tokenizer_use_fast tokenizer_legacy base_model_config "
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model is_falcon_derived_model "
        "gradient_checkpointing_kwargs lora_fan_in_fan_out low_cpu_mem_usage lora_on_cpu save_safetensors "
        "include_tokens_per_second gc_steps "
        "shuffle_merged_datasets remove_unused_columns qlora_sharded_model_loading torch_compile_backend "
        "torch_compile_mode mean_resizing_embeddings",
        AUTOMATIC,
    ),
    **all_of("device device_map", omit("the device is detected; --device chooses another one")),
    **all_of(
        "local_rank world_size ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters",
        LAUNCH,
    ),
    "merge_lora": omit("`trimtab merge RUN FOLDER` merges an adapter"),
    **all_of(
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv "
        "unsloth_lora_o unsloth_rms_norm unsloth_rope flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv "
        "flash_attn_fuse_mlp",
        _SPEED,
    ),
    **all_of(
        "wandb_project wandb_entity wandb_watch wandb_name wandb_run_id wandb_log_model wandb_mode use_wandb "
        "use_tensorboard use_comet comet_project_name comet_workspace trackio_project_name",
        lose(_MLFLOW),
    ),
    **all_of(
        "deepspeed fsdp fsdp_config fsdp_version fsdp_final_state_dict_type tensor_parallel_size context_parallel_size "
        "sequence_parallel_degree heads_k_stride ring_attn_func dp_shard_size dp_replicate_size",
        NOT_YET,
    ),
    **all_of("loss_watchdog_threshold loss_watchdog_patience", lose("train.on_nan acts on losses that are not finite")),
    "unfrozen_parameters": lose("train.freeze takes patterns of the modules to freeze"),
    **all_of("tokens added_tokens_overrides", lose("add them to the tokenizer, save it, and write model.tokenizer")),
    **all_of("qat quantization", lose("`trimtab quantize` quantizes after training")),
    **all_of(
        "torchdistx_path adam_epsilon2 adam_beta3 lr_quadratic_warmup lr_div_factor use_kernels flash_optimum "
        "model_quantization_config model_quantization_config_kwargs peft_layer_replication peft_ensure_weight_tying "
        "peft_trainable_token_indices loraplus_lr_embedding relora_prune_method relora_cpu_offload bench_split "
        "pose_split_on_token_ids pose_max_context_len pose_num_chunks flex_attn_compile_kwargs num_labels "
        "llama4_linearized_experts dataset_shard_num dataset_shard_idx max_prompt_len rl_beta orpo_alpha rpo_alpha "
        "simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight dpo_use_weighting "
        "lr_groups embedding_lr embedding_lr_scale cosine_min_lr_ratio cosine_constant_lr_ratio lr_scheduler_kwargs "
        "optim_args optim_target_modules neftune_noise_alpha noisy_embedding_alpha relora relora_steps "
        "relora_prune_ratio lisa_n_layers lisa_step_interval flex_attention s2_attention eval_table_size "
        "eval_max_new_tokens eval_sequence_len "
        "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset curriculum_sampling min_sample_len "
        "default_system_message eot_tokens dataset_exact_deduplication revision_of_model gptq bnb_config_kwargs peft "
        "lora_target_parameters peft_layers_pattern max_memory fp8 use_pose profiler_steps accelerator_config "
        "resize_token_embeddings_to_32x shrink_embeddings fix_untrained_tokens trl vllm",
        UNSUPPORTED,
    ),
}
