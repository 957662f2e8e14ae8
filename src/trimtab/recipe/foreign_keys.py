"""The words of HF Trainer, Accelerate, Lightning and TRL, and ours for them.

They are answered, never obeyed: a recipe has one word for each thing. An answer carries the user's own value over
where it can, so that it may be copied into the recipe.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trimtab.recipe.yaml_text import as_yaml
from trimtab.units import seconds_as_words

# Takes the value and the keys beside it, gives what to write.
Answer = Callable[[Any, Mapping[str, Any]], str]

# Words for values; a note stands in brackets where ours is not quite the same.
_PRECISION = {
    **dict.fromkeys(("16-mixed", "fp16-mixed", "16", "half", "float16"), "fp16"),
    **dict.fromkeys(("bf16-mixed", "bfloat16"), "bf16"),
    **dict.fromkeys(("16-true", "fp16-true"), "fp16 (mixed; pure is not supported)"),
    **dict.fromkeys(("bf16-true", "bf16_pure", "pure-bf16"), "bf16-pure"),
    **dict.fromkeys(("32-true", "32", "no", "none", "float32", "float", "full", "false"), "fp32"),
}
_SCHEDULE = {
    "constant_with_warmup": "constant",
    "linear_with_warmup": "linear",
    "inverse_sqrt": "inverse-sqrt",
    **dict.fromkeys(("warmup_stable_decay", "wsd"), "warmup-stable-decay"),
    **dict.fromkeys(("cosine_with_restarts", "cosine_with_min_lr", "cosine_annealing"), "cosine (the nearest)"),
    "polynomial": "linear (the nearest)",
}
_OPTIMIZER = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "adamw-8bit"), "adamw8bit"),
    **dict.fromkeys(("adam_8bit", "adam_bnb_8bit"), "adam8bit"),
    **dict.fromkeys(("paged_adamw_8bit", "paged_adamw8bit"), "paged-adamw8bit"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "paged-adamw8bit (the nearest)"),
}
_TASK = {
    **dict.fromkeys(
        ("text-classification", "sequence-classification", "sentiment-analysis", "classification"), "classify"
    ),
    **dict.fromkeys(("regression", "sts"), "regress"),
    **dict.fromkeys(("text-generation", "clm", "lm", "causal", "language-modeling"), "causal-lm"),
    **dict.fromkeys(("sft", "instruct", "instruction", "conversational"), "chat"),
    **dict.fromkeys(("summarization", "translation", "text2text-generation", "seq2seq-lm"), "seq2seq"),
    **dict.fromkeys(("fill-mask", "mlm"), "masked-lm"),
}
# Words that people write for our own keys.
_VALUES: dict[str, dict[str, str]] = {
    "train.precision": _PRECISION,
    "train.schedule": _SCHEDULE,
    "train.optimizer": _OPTIMIZER,
    "task": _TASK,
    "early_stopping.mode": {"maximize": "max", "minimize": "min", "true": "max", "false": "min", "auto": "null"},
    "evaluate.every": {"steps": "500 steps", "epochs": "epoch", "no": "1000 epochs", "never": "1000 epochs"},
    "train.max_steps": {"-1": "null", "0": "null"},
    "data.on_bad_rows": {"ignore": "skip", "drop": "skip", "raise": "stop", "error": "stop", "fail": "stop"},
}


def our_word(name: str, value: Any, beside: Mapping[str, Any]) -> str:
    """The answer to a key of another library, or nothing if no library has it.

    Args:
        name: The key, without the section it stands in.
        value: Its value.
        beside: All keys of the same section; some words only have a meaning together.
    """
    libraries = [library for library, words in _WORDS.items() if name in words]
    if not libraries:
        return ""
    return f"a word of {' and '.join(libraries)}; {_WORDS[libraries[0]][name](value, beside)}"


def our_value(key: str, value: Any) -> str:
    """What to write for a value of another library at one of our keys, or nothing."""
    ours = _VALUES.get(key, {}).get(str(value).lower())
    return f"write {ours}" if ours else ""


def _to(key: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Answer:
    return lambda value, beside: f"write {key}: {as_yaml(convert(value))}" + (f" ({note})" if note else "")


def _none(reason: str) -> Answer:
    return lambda value, beside: f"leave it out: {reason}"


def _not_yet(key: str = "") -> Answer:
    ours = f"; it will be {key}" if key else ""
    return lambda value, beside: f"leave it out: not supported yet in this version{ours}"


def _named(key: str) -> Answer:
    return lambda value, beside: f"write {key}: {_VALUES[key].get(str(value).lower()) or as_yaml(value)}"


def _metric(value: Any) -> Any:
    return str(value).removeprefix("eval_").removeprefix("val_")


def _is_on(value: Any) -> bool:
    return str(value).lower() in {"true", "yes", "on", "1"}


def _mixed(precision: str, other: str) -> Answer:
    def answer(value: Any, beside: Mapping[str, Any]) -> str:
        if not _is_on(value) and _is_on(beside.get(other)):
            return f"leave it out: {other} decides"
        return f"write train.precision: {precision if _is_on(value) else 'fp32'}"

    return answer


def _batch(value: Any, beside: Mapping[str, Any]) -> str:
    """batch_size is what the optimizer sees, so both words of the others are needed to know it."""
    rows = beside.get("per_device_train_batch_size", beside.get("train_batch_size", beside.get("batch_size")))
    pieces = beside.get("gradient_accumulation_steps", beside.get("accumulate_grad_batches", 1))
    if isinstance(rows, int) and isinstance(pieces, int):
        product = f" = {rows} × {pieces}" if pieces != 1 else ""
        cut = f", and memory.micro_batch: {rows} if it must be cut so" if pieces != 1 else ""
        return (
            f"write train.batch_size: {rows * pieces} (all rows of an optimizer step{product}, times the devices){cut}"
        )
    return "write train.batch_size: all rows of an optimizer step; memory.micro_batch is how many go through at once"


def _adapter(name: str) -> Answer:
    """Keys of LoRA stand in a section of their own."""
    return lambda value, beside: f"write adapter: {{kind: lora, {name}: {as_yaml(value)}}}"


def _betas(value: Any, beside: Mapping[str, Any]) -> str:
    return f"write train.betas: {as_yaml([beside.get('adam_beta1', 0.9), beside.get('adam_beta2', 0.999)])}"


def _eval_strategy(value: Any, beside: Mapping[str, Any]) -> str:
    """A strategy and its number of steps are two words there, one here."""
    words = str(value).lower()
    if words in {"no", "false", "none"}:
        return "write evaluate.every: 1000 epochs (the last step is always evaluated)"
    return "write evaluate.every: epoch" if words == "epoch" else _eval_steps(beside.get("eval_steps", 500), beside)


def _eval_steps(value: Any, beside: Mapping[str, Any]) -> str:
    if isinstance(value, float) and value < 1:
        return f"write evaluate.every: {value:g} epochs (of an epoch, not of the run), or a number of steps"
    return f"write evaluate.every: {as_yaml(f'{value} steps')}"


def _logging_strategy(value: Any, beside: Mapping[str, Any]) -> str:
    return f"write train.log_every: {as_yaml(beside.get('logging_steps', 10))} (it counts steps)"


def _check_interval(value: Any, beside: Mapping[str, Any]) -> str:
    unit = "epochs" if isinstance(value, float) else "steps"
    return f"write evaluate.every: {as_yaml('epoch' if value == 1.0 and unit == 'epochs' else f'{value} {unit}')}"


def _lightning_time(value: Any) -> Any:
    """DD:HH:MM:SS, or a mapping as for timedelta."""
    sizes = (86400, 3600, 60, 1)
    if isinstance(value, Mapping):
        value = ":".join(str(value.get(unit, 0)) for unit in ("days", "hours", "minutes", "seconds"))
    parts = str(value).split(":")
    if len(parts) == 4 and all(part.isdecimal() for part in parts):
        return seconds_as_words(sum(int(part) * size for part, size in zip(parts, sizes, strict=True)))
    return value


def _tracker(value: Any) -> str:
    words = {str(word).lower() for word in (value if isinstance(value, list | tuple) else [value])}
    return "none" if words <= {"none", "false", "no", "off"} else "local"


def _model_with(key: str) -> Answer:
    return lambda value, beside: f"write model: {{name: NAME, {key}: {as_yaml(value)}}}"


_AUTOMATIC = _none("done by itself")
_OTHER_FRAMEWORK = _none("it has no counterpart here")
_TRACKER = _to("track.uri", _tracker, "MLflow; local is a store beside the runs")
_DEVICES = _none("the device is found by itself; --device chooses another")
_SAVING = _not_yet("checkpoint.every")
_SUMS = _none("evaluation keeps sums, never all outputs")
_QUIET = _none("--quiet says nothing but errors")
_UPLOAD = _none("best/ is a Hugging Face folder that can be uploaded as it is")
_WORKERS = _none("loading runs beside the training by itself")

_HF_TRAINER: dict[str, Answer] = {
    "output_dir": _to("out"),
    "run_name": _to("name"),
    "num_train_epochs": _to("train.epochs"),
    "max_steps": _to("train.max_steps", lambda value: None if value == -1 else value),
    "per_device_train_batch_size": _batch,
    "train_batch_size": _batch,
    "gradient_accumulation_steps": _batch,
    "per_device_eval_batch_size": _to("evaluate.batch_size"),
    "auto_find_batch_size": _to("memory.micro_batch", lambda value: "auto"),
    "learning_rate": _to("train.lr"),
    "lr_scheduler_type": _named("train.schedule"),
    "lr_scheduler_kwargs": _OTHER_FRAMEWORK,
    "warmup_steps": _to("train.warmup"),
    "warmup_ratio": _to("train.warmup"),
    "optim": _named("train.optimizer"),
    "optim_args": _OTHER_FRAMEWORK,
    "weight_decay": _to("train.weight_decay"),
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "adam_epsilon": _to("train.eps"),
    "adafactor": _to("train.optimizer", lambda value: "adafactor"),
    "max_grad_norm": _to("train.max_grad_norm"),
    "label_smoothing_factor": _to("train.label_smoothing"),
    "fp16": _mixed("fp16", "bf16"),
    "bf16": _mixed("bf16", "fp16"),
    "half_precision_backend": _AUTOMATIC,
    "fp16_opt_level": _AUTOMATIC,
    **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), _none("evaluation has the precision of training")),
    "tf32": _to("train.precision", lambda value: "tf32" if _is_on(value) else "fp32"),
    "gradient_checkpointing": _to("memory.gradient_checkpointing", lambda value: "all" if _is_on(value) else "none"),
    "gradient_checkpointing_kwargs": _AUTOMATIC,
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _not_yet()),
    "use_liger_kernel": _to("memory.kernels", lambda value: "liger" if _is_on(value) else "plain"),
    "liger_kernel_config": _OTHER_FRAMEWORK,
    "neftune_noise_alpha": _OTHER_FRAMEWORK,
    "group_by_length": _to("train.group_by_length"),
    "train_sampling_strategy": _to("train.group_by_length", lambda value: value == "group_by_length"),
    "length_column_name": _AUTOMATIC,
    "logging_dir": _to("out"),
    "logging_strategy": _logging_strategy,
    "logging_steps": _to("train.log_every"),
    "logging_first_step": _AUTOMATIC,
    **dict.fromkeys(("disable_tqdm", "log_level", "log_level_replica", "log_on_each_node"), _QUIET),
    **dict.fromkeys(("logging_nan_inf_filter", "include_num_input_tokens_seen", "skip_memory_metrics"), _AUTOMATIC),
    **dict.fromkeys(("report_to", "project", "trackio_space_id", "trackio_bucket_id"), _TRACKER),
    "trackio_static_space_id": _TRACKER,
    "eval_strategy": _eval_strategy,
    "evaluation_strategy": _eval_strategy,
    "eval_steps": _eval_steps,
    "eval_delay": _OTHER_FRAMEWORK,
    "eval_on_start": _to("evaluate.at_start"),
    **dict.fromkeys(("eval_accumulation_steps", "eval_do_concat_batches", "batch_eval_metrics"), _SUMS),
    **dict.fromkeys(("eval_use_gather_object", "include_for_metrics"), _SUMS),
    "prediction_loss_only": _to("evaluate.metric", lambda value: "loss"),
    "save_strategy": lambda value, beside: (
        _to("checkpoint.best", lambda _: True)(value, beside) if value == "best" else _SAVING(value, beside)
    ),
    "save_steps": _SAVING,
    "save_total_limit": _not_yet("checkpoint.keep"),
    **dict.fromkeys(("save_only_model", "save_on_each_node"), _none("only the best model is kept")),
    **dict.fromkeys(("enable_jit_checkpoint", "ignore_data_skip"), _not_yet("checkpoint.every")),
    "restore_callback_states_from_checkpoint": _not_yet("checkpoint.every"),
    "save_safetensors": _AUTOMATIC,
    "load_best_model_at_end": _to("checkpoint.best"),
    "metric_for_best_model": _to("evaluate.metric", _metric),
    "greater_is_better": _to("early_stopping.mode", lambda value: "max" if _is_on(value) else "min"),
    "early_stopping_patience": _to("early_stopping.patience"),
    "early_stopping_threshold": _to("early_stopping.min_delta"),
    "data_seed": _to("seed"),
    **dict.fromkeys(("full_determinism", "average_tokens_across_devices"), _AUTOMATIC),
    **dict.fromkeys(("use_cpu", "no_cuda"), _none("--device cpu")),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"), _WORKERS),
    **dict.fromkeys(("dataloader_prefetch_factor", "dataloader_in_order"), _WORKERS),
    "dataloader_multiprocessing_context": _WORKERS,
    "dataloader_drop_last": _none("every row is used"),
    "remove_unused_columns": _none("columns that no key names are not read"),
    "label_names": _to("data.label"),
    "resume_from_checkpoint": _not_yet(),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"), _UPLOAD),
    **dict.fromkeys(("hub_always_push", "hub_revision"), _UPLOAD),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), _not_yet()),
    **dict.fromkeys(
        ("ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank", "fsdp", "fsdp_config"), _not_yet()
    ),
    **dict.fromkeys(("deepspeed", "accelerator_config", "parallelism_config", "debug", "use_cache"), _OTHER_FRAMEWORK),
    **dict.fromkeys(("optim_target_modules", "torch_empty_cache_steps"), _OTHER_FRAMEWORK),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict"), _none("`trimtab train` trains and evaluates, `trimtab predict` predicts")
    ),
}

_HF_SCRIPTS: dict[str, Answer] = {
    "model_name_or_path": _to("model"),
    "model_name": _to("model"),
    "tokenizer_name": _model_with("tokenizer"),
    "tokenizer": _model_with("tokenizer"),
    "trust_remote_code": _model_with("trust_remote_code"),
    "config_name": lambda value, beside: "write model: {config: {model_type: …}, tokenizer: …}",
    **dict.fromkeys(("dataset_name", "dataset", "train_file", "train_data", "train_dataset"), _to("data.train")),
    **dict.fromkeys(
        ("validation_file", "eval_file", "eval_dataset", "eval_data", "validation", "test_file"), _to("data.eval")
    ),
    "validation_split_percentage": _to("data.eval_share", lambda value: f"{value}%"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "block_size", "max_source_length"), _to("data.max_length")),
    **dict.fromkeys(("text_column", "text_column_name", "dataset_text_field", "source_column"), _to("data.text")),
    **dict.fromkeys(("label_column", "label_column_name", "labels"), _to("data.label")),
    **dict.fromkeys(("summary_column", "target_column"), _to("data.target")),
    "max_train_samples": lambda value, beside: f"slice the data: data.train: 'FILE[:{value}]'",
    "max_eval_samples": lambda value, beside: f"slice the data: data.eval: 'FILE[:{value}]'",
    **dict.fromkeys(("peft_config", "lora", "use_peft", "use_lora"), _to("adapter", lambda value: "lora")),
    **dict.fromkeys(("lora_r", "lora_rank"), _adapter("rank")),
    "lora_alpha": _adapter("alpha"),
    "lora_dropout": _adapter("dropout"),
    **dict.fromkeys(("lora_target_modules", "target_modules"), _adapter("targets")),
    **dict.fromkeys(("modules_to_save", "lora_modules_to_save"), _adapter("trains")),
    "use_rslora": _adapter("rslora"),
    **dict.fromkeys(("load_in_4bit", "use_4bit"), _to("adapter", lambda value: "qlora" if _is_on(value) else "none")),
    "load_in_8bit": _none("weights of 8 bits are not trained on here; adapter: qlora has them in 4"),
    **dict.fromkeys(("num_epochs", "n_epochs"), _to("train.epochs")),
    "lr_scheduler": _named("train.schedule"),
}

_ACCELERATE: dict[str, Answer] = {
    "mixed_precision": _named("train.precision"),
    "gradient_accumulation_steps": _batch,
    "gradient_accumulation_plugin": _batch,
    "cpu": _none("--device cpu"),
    "use_cpu": _none("--device cpu"),
    "log_with": _TRACKER,
    "project_dir": _to("out"),
    "project_config": _to("out", lambda value: "FOLDER"),
    **dict.fromkeys(("split_batches", "device_placement", "rng_types", "step_scheduler_with_optimizer"), _AUTOMATIC),
    "dataloader_config": _WORKERS,
    **dict.fromkeys(("dynamo_backend", "dynamo_plugin", "dynamo_config", "fsdp_plugin", "torch_tp_plugin"), _not_yet()),
    **dict.fromkeys(
        ("deepspeed_plugin", "deepspeed_plugins", "deepspeed_config", "megatron_lm_plugin"), _OTHER_FRAMEWORK
    ),
    **dict.fromkeys(
        ("parallelism_config", "kwargs_handlers", "downcast_bf16", "compute_environment"), _OTHER_FRAMEWORK
    ),
    **dict.fromkeys(
        ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"), _not_yet()
    ),
    **dict.fromkeys(("distributed_type", "gpu_ids", "rdzv_backend", "same_network"), _not_yet()),
    "main_training_function": _OTHER_FRAMEWORK,
}

_LIGHTNING: dict[str, Answer] = {
    "max_epochs": _to("train.epochs"),
    "max_steps": _to("train.max_steps", lambda value: None if value == -1 else value),
    "max_time": _to("train.max_time", _lightning_time),
    **dict.fromkeys(("min_epochs", "min_steps"), _none("training stops early only if early_stopping says so")),
    "accumulate_grad_batches": _batch,
    "gradient_clip_val": _to("train.max_grad_norm"),
    "gradient_clip_algorithm": _none("gradients are clipped by norm"),
    "precision": _named("train.precision"),
    "fast_dev_run": _to("limits.fast_dev_run"),
    "overfit_batches": _to("limits.overfit_batches", note="a whole number"),
    "limit_train_batches": _to("limits.train"),
    "limit_val_batches": _to("limits.eval"),
    **dict.fromkeys(("limit_test_batches", "limit_predict_batches"), _none("slice the file that is predicted")),
    "val_check_interval": _check_interval,
    "check_val_every_n_epoch": lambda value, beside: (
        f"write evaluate.every: {'epoch' if value == 1 else f'{value} epochs'}"
    ),
    "num_sanity_val_steps": _to("evaluate.at_start", bool),
    "log_every_n_steps": _to("train.log_every"),
    "enable_checkpointing": _to("checkpoint.best"),
    **dict.fromkeys(("enable_progress_bar", "enable_model_summary"), _QUIET),
    **dict.fromkeys(("accelerator", "devices", "gpus"), _DEVICES),
    **dict.fromkeys(("num_nodes", "strategy", "use_distributed_sampler", "sync_batchnorm"), _not_yet()),
    "logger": _TRACKER,
    "callbacks": _none("fit(recipe, callbacks=[...]) takes them in Python"),
    "default_root_dir": _to("out"),
    "deterministic": _AUTOMATIC,
    "seed_everything": _to("seed"),
    "monitor": _to("early_stopping.metric", _metric),
    **dict.fromkeys(
        ("benchmark", "inference_mode", "barebones", "reload_dataloaders_every_n_epochs"), _OTHER_FRAMEWORK
    ),
    **dict.fromkeys(
        ("profiler", "detect_anomaly", "plugins", "enable_autolog_hparams", "model_registry"), _OTHER_FRAMEWORK
    ),
}

_PACKING = _none(
    "rows are not packed yet; task: causal-lm joins all texts and cuts them into full blocks of data.max_length, and "
    "train.group_by_length: true keeps the padding of other tasks small"
)
_TRL: dict[str, Answer] = {
    **dict.fromkeys(("packing", "packing_strategy", "eval_packing", "padding_free", "sample_packing"), _PACKING),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), _none("task: chat learns the answers alone")),
}

_WORDS = {
    "HF Trainer": _HF_TRAINER,
    "Accelerate": _ACCELERATE,
    "Lightning": _LIGHTNING,
    "Hugging Face scripts": _HF_SCRIPTS,
    "TRL": _TRL,
}
