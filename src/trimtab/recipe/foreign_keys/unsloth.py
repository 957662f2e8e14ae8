"""Arguments of Unsloth's functions; its trainers take those of TRL and HF Trainer."""

from collections.abc import Mapping
from typing import Any

from trimtab.recipe.foreign_keys.answers import (
    AUTOMATIC,
    VALUES,
    Answer,
    Rule,
    all_of,
    is_on,
    left_out,
    lose,
    omit,
    write,
    write_inside,
    written,
)


def _recompute(value: Any, section: Mapping[str, Any]) -> Answer:
    word = str(value).lower()
    if word == "unsloth":
        return written({"memory.gradient_checkpointing": "all", "memory.offload_activations": "all"})
    return written({"memory.gradient_checkpointing": "all" if is_on(value) else "none"})


def _precision(value: Any, section: Mapping[str, Any]) -> Answer:
    if value is None:
        return left_out("train.precision: auto detects it")
    return written(
        {"train.precision": VALUES["train.precision"].get(str(value).removeprefix("torch.").lower(), "auto")}
    )


UNSLOTH: dict[str, Rule] = {
    "r": write_inside("adapter", "kind", "lora", "rank"),
    "random_state": write("seed"),
    "use_gradient_checkpointing": _recompute,
    "dtype": _precision,
    "full_finetuning": write("adapter", lambda value: "none" if is_on(value) else "lora"),
    "dataset_num_proc": omit("data is loaded in the background automatically"),
    "train_on_responses_only": omit("task: chat computes the loss on answers only"),
    **all_of("bias", omit("biases of the base stay frozen; adapter.trains trains modules in full")),
    **all_of("loftq_config", lose("trimtab has no equivalent; adapter.init: pissa and olora start from the weights")),
    **all_of("fast_inference gpu_memory_utilization max_lora_rank", lose("trimtab trains without vLLM")),
    **all_of("get_chat_template standardize_sharegpt", AUTOMATIC),
    "save_pretrained_merged": omit("`trimtab merge RUN FOLDER` merges an adapter"),
    "save_pretrained_gguf": omit("`trimtab export RUN FOLDER --to gguf` writes a GGUF file"),
}
