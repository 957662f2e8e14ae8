"""Recipes that one, two and three processes run in the same way."""

import json
import os
from pathlib import Path

import torch

from trimtab import Recipe, fit

# plain SGD: AdamW makes large steps of what rounding leaves of a gradient that should be zero
COMMON = {"optimizer": "sgd", "lr": 0.2, "epochs": 2, "batch_size": 8, "log_every": 1, "warmup": 2}
RECIPES = {
    "classify": {
        "train": COMMON | {"momentum": 0.5, "weight_decay": 0.01},
        "evaluate": {"metric": "auc"},
    },
    "micro": {
        "train": COMMON | {"freeze": {"base": "3 steps"}, "class_weights": {"good": 3, "bad": 0.4}},
        "memory": {"micro_batch": 2},
        "limits": {"eval": 2},
    },
    "lm": {"task": "causal-lm", "train": COMMON | {"batch_size": 3}, "memory": {"micro_batch": 1}},
    "overfit": {"train": COMMON, "limits": {"overfit_batches": 2}, "early_stopping": {"metric": "loss", "patience": 2}},
    "packed": {"train": COMMON, "memory": {"padding": "none", "micro_batch_tokens": 24}},
    "packed lm": {"task": "causal-lm", "train": COMMON | {"batch_size": 3}, "memory": {"padding": "none"}},
    "student": {"train": COMMON, "distill": {"hidden": 1.0, "attention": 1.0}, "memory": {"micro_batch": 2}},
    "student lm": {"task": "causal-lm", "train": COMMON | {"batch_size": 3}, "distill": {"cache": "disk", "top_k": 4}},
    "fp16": {"train": COMMON | {"precision": "fp16", "epochs": 0.3}},
}


class StopsOnTheLast:
    """A wish of one process: all have to stop at the same step."""

    def on_step(self, state):
        state.should_stop = (
            state.step >= 3 and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        )


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    models, names = json.loads((folder / "models.json").read_text()), json.loads((folder / "names.json").read_text())
    for name, settings in ((name, RECIPES[name]) for name in names):
        model = models["gpt2" if settings.get("task") == "causal-lm" else "bert"]
        out = folder / f"{name}-{num_processes}"
        recipe = {"model": model, "data": {"train": str(folder / "reviews.csv")}, "out": str(out), **settings}
        if "distill" in settings:
            recipe["distill"] = {
                "teacher": models["lm teacher" if "task" in settings else "teacher"],
                **settings["distill"],
            }
        fit(Recipe(**recipe), device="cpu", progress="quiet")
    recipe = {"model": models["bert"], "data": {"train": str(folder / "reviews.csv")}, "train": COMMON}
    result = fit(
        Recipe(**recipe, out=str(folder / f"stopped-{num_processes}")),
        device="cpu",
        progress="quiet",
        callbacks=[StopsOnTheLast()],
    )
    assert (result.fit.step, result.fit.stop_reason) == (3, "callback"), result.fit
    assert result.best is not None
    assert (result.best / "config.json").exists()
    dev = fit(Recipe(**recipe, limits={"fast_dev_run": True}), device="cpu", progress="quiet")
    assert not dev.folder.exists() or num_processes > 1
