"""Keys of Lightning's Trainer."""

from collections.abc import Mapping
from typing import Any

from trimtab.recipe.foreign_keys.answers import (
    LAUNCH,
    MAX_STEPS,
    NOT_YET,
    QUIET,
    TRACKING,
    UNSUPPORTED,
    Answer,
    Rule,
    all_of,
    batch_size,
    metric_name,
    omit,
    renamed,
    write,
    write_named,
    written,
)
from trimtab.units import exact_seconds


def _check_interval(value: Any, section: Mapping[str, Any]) -> Answer:
    unit = "epochs" if isinstance(value, float) else "steps"
    return written({"evaluate.every": "epoch" if value == 1.0 and unit == "epochs" else f"{value} {unit}"})


def _lightning_time(value: Any) -> Any:
    """Convert DD:HH:MM:SS, or a mapping of the arguments of timedelta."""
    sizes = (86400, 3600, 60, 1)
    if isinstance(value, Mapping):
        value = ":".join(str(value.get(unit, 0)) for unit in ("days", "hours", "minutes", "seconds"))
    parts = str(value).split(":")
    if len(parts) == 4 and all(part.isdecimal() for part in parts):
        return exact_seconds(sum(int(part) * size for part, size in zip(parts, sizes, strict=True)))
    return value


LIGHTNING: dict[str, Rule] = {
    **renamed(
        "max_epochs=train.epochs gradient_clip_val=train.max_grad_norm fast_dev_run=limits.fast_dev_run "
        "limit_train_batches=limits.train limit_val_batches=limits.eval log_every_n_steps=train.log_every "
        "enable_checkpointing=checkpoint.best default_root_dir=out seed_everything=seed"
    ),
    "max_steps": MAX_STEPS,
    "max_time": write("train.max_time", _lightning_time),
    "accumulate_grad_batches": batch_size,
    "precision": write_named("train.precision"),
    "deterministic": write("train.deterministic", bool),
    "overfit_batches": write("limits.overfit_batches", note="a whole number"),
    "val_check_interval": _check_interval,
    "check_val_every_n_epoch": write("evaluate.every", lambda value: "epoch" if value == 1 else f"{value} epochs"),
    "num_sanity_val_steps": write("evaluate.at_start", bool),
    "monitor": write("early_stopping.metric", metric_name),
    "logger": TRACKING,
    **all_of("min_epochs min_steps", omit("training stops early only with early_stopping")),
    "gradient_clip_algorithm": omit("gradients are clipped by norm"),
    **all_of("limit_test_batches limit_predict_batches", omit("slice the file to predict")),
    **all_of("enable_progress_bar enable_model_summary", QUIET),
    **all_of("accelerator devices gpus", omit("the device is detected; --device chooses another one")),
    "callbacks": omit("pass them in Python: fit(recipe, callbacks=[...])"),
    **all_of("num_nodes strategy use_distributed_sampler", LAUNCH),
    "sync_batchnorm": NOT_YET,
    **all_of(
        "benchmark inference_mode barebones reload_dataloaders_every_n_epochs profiler detect_anomaly plugins "
        "enable_autolog_hparams model_registry",
        UNSUPPORTED,
    ),
}
