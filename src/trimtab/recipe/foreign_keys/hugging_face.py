"""Keys of HF Trainer, Hugging Face's example scripts and PEFT, Accelerate, and TRL."""

from collections.abc import Mapping
from typing import Any

from trimtab.errors import as_argument
from trimtab.recipe.foreign_keys.answers import (
    AUTOMATIC,
    LAUNCH,
    MAX_STEPS,
    NOT_YET,
    ON_CPU,
    QUIET,
    RESUME,
    TRACKING,
    UNSUPPORTED,
    UPLOAD,
    WORKERS,
    Answer,
    Rule,
    all_of,
    batch_size,
    if_on,
    is_on,
    left_out,
    lose,
    metric_name,
    omit,
    packing,
    renamed,
    steps_of,
    write,
    write_inside,
    write_named,
    written,
)


def _mixed_precision(precision: str, other: str) -> Rule:
    def rule(value: Any, section: Mapping[str, Any]) -> Answer:
        if not is_on(value) and is_on(section.get(other)):
            return left_out(f"{other} decides")
        return written({"train.precision": precision if is_on(value) else "fp32"})

    return rule


def _betas(value: Any, section: Mapping[str, Any]) -> Answer:
    return written({"train.betas": [section.get("adam_beta1", 0.9), section.get("adam_beta2", 0.999)]})


def _strategy(key: str, steps: str, never: str | None) -> Rule:
    """Combine a strategy and its number of steps, which are two keys there and one here."""

    def rule(value: Any, section: Mapping[str, Any]) -> Answer:
        word = str(value).lower()
        if word == "best":
            return written({"checkpoint.best": True})
        if word in {"no", "false", "none"}:
            return written({key: never})
        return written({key: "epoch"}) if word == "epoch" else steps_of(key)(section.get(steps, 500), section)

    return rule


def _logging_strategy(value: Any, section: Mapping[str, Any]) -> Answer:
    return written({"train.log_every": section.get("logging_steps", 10)}, "a number of steps")


def lora_init(value: Any, section: Mapping[str, Any]) -> Answer:
    """Convert PEFT's `init_lora_weights`: true or a word, pissa with a number of iterations."""
    word = str(value).lower()
    ours = "pissa-fast" if word.startswith("pissa_niter") else word if word in ("pissa", "olora") else "zero"
    note = "" if is_on(value) or ours != "zero" else "closest equivalent"
    settings = {"adapter.kind": "lora", "adapter.init": ours}
    return written(settings, note, f"adapter: {{kind: lora, init: {ours}}}")


_SUMS = omit("evaluation accumulates sums, not all outputs")
_LAUNCH_FLAGS = omit("`trimtab launch` has --processes, --num-hosts, --host-index, --address and --port")

HF_TRAINER: dict[str, Rule] = {
    **renamed(
        "output_dir=out logging_dir=out run_name=name num_train_epochs=train.epochs learning_rate=train.lr "
        "warmup_steps=train.warmup warmup_ratio=train.warmup weight_decay=train.weight_decay adam_epsilon=train.eps "
        "max_grad_norm=train.max_grad_norm label_smoothing_factor=train.label_smoothing "
        "group_by_length=train.group_by_length logging_steps=train.log_every data_seed=seed label_names=data.label "
        "per_device_eval_batch_size=evaluate.batch_size eval_on_start=evaluate.at_start "
        "load_best_model_at_end=checkpoint.best save_total_limit=checkpoint.keep "
        "early_stopping_patience=early_stopping.patience early_stopping_threshold=early_stopping.min_delta "
        "full_determinism=train.deterministic"
    ),
    "max_steps": MAX_STEPS,
    **all_of("per_device_train_batch_size train_batch_size gradient_accumulation_steps", batch_size),
    "auto_find_batch_size": write("memory.micro_batch", lambda value: "auto"),
    "lr_scheduler_type": write_named("train.schedule"),
    "optim": write_named("train.optimizer"),
    "adafactor": write("train.optimizer", lambda value: "adafactor"),
    **all_of("adam_beta1 adam_beta2", _betas),
    "fp16": _mixed_precision("fp16", "bf16"),
    "bf16": _mixed_precision("bf16", "fp16"),
    "tf32": write("train.precision", if_on("tf32", "fp32")),
    **all_of("fp16_full_eval bf16_full_eval", omit("evaluation uses the precision of training")),
    "gradient_checkpointing": write("memory.gradient_checkpointing", if_on("all", "none")),
    "use_liger_kernel": write("memory.kernels", if_on("liger", "plain")),
    "train_sampling_strategy": write("train.group_by_length", lambda value: value == "group_by_length"),
    "logging_strategy": _logging_strategy,
    **all_of("report_to project trackio_space_id trackio_bucket_id trackio_static_space_id", TRACKING),
    **all_of("eval_strategy evaluation_strategy", _strategy("evaluate.every", "eval_steps", "1000 epochs")),
    "eval_steps": steps_of("evaluate.every"),
    "save_strategy": _strategy("checkpoint.every", "save_steps", None),
    "save_steps": steps_of("checkpoint.every"),
    "save_only_model": omit("checkpoint.every: null saves the best model only"),
    "prediction_loss_only": write("evaluate.metric", lambda value: "loss"),
    "metric_for_best_model": write("evaluate.metric", metric_name),
    "greater_is_better": write("early_stopping.mode", if_on("max", "min")),
    "resume_from_checkpoint": RESUME,
    "dataloader_drop_last": omit("every row is used"),
    "remove_unused_columns": omit("columns that no key names are not read"),
    **all_of("use_cpu no_cuda", ON_CPU),
    **all_of("do_train do_eval do_predict", omit("`trimtab train` trains and evaluates, `trimtab predict` predicts")),
    **all_of("disable_tqdm log_level log_level_replica log_on_each_node", QUIET),
    **all_of(
        "eval_accumulation_steps eval_do_concat_batches batch_eval_metrics eval_use_gather_object include_for_metrics",
        _SUMS,
    ),
    **all_of(
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_in_order dataloader_multiprocessing_context",
        WORKERS,
    ),
    **all_of("push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision", UPLOAD),
    **all_of(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
        "local_rank",
        LAUNCH,
    ),
    "torch_compile": write("train.compile", if_on("blocks", "off")),
    **all_of("torch_compile_backend torch_compile_mode", omit("train.compile: blocks uses torch's default compiler")),
    **all_of("fsdp fsdp_config", NOT_YET),
    **all_of(
        "half_precision_backend fp16_opt_level gradient_checkpointing_kwargs length_column_name logging_first_step "
        "logging_nan_inf_filter include_num_input_tokens_seen skip_memory_metrics save_safetensors save_on_each_node "
        "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint average_tokens_across_devices",
        AUTOMATIC,
    ),
    **all_of(
        "lr_scheduler_kwargs optim_args optim_target_modules liger_kernel_config neftune_noise_alpha eval_delay "
        "deepspeed accelerator_config parallelism_config debug use_cache torch_empty_cache_steps",
        UNSUPPORTED,
    ),
}


def _test_rows(value: Any, section: Mapping[str, Any]) -> Answer:
    name = as_argument(value) if isinstance(value, str) else "TEST"
    return Answer(f"leave it out: training uses no test rows; afterwards: trimtab evaluate RUN {name}", is_lost=True)


HF_SCRIPTS: dict[str, Rule] = {
    **renamed(
        "model_name_or_path=model model_name=model num_epochs=train.epochs n_epochs=train.epochs "
        "dataset_name=data.train dataset=data.train train_file=data.train train_data=data.train "
        "train_dataset=data.train validation_file=data.eval eval_file=data.eval eval_dataset=data.eval "
        "eval_data=data.eval validation=data.eval max_seq_length=data.max_length "
        "max_seq_len=data.max_length block_size=data.max_length max_source_length=data.max_length "
        "text_column=data.text text_column_name=data.text dataset_text_field=data.text source_column=data.text "
        "label_column=data.label label_column_name=data.label labels=data.label summary_column=data.target "
        "target_column=data.target"
    ),
    **all_of("test test_file test_data test_dataset", _test_rows),
    **all_of("tokenizer_name tokenizer", write_inside("model", "name", "NAME", "tokenizer")),
    "trust_remote_code": write_inside("model", "name", "NAME", "trust_remote_code"),
    "config_name": lambda value, section: Answer("write model: {config: {model_type: …}, tokenizer: …}", is_lost=True),
    "validation_split_percentage": write("data.eval_share", lambda value: f"{value}%"),
    "max_train_samples": lambda value, section: Answer(f"slice the data: data.train: 'FILE[:{value}]'", is_lost=True),
    "max_eval_samples": lambda value, section: Answer(f"slice the data: data.eval: 'FILE[:{value}]'", is_lost=True),
    **all_of("peft_config lora use_peft use_lora", write("adapter", lambda value: "lora")),
    **all_of("r lora_r lora_rank", write_inside("adapter", "kind", "lora", "rank")),
    "lora_alpha": write_inside("adapter", "kind", "lora", "alpha"),
    "lora_dropout": write_inside("adapter", "kind", "lora", "dropout"),
    **all_of("lora_target_modules target_modules", write_inside("adapter", "kind", "lora", "targets")),
    **all_of("modules_to_save lora_modules_to_save", write_inside("adapter", "kind", "lora", "trains")),
    **all_of("use_rslora peft_use_rslora", write_inside("adapter", "kind", "lora", "rslora")),
    **all_of("use_dora peft_use_dora lora_use_dora", write_inside("adapter", "kind", "lora", "dora")),
    **all_of("loraplus_lr_ratio", write_inside("adapter", "kind", "lora", "lr_ratio")),
    **all_of("init_lora_weights peft_init_lora_weights", lora_init),
    "loraplus_lr_embedding": omit("embeddings get no low-rank matrices; adapter.trains trains them in full"),
    "num_virtual_tokens": write_inside("adapter", "kind", "prompt", "tokens"),
    **all_of(
        "prompt_tuning_init prompt_tuning_init_text", omit("virtual tokens start from the embeddings of random tokens")
    ),
    **all_of(
        "prefix_projection encoder_hidden_size",
        omit("prefixes are trained without a projection, and P-tuning is not supported"),
    ),
    "feedforward_modules": omit("detected from the type of the model, or from their shapes"),
    **all_of("load_in_4bit use_4bit", write("adapter", if_on("qlora", "none"))),
    "load_in_8bit": lose(
        "int8 base weights are not supported; adapter: {kind: lora, base: fp8} uses fp8, adapter: qlora 4 bits"
    ),
    "lr_scheduler": write_named("train.schedule"),
}

ACCELERATE: dict[str, Rule] = {
    "mixed_precision": write_named("train.precision"),
    **all_of("gradient_accumulation_steps gradient_accumulation_plugin", batch_size),
    **all_of("cpu use_cpu", ON_CPU),
    "log_with": TRACKING,
    "project_dir": write("out"),
    "project_config": write("out", lambda value: "FOLDER"),
    "dataloader_config": WORKERS,
    **all_of("split_batches device_placement rng_types step_scheduler_with_optimizer", AUTOMATIC),
    **all_of("num_processes num_machines machine_rank main_process_ip main_process_port", _LAUNCH_FLAGS),
    **all_of("distributed_type gpu_ids rdzv_backend same_network", LAUNCH),
    **all_of("dynamo_backend dynamo_plugin dynamo_config fsdp_plugin torch_tp_plugin", NOT_YET),
    **all_of(
        "deepspeed_plugin deepspeed_plugins deepspeed_config megatron_lm_plugin parallelism_config kwargs_handlers "
        "downcast_bf16 compute_environment main_training_function",
        UNSUPPORTED,
    ),
}

TRL: dict[str, Rule] = {
    **all_of("packing eval_packing padding_free sample_packing", packing),
    "packing_strategy": omit("memory.padding: none packs by best fit within a batch"),
    **all_of("completion_only_loss assistant_only_loss", omit("task: chat computes the loss on answers only")),
}
