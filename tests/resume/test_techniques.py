"""Stopped and resumed, a run ends with the same bits, whatever it saves memory by."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tiny_runs import reproducible_lines, reviews, saved_tensors, write_csv
from trimtab import Recipe, fit
from trimtab.errors import Stopped
from trimtab.model import streamed_blocks
from trimtab.optim import offloaded_state

STREAMED = {"stream_weights": "all"}
CASES = {
    "lora": {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.1}},
    "qlora": {"adapter": {"kind": "qlora", "rank": 4}, "train": {"optimizer": "paged-adamw8bit"}},
    "fp8": {
        "adapter": {"kind": "lora", "base": "fp8", "rank": 4, "dropout": 0.1},
        "train": {"precision": "bf16"},
        "memory": {"gradient_checkpointing": "ops", "loss": "chunked", "micro_batch": 5},
    },
    "experts": {  # in bf16, with experts that get no tokens in some micro-batches
        "model": {
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "output_router_logits": True,
        },
        "adapter": {"kind": "lora", "rank": 4, "experts": True},
        "train": {"precision": "bf16"},
        "memory": {"gradient_checkpointing": "all", "micro_batch": 5},
    },
    "dora": {"adapter": {"kind": "lora", "rank": 4, "dora": True, "dropout": 0.1}, "memory": {"micro_batch": 5}},
    "qdora": {"adapter": {"kind": "qlora", "rank": 4, "dora": True}},
    "ia3": {"adapter": "ia3", "memory": {"gradient_checkpointing": "all", "micro_batch": 5}},
    "pissa and lora+": {"adapter": {"kind": "lora", "rank": 4, "init": "pissa", "lr_ratio": 16}},
    "pissa-fast in bf16": {
        "adapter": {"kind": "lora", "rank": 4, "init": "pissa-fast"},
        "train": {"precision": "bf16"},
    },
    "olora": {"adapter": {"kind": "lora", "rank": 4, "init": "olora"}, "memory": {"padding": "none"}},
    "side": {"adapter": {"kind": "side", "reduction": 4, "dropout": 0.1}, "memory": {"micro_batch": 5}},
    "side in bf16": {
        "adapter": {"kind": "side", "every": 2, "trains": ["lm_head"]},
        "train": {"precision": "bf16"},
        "memory": {"padding": "none", "loss": "chunked", "gradient_checkpointing": "all"},
    },
    "prompt": {"adapter": {"kind": "prompt", "tokens": 4}, "memory": {"micro_batch": 5, "loss": "chunked"}},
    "prefix": {
        "adapter": {"kind": "prefix", "tokens": 4},
        "memory": {"micro_batch": 5, "loss": "chunked", "gradient_checkpointing": "all"},
    },
    "lora in bf16": {"adapter": "lora", "train": {"precision": "bf16"}},
    "lora in fp16": {"adapter": "lora", "train": {"precision": "fp16"}},
    "all together": {
        "adapter": {"kind": "qlora", "rank": 4, "dropout": 0.1, "trains": ["lm_head"]},
        "train": {"optimizer": "adamw8bit", "precision": "bf16"},
        "memory": {"gradient_checkpointing": "all", "micro_batch": 3},
    },
    "recomputed but products": {"memory": {"gradient_checkpointing": "ops"}},
    "offloaded in tiles": {
        "adapter": {"kind": "lora", "rank": 4, "dropout": 0.1},
        "memory": {"gradient_checkpointing": {"every": 2}, "offload_activations": "all", "tile_tokens": 32}
        | {"padding": "none", "loss": "chunked", "micro_batch": 5},
    },
    "chunked loss": {"memory": {"loss": "chunked"}},
    "no padding": {"memory": {"padding": "none", "micro_batch_tokens": 40}},
    "bf16-pure": {"train": {"precision": "bf16-pure"}},
    "bf16-pure in 8 bits": {"train": {"precision": "bf16-pure", "optimizer": "adamw8bit"}},
    "updated in backward": {
        "train": {"max_grad_norm": None, "freeze": {"*.layers.0": "6 steps"}},
        "memory": {"update": "in-backward", "gradient_checkpointing": "all"},
    },
    "updated in backward, bf16-pure in 8 bits": {
        "train": {"max_grad_norm": None, "precision": "bf16-pure", "optimizer": "adamw8bit"},
        "memory": {"update": "in-backward"},
    },
    "updated in backward, state on the host": {
        "train": {"max_grad_norm": None, "optimizer": "adamw8bit", "freeze": {"*.layers.0": "6 steps"}},
        "memory": {"update": "in-backward", "offload_state": "host", "gradient_checkpointing": "all"},
    },
    "state on the host, bf16-pure": {
        "train": {"precision": "bf16-pure"},
        "memory": {"offload_state": "host", "micro_batch": 5},
    },
    "streamed updates, bf16-pure in 8 bits": {
        "train": {"precision": "bf16-pure", "optimizer": "adamw8bit", "freeze": {"*.layers.0": "6 steps"}},
        "memory": {"update": "streamed", "micro_batch": 5},
    },
    "updated on the host": {
        "train": {"precision": "bf16", "freeze": {"*.layers.0": "6 steps"}},
        "memory": {"update": "host", "micro_batch": 5},
    },
    "streamed": {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.1}, "memory": STREAMED | {"micro_batch": 5}},
    "streamed, qlora": {
        "adapter": {"kind": "qlora", "rank": 4},
        "memory": STREAMED | {"gradient_checkpointing": "all"},
    },
    "streamed, updated in backward": {
        "train": {"max_grad_norm": None, "optimizer": "adamw8bit", "freeze": {"*.layers.0": "6 steps"}},
        "memory": STREAMED | {"update": "in-backward", "gradient_checkpointing": "all"},
    },
    "streamed, updated on the host": {"train": {"precision": "bf16"}, "memory": STREAMED | {"update": "host"}},
    "unfrozen later, 8 bits": {"train": {"optimizer": "adamw8bit", "freeze": {"*.layers.0": "6 steps"}}},
}


QUICK = {
    "lora",
    "updated on the host",
    "streamed, updated in backward",
}


class Stops:
    def on_step(self, state):
        if state.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_bits_are_the_same(own_folder, tiny, case, monkeypatch):
    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 256)
    monkeypatch.setattr(offloaded_state, "MIN_ELEMENTS", 256)
    write_csv(own_folder / "rows.csv", reviews(48))
    sections = dict(CASES[case])
    num_blocks = 3 if "streamed" in case else 2
    sizes = {"num_hidden_layers": num_blocks, "hidden_size": 64, "intermediate_size": 96, "attention_dropout": 0.1}
    model = tiny.folder("llama", **sizes, **sections.pop("model", {}))

    def recipe(out):
        return Recipe(
            model=model,
            task="causal-lm",
            data={"train": "rows.csv", "text": "text", "eval_share": 0.25},
            evaluate={"every": "4 steps"},
            train={"max_steps": 9, "batch_size": 12, "lr": 3e-3, "log_every": 1} | sections.get("train", {}),
            **{key: value for key, value in sections.items() if key != "train"},
            out=out,
        )

    fit(recipe("whole"), progress="quiet")
    with pytest.raises(Stopped):
        fit(recipe("stopped"), callbacks=[Stops()], progress="quiet")
    result = fit(recipe("stopped"), progress="quiet", resume=True)
    assert result.fit.step == 9
    assert reproducible_lines("stopped") == reproducible_lines("whole")
    for folder in ("best", "checkpoints/step-9"):
        ours, theirs = (saved_tensors(Path(run) / folder) for run in ("stopped", "whole"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
