"""Keys and values of HF Trainer, Accelerate, Lightning and TRL, and what to write instead.

They are never accepted: a recipe has one name for each setting. The error message gives the recipe key, with the value
that the user wrote converted where possible, ready to be pasted.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trimtab.recipe.yaml_text import as_yaml
from trimtab.units import exact_seconds

V = TypeVar("V")
# Takes the value and all keys of the same section; returns what to write instead.
Answer = Callable[[Any, Mapping[str, Any]], str]


def _all(names: str, value: V) -> dict[str, V]:
    """Map each name, separated by spaces, to the same value."""
    return dict.fromkeys(names.split(), value)


# Recipe key → value in another library (in lower case) → our value; a note in brackets says where they differ.
_VALUES: dict[str, dict[str, str]] = {
    "train.precision": {
        **_all("16-mixed fp16-mixed 16 half float16", "fp16"),
        **_all("bf16-mixed bfloat16", "bf16"),
        **_all("16-true fp16-true", "fp16 (mixed; pure fp16 is not supported)"),
        **_all("bf16-true bf16_pure pure-bf16", "bf16-pure"),
        **_all("32-true 32 no none float32 float full false", "fp32"),
    },
    "train.schedule": {
        "constant_with_warmup": "constant",
        "linear_with_warmup": "linear",
        "inverse_sqrt": "inverse-sqrt",
        **_all("warmup_stable_decay wsd", "warmup-stable-decay"),
        **_all("cosine_with_restarts cosine_with_min_lr cosine_annealing", "cosine (the nearest)"),
        "polynomial": "linear (the nearest)",
    },
    "train.optimizer": {
        **_all("adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_fused", "adamw"),
        **_all("adamw_8bit adamw_bnb_8bit adamw_torch_8bit adamw-8bit", "adamw8bit"),
        **_all("adam_8bit adam_bnb_8bit", "adam8bit"),
        **_all("paged_adamw_8bit paged_adamw8bit", "paged-adamw8bit"),
        **_all("paged_adamw_32bit paged_adamw", "paged-adamw8bit (the nearest)"),
    },
    "task": {
        **_all("text-classification sequence-classification sentiment-analysis classification", "classify"),
        **_all("regression sts", "regress"),
        **_all("text-generation clm lm causal language-modeling", "causal-lm"),
        **_all("sft instruct instruction conversational", "chat"),
        **_all("summarization translation text2text-generation seq2seq-lm", "seq2seq"),
        **_all("fill-mask mlm", "masked-lm"),
    },
    "adapter": {
        "dora": "{kind: lora, dora: true}",
        **_all("prompt_tuning prompt-tuning", "prompt"),
        **_all("prefix_tuning prefix-tuning", "prefix"),
        **_all("p_tuning p-tuning", "prompt (the nearest)"),
    },
    "early_stopping.mode": {"maximize": "max", "minimize": "min", "true": "max", "false": "min", "auto": "null"},
    "evaluate.every": {"steps": "500 steps", "epochs": "epoch", "no": "1000 epochs", "never": "1000 epochs"},
    "train.max_steps": {"-1": "null", "0": "null"},
    "data.on_bad_rows": {"ignore": "skip", "drop": "skip", "raise": "stop", "error": "stop", "fail": "stop"},
}


def translate_key(name: str, value: Any, section: Mapping[str, Any]) -> str:
    """Say what to write instead of a key of another library; empty if no known library has the key.

    Args:
        name: The key, without its section.
        value: Its value.
        section: All keys of the same section; some keys only have a meaning together.
    """
    libraries = [library for library, answers in _LIBRARIES.items() if name in answers]
    if not libraries:
        return ""
    return f"a key of {' and '.join(libraries)}; {_LIBRARIES[libraries[0]][name](value, section)}"


def translate_value(key: str, value: Any) -> str:
    """Say what to write instead of a value of another library for one of our keys; empty if it is not known."""
    ours = _VALUES.get(key, {}).get(str(value).lower())
    return f"write {ours}" if ours else ""


def _write(key: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Answer:
    return lambda value, section: f"write {key}: {as_yaml(convert(value))}" + (f" ({note})" if note else "")


def _write_named(key: str) -> Answer:
    return lambda value, section: f"write {key}: {_VALUES[key].get(str(value).lower()) or as_yaml(value)}"


def _write_inside(outer: str, before: str, key: str) -> Answer:
    """Answer with a mapping that also needs another key, such as the kind of an adapter."""
    return lambda value, section: f"write {outer}: {{{before}, {key}: {as_yaml(value)}}}"


def _omit(reason: str) -> Answer:
    return lambda value, section: f"leave it out: {reason}"


def _renamed(pairs: str) -> dict[str, Answer]:
    """Parse keys whose value stays the same: "theirs=ours", separated by spaces."""
    return {theirs: _write(ours) for theirs, ours in (pair.split("=") for pair in pairs.split())}


def _metric(value: Any) -> Any:
    return str(value).removeprefix("eval_").removeprefix("val_")


def _is_on(value: Any) -> bool:
    return str(value).lower() in {"true", "yes", "on", "1"}


def _if_on(on: str, off: str) -> Callable[[Any], str]:
    return lambda value: on if _is_on(value) else off


def _mixed_precision(precision: str, other: str) -> Answer:
    def answer(value: Any, section: Mapping[str, Any]) -> str:
        if not _is_on(value) and _is_on(section.get(other)):
            return f"leave it out: {other} decides"
        return f"write train.precision: {precision if _is_on(value) else 'fp32'}"

    return answer


def _batch_size(value: Any, section: Mapping[str, Any]) -> str:
    """Multiply the micro-batch size by the accumulation steps: `train.batch_size` counts rows per optimizer step."""
    rows = section.get("per_device_train_batch_size", section.get("train_batch_size", section.get("batch_size")))
    steps = section.get("gradient_accumulation_steps", section.get("accumulate_grad_batches", 1))
    if not isinstance(rows, int) or not isinstance(steps, int):
        return "write train.batch_size: rows per optimizer step; memory.micro_batch: rows per forward pass"
    total = f"write train.batch_size: {rows * steps} ({rows} × {steps} × the number of devices)"
    return total if steps == 1 else f"{total}, and memory.micro_batch: {rows} to keep that split"


def _betas(value: Any, section: Mapping[str, Any]) -> str:
    return f"write train.betas: {as_yaml([section.get('adam_beta1', 0.9), section.get('adam_beta2', 0.999)])}"


def _steps(key: str) -> Answer:
    def answer(value: Any, section: Mapping[str, Any]) -> str:
        if isinstance(value, float) and value < 1:
            return f"write {key}: {value:g} epochs (of an epoch, not of the run), or a number of steps"
        return f"write {key}: {as_yaml(f'{value} steps')}"

    return answer


def _strategy(key: str, steps: str, never: str) -> Answer:
    """Combine a strategy and its number of steps, which are two keys there and one here."""

    def answer(value: Any, section: Mapping[str, Any]) -> str:
        word = str(value).lower()
        if word == "best":
            return "write checkpoint.best: true"
        if word in {"no", "false", "none"}:
            return f"write {key}: {never}"
        return f"write {key}: epoch" if word == "epoch" else _steps(key)(section.get(steps, 500), section)

    return answer


def _logging_strategy(value: Any, section: Mapping[str, Any]) -> str:
    return f"write train.log_every: {as_yaml(section.get('logging_steps', 10))} (a number of steps)"


def _check_interval(value: Any, section: Mapping[str, Any]) -> str:
    unit = "epochs" if isinstance(value, float) else "steps"
    return f"write evaluate.every: {as_yaml('epoch' if value == 1.0 and unit == 'epochs' else f'{value} {unit}')}"


def _lightning_time(value: Any) -> Any:
    """Convert DD:HH:MM:SS, or a mapping of the arguments of timedelta."""
    sizes = (86400, 3600, 60, 1)
    if isinstance(value, Mapping):
        value = ":".join(str(value.get(unit, 0)) for unit in ("days", "hours", "minutes", "seconds"))
    parts = str(value).split(":")
    if len(parts) == 4 and all(part.isdecimal() for part in parts):
        return exact_seconds(sum(int(part) * size for part, size in zip(parts, sizes, strict=True)))
    return value


def _tracker(value: Any) -> str:
    words = {str(word).lower() for word in (value if isinstance(value, list | tuple) else [value])}
    return "none" if words <= {"none", "false", "no", "off"} else "local"


def _lora_init(value: Any, section: Mapping[str, Any]) -> str:
    """PEFT's `init_lora_weights` is true or a word, pissa with a number of iterations."""
    word = str(value).lower()
    ours = "pissa-fast" if word.startswith("pissa_niter") else word if word in ("pissa", "olora") else "zero"
    return f"write adapter: {{kind: lora, init: {ours}}}" + (
        "" if _is_on(value) or ours != "zero" else " (the nearest)"
    )


_AUTOMATIC = _omit("done automatically")
_UNSUPPORTED = _omit("trimtab has no equivalent")
_NOT_YET = _omit("not supported yet in this version")
_LAUNCH = _omit("`trimtab launch` starts several processes and sets up data parallel training")
_LAUNCH_FLAGS = _omit("`trimtab launch` has --processes, --num-hosts, --host-index, --address and --port")
_ON_CPU = _omit("pass --device cpu")
_QUIET = _omit("--quiet prints errors only")
_SUMS = _omit("evaluation accumulates sums, not all outputs")
_UPLOAD = _omit("best/ is a Hugging Face folder, ready to upload")
_WORKERS = _omit("data is loaded in the background automatically")
_TRACKING = _write("track.uri", _tracker, "MLflow; local is a store in runs/")
_MAX_STEPS = _write("train.max_steps", lambda value: None if value == -1 else value)
_PACKING = _write(
    "memory.padding",
    lambda value: "longest" if value is False else "none",
    "rows of a batch are concatenated, and attention stays within each",
)

_HF_TRAINER: dict[str, Answer] = {
    **_renamed(
        "output_dir=out logging_dir=out run_name=name num_train_epochs=train.epochs learning_rate=train.lr "
        "warmup_steps=train.warmup warmup_ratio=train.warmup weight_decay=train.weight_decay adam_epsilon=train.eps "
        "max_grad_norm=train.max_grad_norm label_smoothing_factor=train.label_smoothing "
        "group_by_length=train.group_by_length logging_steps=train.log_every data_seed=seed label_names=data.label "
        "per_device_eval_batch_size=evaluate.batch_size eval_on_start=evaluate.at_start "
        "load_best_model_at_end=checkpoint.best save_total_limit=checkpoint.keep "
        "early_stopping_patience=early_stopping.patience early_stopping_threshold=early_stopping.min_delta "
        "full_determinism=train.deterministic"
    ),
    "max_steps": _MAX_STEPS,
    **_all("per_device_train_batch_size train_batch_size gradient_accumulation_steps", _batch_size),
    "auto_find_batch_size": _write("memory.micro_batch", lambda value: "auto"),
    "lr_scheduler_type": _write_named("train.schedule"),
    "optim": _write_named("train.optimizer"),
    "adafactor": _write("train.optimizer", lambda value: "adafactor"),
    **_all("adam_beta1 adam_beta2", _betas),
    "fp16": _mixed_precision("fp16", "bf16"),
    "bf16": _mixed_precision("bf16", "fp16"),
    "tf32": _write("train.precision", _if_on("tf32", "fp32")),
    **_all("fp16_full_eval bf16_full_eval", _omit("evaluation uses the precision of training")),
    "gradient_checkpointing": _write("memory.gradient_checkpointing", _if_on("all", "none")),
    "use_liger_kernel": _write("memory.kernels", _if_on("liger", "plain")),
    "train_sampling_strategy": _write("train.group_by_length", lambda value: value == "group_by_length"),
    "logging_strategy": _logging_strategy,
    **_all("report_to project trackio_space_id trackio_bucket_id trackio_static_space_id", _TRACKING),
    **_all("eval_strategy evaluation_strategy", _strategy("evaluate.every", "eval_steps", "1000 epochs")),
    "eval_steps": _steps("evaluate.every"),
    "save_strategy": _strategy("checkpoint.every", "save_steps", "null"),
    "save_steps": _steps("checkpoint.every"),
    "save_only_model": _omit("checkpoint.every: null saves the best model only"),
    "prediction_loss_only": _write("evaluate.metric", lambda value: "loss"),
    "metric_for_best_model": _write("evaluate.metric", _metric),
    "greater_is_better": _write("early_stopping.mode", _if_on("max", "min")),
    "resume_from_checkpoint": _omit("`trimtab resume RUN` resumes a run"),
    "dataloader_drop_last": _omit("every row is used"),
    "remove_unused_columns": _omit("columns that no key names are not read"),
    **_all("use_cpu no_cuda", _ON_CPU),
    **_all("do_train do_eval do_predict", _omit("`trimtab train` trains and evaluates, `trimtab predict` predicts")),
    **_all("disable_tqdm log_level log_level_replica log_on_each_node", _QUIET),
    **_all(
        "eval_accumulation_steps eval_do_concat_batches batch_eval_metrics eval_use_gather_object include_for_metrics",
        _SUMS,
    ),
    **_all(
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_in_order dataloader_multiprocessing_context",
        _WORKERS,
    ),
    **_all("push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision", _UPLOAD),
    **_all(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
        "local_rank",
        _LAUNCH,
    ),
    "torch_compile": _write("train.compile", _if_on("blocks", "off")),
    **_all("torch_compile_backend torch_compile_mode", _omit("train.compile: blocks uses torch's default compiler")),
    **_all("fsdp fsdp_config", _NOT_YET),
    **_all(
        "half_precision_backend fp16_opt_level gradient_checkpointing_kwargs length_column_name logging_first_step "
        "logging_nan_inf_filter include_num_input_tokens_seen skip_memory_metrics save_safetensors save_on_each_node "
        "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint average_tokens_across_devices",
        _AUTOMATIC,
    ),
    **_all(
        "lr_scheduler_kwargs optim_args optim_target_modules liger_kernel_config neftune_noise_alpha eval_delay "
        "deepspeed accelerator_config parallelism_config debug use_cache torch_empty_cache_steps",
        _UNSUPPORTED,
    ),
}

_HF_SCRIPTS: dict[str, Answer] = {
    **_renamed(
        "model_name_or_path=model model_name=model num_epochs=train.epochs n_epochs=train.epochs "
        "dataset_name=data.train dataset=data.train train_file=data.train train_data=data.train "
        "train_dataset=data.train validation_file=data.eval eval_file=data.eval eval_dataset=data.eval "
        "eval_data=data.eval validation=data.eval test_file=data.eval max_seq_length=data.max_length "
        "max_seq_len=data.max_length block_size=data.max_length max_source_length=data.max_length "
        "text_column=data.text text_column_name=data.text dataset_text_field=data.text source_column=data.text "
        "label_column=data.label label_column_name=data.label labels=data.label summary_column=data.target "
        "target_column=data.target"
    ),
    **_all("tokenizer_name tokenizer", _write_inside("model", "name: NAME", "tokenizer")),
    "trust_remote_code": _write_inside("model", "name: NAME", "trust_remote_code"),
    "config_name": lambda value, section: "write model: {config: {model_type: …}, tokenizer: …}",
    "validation_split_percentage": _write("data.eval_share", lambda value: f"{value}%"),
    "max_train_samples": lambda value, section: f"slice the data: data.train: 'FILE[:{value}]'",
    "max_eval_samples": lambda value, section: f"slice the data: data.eval: 'FILE[:{value}]'",
    **_all("peft_config lora use_peft use_lora", _write("adapter", lambda value: "lora")),
    **_all("lora_r lora_rank", _write_inside("adapter", "kind: lora", "rank")),
    "lora_alpha": _write_inside("adapter", "kind: lora", "alpha"),
    "lora_dropout": _write_inside("adapter", "kind: lora", "dropout"),
    **_all("lora_target_modules target_modules", _write_inside("adapter", "kind: lora", "targets")),
    **_all("modules_to_save lora_modules_to_save", _write_inside("adapter", "kind: lora", "trains")),
    **_all("use_rslora peft_use_rslora", _write_inside("adapter", "kind: lora", "rslora")),
    **_all("use_dora peft_use_dora lora_use_dora", _write_inside("adapter", "kind: lora", "dora")),
    **_all("loraplus_lr_ratio", _write_inside("adapter", "kind: lora", "lr_ratio")),
    **_all("init_lora_weights peft_init_lora_weights", _lora_init),
    "loraplus_lr_embedding": _omit("embeddings get no low-rank matrices; adapter.trains trains them in full"),
    "num_virtual_tokens": _write_inside("adapter", "kind: prompt", "tokens"),
    **_all("prompt_tuning_init prompt_tuning_init_text", _omit("virtual tokens start as those of random tokens")),
    **_all(
        "prefix_projection encoder_hidden_size",
        _omit("prefixes train without a projection, and P-tuning is not supported"),
    ),
    "feedforward_modules": _omit("found by the type of the model, or by their shapes"),
    **_all("load_in_4bit use_4bit", _write("adapter", _if_on("qlora", "none"))),
    "load_in_8bit": _omit(
        "int8 base weights are not supported; adapter: {kind: lora, base: fp8} uses fp8, adapter: qlora 4 bits"
    ),
    "lr_scheduler": _write_named("train.schedule"),
}

_ACCELERATE: dict[str, Answer] = {
    "mixed_precision": _write_named("train.precision"),
    **_all("gradient_accumulation_steps gradient_accumulation_plugin", _batch_size),
    **_all("cpu use_cpu", _ON_CPU),
    "log_with": _TRACKING,
    "project_dir": _write("out"),
    "project_config": _write("out", lambda value: "FOLDER"),
    "dataloader_config": _WORKERS,
    **_all("split_batches device_placement rng_types step_scheduler_with_optimizer", _AUTOMATIC),
    **_all("num_processes num_machines machine_rank main_process_ip main_process_port", _LAUNCH_FLAGS),
    **_all("distributed_type gpu_ids rdzv_backend same_network", _LAUNCH),
    **_all("dynamo_backend dynamo_plugin dynamo_config fsdp_plugin torch_tp_plugin", _NOT_YET),
    **_all(
        "deepspeed_plugin deepspeed_plugins deepspeed_config megatron_lm_plugin parallelism_config kwargs_handlers "
        "downcast_bf16 compute_environment main_training_function",
        _UNSUPPORTED,
    ),
}

_LIGHTNING: dict[str, Answer] = {
    **_renamed(
        "max_epochs=train.epochs gradient_clip_val=train.max_grad_norm fast_dev_run=limits.fast_dev_run "
        "limit_train_batches=limits.train limit_val_batches=limits.eval log_every_n_steps=train.log_every "
        "enable_checkpointing=checkpoint.best default_root_dir=out seed_everything=seed"
    ),
    "max_steps": _MAX_STEPS,
    "max_time": _write("train.max_time", _lightning_time),
    "accumulate_grad_batches": _batch_size,
    "precision": _write_named("train.precision"),
    "deterministic": _write("train.deterministic", bool),
    "overfit_batches": _write("limits.overfit_batches", note="a whole number"),
    "val_check_interval": _check_interval,
    "check_val_every_n_epoch": lambda value, section: (
        f"write evaluate.every: {'epoch' if value == 1 else f'{value} epochs'}"
    ),
    "num_sanity_val_steps": _write("evaluate.at_start", bool),
    "monitor": _write("early_stopping.metric", _metric),
    "logger": _TRACKING,
    **_all("min_epochs min_steps", _omit("training stops early only with early_stopping")),
    "gradient_clip_algorithm": _omit("gradients are clipped by norm"),
    **_all("limit_test_batches limit_predict_batches", _omit("slice the file to predict")),
    **_all("enable_progress_bar enable_model_summary", _QUIET),
    **_all("accelerator devices gpus", _omit("the device is detected; --device chooses another one")),
    "callbacks": _omit("pass them in Python: fit(recipe, callbacks=[...])"),
    **_all("num_nodes strategy use_distributed_sampler", _LAUNCH),
    "sync_batchnorm": _NOT_YET,
    **_all(
        "benchmark inference_mode barebones reload_dataloaders_every_n_epochs profiler detect_anomaly plugins "
        "enable_autolog_hparams model_registry",
        _UNSUPPORTED,
    ),
}

_TRL: dict[str, Answer] = {
    **_all("packing eval_packing padding_free sample_packing", _PACKING),
    "packing_strategy": _omit("memory.padding: none packs by best fit within a batch"),
    **_all("completion_only_loss assistant_only_loss", _omit("task: chat computes the loss on answers only")),
}

_LIBRARIES = {
    "HF Trainer": _HF_TRAINER,
    "Accelerate": _ACCELERATE,
    "Lightning": _LIGHTNING,
    "Hugging Face scripts": _HF_SCRIPTS,
    "TRL": _TRL,
}
