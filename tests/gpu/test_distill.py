"""A student and its teacher on an accelerator: the prediction holds, and cached outputs free the teacher's memory."""

import pytest
import torch

from tiny_runs import NO_DROPOUT, lines_of, reviews, write_jsonl
from trimtab import Recipe, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture
def made(tiny, tmp_path):
    teacher = tiny.folder("llama", num_hidden_layers=8, **SIZES)
    rows = [{"text": " ".join(row["text"] for row in reviews(4, 4 * index))} for index in range(64)]
    data = {"train": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "eval_share": 0.25}

    def build(name, **settings):
        return {
            "task": "causal-lm",
            "data": data,
            "distill": {"teacher": teacher, "student": {"layers": "half"}, **settings},
            "train": {"max_steps": 3, "batch_size": 8, "precision": "bf16", "log_every": 1},
            "memory": {"micro_batch": 8},
            "track": "none",
            "out": str(tmp_path / name),
        }

    return build


@pytest.mark.parametrize("settings", [{}, {"hidden": 1.0, "attention": 1.0}, {"cache": "disk", "top_k": 16}])
def test_the_peak_is_predicted(made, fresh_peaks, settings):
    predicted, measured = fresh_peaks(made("run", **settings))
    assert predicted == pytest.approx(measured, rel=0.1)


def test_a_student_learns_like_on_a_cpu(tiny, tmp_path):
    labels = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    settings = {"kind": "sequence-classification", "head": labels, "num_hidden_layers": 4, **NO_DROPOUT["bert"]}
    data = {"train": str(write_jsonl(tmp_path / "rows.jsonl", reviews(64)))}
    losses = []
    for device in ("cpu", "cuda"):
        recipe = Recipe(
            data=data,
            distill={"teacher": tiny.folder("bert", **settings), "student": {"layers": 2}, "hidden": 1.0},
            train={"max_steps": 4, "precision": "fp32", "log_every": 1},
            track="none",
            out=str(tmp_path / device),
        )
        fit(recipe, progress="quiet", device=device)
        losses.append([line["loss"] for line in lines_of(tmp_path / device) if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
