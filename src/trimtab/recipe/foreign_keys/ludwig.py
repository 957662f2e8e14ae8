"""Keys of Ludwig's config files, of all sections."""

from collections.abc import Mapping
from typing import Any

from trimtab.recipe.foreign_keys.answers import (
    AUTOMATIC,
    LAUNCH,
    UNSUPPORTED,
    Answer,
    Rule,
    all_of,
    batch_size,
    if_on,
    left_out,
    lose,
    omit,
    renamed,
    write,
    write_inside,
    written,
)


def _features(key: str, several: str) -> Rule:
    """Answer with the column of a list of features."""

    def rule(value: Any, section: Mapping[str, Any]) -> Answer:
        features = value if isinstance(value, list) else []
        names = [feature.get("name") for feature in features if isinstance(feature, Mapping)]
        return written({key: names[0]}) if len(names) == 1 else left_out(several, is_lost=True)

    return rule


def _quantization(value: Any, section: Mapping[str, Any]) -> Answer:
    bits = value.get("bits") if isinstance(value, Mapping) else value
    if bits == 4:
        return written({"adapter": "qlora"})
    return left_out("the base is stored in 4 bits with adapter: qlora, in 8 with {kind: lora, base: fp8}", is_lost=True)


def _early_stop(value: Any, section: Mapping[str, Any]) -> Answer:
    if not isinstance(value, int) or value < 1:
        return left_out("training stops early only with early_stopping")
    return written({"early_stopping.patience": value})


LUDWIG: dict[str, Rule] = {
    **renamed("base_model=model epochs=train.epochs train_steps=train.max_steps eval_batch_size=evaluate.batch_size"),
    **renamed("learning_rate=train.lr effective_batch_size=train.batch_size max_batch_size=memory.micro_batch"),
    **renamed("warmup_fraction=train.warmup warmup_evaluations=train.warmup decay=train.schedule"),
    **renamed("clipglobalnorm=train.max_grad_norm regularization_lambda=train.weight_decay random_seed=seed"),
    **renamed("global_max_sequence_length=data.max_length validation_metric=evaluate.metric"),
    **all_of("batch_size gradient_accumulation_steps", batch_size),
    "input_features": _features("data.text", "data.text takes one column, or two for sentence pairs"),
    "output_features": _features("data.label", "data.label takes a column, or several for several labels per row"),
    "quantization": _quantization,
    "target_modules": write_inside("adapter", "kind", "lora", "targets"),
    "early_stop": _early_stop,
    "steps_per_checkpoint": write("checkpoint.every", lambda value: f"{value} steps"),
    "checkpoints_per_epoch": write("checkpoint.every", lambda value: "epoch"),
    "enable_gradient_checkpointing": write("memory.gradient_checkpointing", if_on("all", "none")),
    "compile": write("train.compile", if_on("blocks", "off")),
    "enable_profiling": UNSUPPORTED,
    "prompt": lose("the chat template formats prompts; write each text exactly as the model should see it"),
    "template": lose("the chat template formats prompts; write each text exactly as the model should see it"),
    "sample_ratio": lambda value, section: Answer(f"slice the data: data.train: 'FILE[:{value}]'", is_lost=True),
    "sample_size": lambda value, section: Answer(f"slice the data: data.train: 'FILE[:{value}]'", is_lost=True),
    "probabilities": write("data.eval_share", lambda value: value[1] if isinstance(value, list) and value[1:] else 0.1),
    "preprocessing": omit("tokens, lengths and labels are prepared by the task"),
    "model_type": omit("task is the training objective"),
    "postprocessor": omit("`trimtab merge RUN FOLDER` merges an adapter"),
    "learning_rate_scheduler": omit("train.schedule and train.warmup"),
    "evaluate_training_set": AUTOMATIC,
    "backend": LAUNCH,
    **all_of("generation", omit("`trimtab predict` has --max-new-tokens")),
    **all_of("combiner defaults hyperopt ludwig_version pretrained_adapter_weights", UNSUPPORTED),
}
