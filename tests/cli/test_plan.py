"""`trimtab plan`: a ladder for a GPU that is not here, without weights and without data."""

import json
import re

import pytest
import yaml

from tiny_runs import reviews, write_csv
from trimtab.errors import ModelError
from trimtab.planner.recipe_planner import RecipePlanner

LLAMA = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        "tokenizer": "train",
    },
    "task": "causal-lm",
    "data": {"train": "nowhere.jsonl"},
    "train": {"batch_size": 4, "max_steps": 100},
}

# techniques that are not to be searched for
FEWER = (
    "--set",
    "memory.offload_activations=none",
    "--set",
    "memory.tile_tokens=none",
    "--set",
    "memory.update=device",
)
FEWER += ("--set", "train.compile=off")


@pytest.fixture
def plan(trimtab, own_folder):
    (own_folder / "recipe.yaml").write_text(yaml.safe_dump(LLAMA))
    return lambda *arguments: trimtab("plan", *arguments)


def test_a_ladder_for_a_gpu_that_is_not_here(plan):
    code, out, _ = plan("recipe.yaml", "--gpu", "t4", "--length", 512, *FEWER)
    assert code == 0
    assert out.startswith("t4, 14.7 GiB, fp16, adamw\n"), "a T4 has no bf16"
    (chosen,) = (line for line in out.splitlines() if line.startswith("→"))
    assert "micro-batch 4" in chosen
    assert "w weights" in out
    assert "Chosen: micro-batch 4" in out
    assert "LoRA" in out
    assert "QLoRA" in out
    assert " run " in out, "max_steps tells how long it takes"
    assert re.search(
        r"Also predicted: .*host memory at most [\d.]+ GiB of 64.0 GiB \(assumed; set --host-memory\);", out
    )


@pytest.mark.slow
def test_host_memory_is_a_budget_of_a_gpu_that_is_not_here(plan):
    asked = (
        "recipe.yaml",
        "--gpu",
        "t4",
        "--length",
        64,
        "--set",
        "memory.micro_batch=4",
        "--set",
        "memory.loss=plain",
    )
    asked = (
        *asked,
        "--set",
        "memory.gradient_checkpointing=none",
        "--set",
        "memory.update=host",
        *FEWER[:4],
        *FEWER[6:],
    )
    code, out, _ = plan(*asked, "--host-memory", "4GiB")
    assert code == 0
    assert re.search(r"host memory at most [23].\d+ GiB of 4.0 GiB \(--host-memory\);", out)
    code, out, err = plan(*asked, "--host-memory", "2GiB")
    assert code == 3
    assert "GiB on the host" in out
    assert re.search(r"does not fit: needs .*, and [23].\d+ GiB of host memory, over the budget of 2.0 GiB", err)
    code, _, err = plan("recipe.yaml", "--device", "cpu", "--length", 64, "--host-memory", "2GiB")
    assert (code, "--host-memory is for plans on a GPU" in err) == (2, True)


@pytest.mark.slow
def test_everything_as_json(plan):
    asked = ("--gpu", "rtx-4090", "--length", 512, "--json", "--memory", "1.35GiB", *FEWER)
    code, out, _ = plan("recipe.yaml", *asked)
    assert code == 0
    found = json.loads(out)
    assert found["device"] == "rtx-4090"
    assert found["precision"] == "bf16"
    (chosen,) = (row for row in found["ladder"] if row["chosen"])
    assert chosen["total_bytes"] == sum(chosen["parts"].values()) <= found["budget_bytes"]
    assert found["plan"]["micro_batch_size"] == chosen["micro_batch"]
    assert found["plan"]["predicted_total_bytes"] == chosen["total_bytes"]
    too_large = [row for row in found["ladder"] if not row["fits"]]
    assert too_large
    assert all(row["total_bytes"] > 0.98 * found["budget_bytes"] for row in too_large)
    fitting = [row["tokens_s"] for row in found["ladder"] if row["fits"] and row["adapter"] == "none"]
    assert chosen["tokens_s"] >= 0.98 * max(fitting)


@pytest.mark.slow
def test_it_cannot_fit(plan):
    sets = ("--set", "memory.gradient_checkpointing=all", "--set", "memory.loss=chunked")
    code, out, err = plan("recipe.yaml", "--gpu", "t4", "--length", 1024, "--memory", "1.3GiB", *sets, *FEWER)
    assert code == 3
    assert "too large" in out
    assert re.search(r"error: does not fit: needs [\d.]+ GiB, [\d.]+ MiB over the budget of 1.30 GiB \(t4\), ", err)
    assert "with the smallest plan (micro-batch 4, recompute all, loss chunked)" in err
    assert re.search(r"would fit with:\n +data.max_length: \d+: 1.2\d GiB\n +adapter: lora: ", err)
    assert "adapter: qlora: " in err


def test_without_data_the_task_has_to_be_named(plan, own_folder):
    (own_folder / "open.yaml").write_text(yaml.safe_dump({key: LLAMA[key] for key in ("model", "data")}))
    code, _, err = plan("open.yaml", "--gpu", "t4", "--length", 64)
    assert code == 2
    assert "cure: --task classify (or regress" in err
    code, _, err = plan("recipe.yaml", "--gpu", "t4", "--length", 4096)
    assert code == 2
    assert "--length 4096 is more than the model's 2048 positions" in err
    code, _, err = plan("recipe.yaml", "--gpu", "t5", "--length", 64)
    assert code == 2
    assert "t4" in err


@pytest.mark.slow
def test_the_largest_batch_and_the_longest_rows(plan):
    sets = ("--set", "memory.gradient_checkpointing=none", "--set", "memory.loss=plain", "--set", "adapter=lora")
    asked = ("recipe.yaml", "--gpu", "t4", "--length", 256, "--memory", "2GiB", *sets, "--set", "memory.offload=none")
    asked = (*asked, "--set", "train.batch_size=2", "--set", "memory.micro_batch=2")
    asked = (*asked, "--set", "memory.offload_activations=none", "--set", "memory.tile_tokens=none")
    code, out, _ = plan(*asked, "--json", "--max-batch", "--longest")
    assert code == 0
    (row,) = (row for row in json.loads(out)["ladder"] if row["chosen"])
    largest = row["largest_batch"]
    assert largest > 2
    assert row["longest"] > 256
    assert row["longest"] % 64 == 0
    # what was found fits in one piece, and one more does not
    for batch, code in ((largest, 0), (largest + 1, 3)):
        size = ("--set", f"train.batch_size={batch}", "--set", f"memory.micro_batch={batch}")
        assert plan(*asked, *size, "--json")[0] == code


def test_from_data_on_this_machine(plan, tiny, own_folder):
    write_csv(own_folder / "reviews.csv", reviews(24))
    code, out, _ = plan("--model", tiny.folder("bert"), "--data", "reviews.csv", "--quiet", "--device", "cpu")
    assert code == 0
    assert out.startswith("cpu, ")
    assert "fp32" in out
    assert "predictions for a CPU are estimates" in out
    assert "LoRA" not in out


def test_more_memory_than_the_card_has_is_refused(plan):
    code, _, err = plan("recipe.yaml", "--gpu", "t4", "--length", 64, "--memory", "99GiB")
    assert code == 2
    assert "exceeds the 14.7 GiB of t4" in err
    assert "--memory 14GiB" in err


BLOCKS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
EXPERTS = {"num_local_experts": 4, "num_key_value_heads": 2}
UNTRACEABLE = {
    "mixtral": ("causal-lm", {"intermediate_size": 126, **EXPERTS, **BLOCKS}),  # rows that are not aligned
    "xmod": ("classify", {"intermediate_size": 128, **BLOCKS}),  # no default language
}


def write_recipe(folder, model_type, task, config):
    model = {"config": {"model_type": model_type, **config}, "tokenizer": "train"}
    (folder / "other.yaml").write_text(yaml.safe_dump({**LLAMA, "model": model, "task": task}))


@pytest.mark.parametrize("model_type", UNTRACEABLE)
def test_a_model_that_cannot_be_traced_is_a_clear_message(plan, own_folder, model_type):
    write_recipe(own_folder, model_type, *UNTRACEABLE[model_type])
    code, out, err = plan("other.yaml", "--gpu", "a100", "--length", 32)
    assert code == 2
    assert not out
    problem, cure = (line for line in err.splitlines() if not line.startswith("[transformers]"))
    assert re.match(r"error: no plan for \w+: its training step cannot be traced \(\w+: ", problem)
    assert cure.startswith("  cure: set memory.budget")
    assert "memory.micro_batch" in cure


@pytest.mark.slow
def test_a_mixture_of_experts_has_a_plan(plan, own_folder):
    write_recipe(own_folder, "mixtral", "causal-lm", {"intermediate_size": 128, **EXPERTS, **BLOCKS})
    code, out, _ = plan("other.yaml", "--gpu", "a100", "--length", 32)
    assert code == 0
    assert "Chosen: micro-batch 4" in out


def test_an_adapter_that_does_not_go_with_the_model_leaves_the_rest_of_the_plan(plan, own_folder, monkeypatch):
    own = RecipePlanner._case

    def case_of(self, method):
        if "qlora" in method.values():
            raise ModelError("its training step cannot be traced")
        return own(self, method)

    monkeypatch.setattr(RecipePlanner, "_case", case_of)
    config = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300, "state_size": 4}
    write_recipe(own_folder, "mamba", "causal-lm", config)
    code, out, _ = plan("other.yaml", "--gpu", "a100", "--length", 8)
    assert code == 0
    assert "Chosen: micro-batch 4" in out
    assert "Not shown: qlora: its training step cannot be traced" in out
    assert "QLoRA," not in out


def test_settings_that_exclude_each_other_are_named(plan, own_folder):
    options = ["--set", "memory.stream_weights=all", "--set", "memory.offload_state=host"]
    options += ["--set", "memory.update=in-backward", "--set", "train.max_grad_norm=null"]
    write_recipe(own_folder, "llama", "causal-lm", LLAMA["model"]["config"])
    code, _, errors = plan("other.yaml", "--gpu", "a100", "--length", 8, *options)
    errors = errors.replace("\n  cure:", ";")  # the setting to write is the cure
    assert code == 2
    assert (
        "memory.stream_weights streams optimizer state together with its weights; memory.offload_state: none" in errors
    )
