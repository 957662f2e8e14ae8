"""Keys of torchtune's config files."""

from collections.abc import Mapping
from typing import Any

from trimtab.recipe.foreign_keys.answers import (
    AUTOMATIC,
    NOT_YET,
    QUIET,
    RESUME,
    TRACKING,
    UNSUPPORTED,
    Answer,
    Rule,
    all_of,
    batch_size,
    if_on,
    is_on,
    lose,
    omit,
    renamed,
    write,
    write_inside,
    written,
)


def _component(value: Any) -> str:
    """Return the last part of the `_component_` of a section, in lower case."""
    name = value.get("_component_", "") if isinstance(value, Mapping) else value
    return str(name).rpartition(".")[2].lower()


def _loss(value: Any, section: Mapping[str, Any]) -> Answer:
    name = _component(value)
    return written({"memory.loss": "chunked" if "chunked" in name or "linearcross" in name else "plain"})


def _dataset(value: Any, section: Mapping[str, Any]) -> Answer:
    source = value.get("source") or value.get("data_files") if isinstance(value, Mapping) else None
    return written({"data.train": source or "FILE"}, "and task: chat, causal-lm or another")


TORCHTUNE: dict[str, Rule] = {
    **renamed("clip_grad_norm=train.max_grad_norm log_every_n_steps=train.log_every checkpoint_dir=model"),
    **renamed("output_dir=out num_warmup_steps=train.warmup epochs=train.epochs seed=seed"),
    **all_of("batch_size gradient_accumulation_steps", batch_size),
    "dataset": _dataset,
    "dataset_val": write("data.eval", lambda value: "FILE"),
    "max_seq_len": write("data.max_length"),
    "packed": write("memory.padding", if_on("none", "longest")),
    "loss": _loss,
    "compile": write("train.compile", if_on("blocks", "off")),
    "dtype": write("train.precision", lambda value: {"bf16": "bf16-pure", "fp16": "fp16"}.get(str(value), "fp32")),
    "enable_activation_checkpointing": write("memory.gradient_checkpointing", if_on("all", "none")),
    "enable_activation_offloading": write("memory.offload_activations", if_on("all", "none")),
    "optimizer_in_bwd": write("memory.update", if_on("in-backward", "device")),
    "run_val_every_n_steps": write("evaluate.every", lambda value: f"{value} steps"),
    "metric_logger": TRACKING,
    "lora_attn_modules": write_inside("adapter", "kind", "lora", "targets"),
    "apply_lora_to_mlp": omit("list the linear layers of MLPs in adapter.targets; all-linear includes them"),
    "apply_lora_to_output": omit("adapter.trains: [lm_head] trains the output layer in full"),
    "quantize_base": write("adapter", lambda value: "qlora" if is_on(value) else "lora"),
    "use_dora": write_inside("adapter", "kind", "lora", "dora"),
    "max_steps_per_epoch": write("limits.train"),
    **all_of("resume_from_checkpoint recipe_checkpoint", RESUME),
    **all_of("checkpointer tokenizer", omit("model names a folder or Hub name with weights and tokenizer")),
    **all_of("checkpoint_files model_type log_peak_memory_stats shuffle fused", AUTOMATIC),
    "save_adapter_weights_only": omit("best/ of a run with an adapter contains only the adapter"),
    **all_of("log_level", QUIET),
    "device": omit("the device is detected; --device chooses another one"),
    **all_of("tensor_parallel_dim data_parallel_shard_dim fsdp_cpu_offload custom_sharded_layers", NOT_YET),
    **all_of("profiler enable_async_checkpointing", UNSUPPORTED),
    "_component_": lose("a recipe names models, data and settings, not classes"),
}
