"""`trimtab memory`: a page, a file for torch's viewer, and the peak in the terminal."""

import pickle

import pytest
import yaml
from torch.cuda import _memory_viz

from tiny_runs import reviews, write_csv
from trimtab.commands.memory import draw_memory, write_snapshot
from trimtab.errors import RecipeError
from trimtab.recipe.schema import Recipe

LLAMA = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1000,
            "max_position_embeddings": 128,
        },
        "tokenizer": "train",
    },
    "task": "causal-lm",
    "data": {"train": "nowhere.jsonl"},
    "train": {"batch_size": 4, "max_steps": 100, "compile": "off"},
    "memory": {
        "micro_batch": 4,
        "gradient_checkpointing": "none",
        "loss": "plain",
        "padding": "longest",
        "offload_activations": "none",
        "tile_tokens": "none",
        "update": "device",
        "kernels": "plain",
        "stream_weights": "none",
    },
}


@pytest.fixture
def recipe(own_folder):
    (own_folder / "recipe.yaml").write_text(yaml.safe_dump(LLAMA))
    return own_folder / "recipe.yaml"


def test_a_page_for_a_gpu_that_is_not_here(trimtab_command, own_folder, recipe):
    code, out, err = trimtab_command(
        "memory", "recipe.yaml", "--gpu", "t4", "--length", 64, "--snapshot", "step.pickle", "--out", "a/page.html"
    )
    assert (code, err) == (0, "")
    first, *tensors, last = out.splitlines()
    assert first.startswith("predicted on t4: ")
    assert "allocated at the peak, in " in first
    assert len(tensors) == 3
    assert last == "a/page.html written, and step.pickle for https://pytorch.org/memory_viz"
    page = (own_folder / "a" / "page.html").read_text()
    assert "Memory of one training step: llama (from a config)" in page
    assert "model.layers.*" in page
    assert "Predicted on t4" in page
    assert "Measured" not in page
    snapshot = pickle.loads((own_folder / "step.pickle").read_bytes())
    assert "total_allocated" in _memory_viz.segsum(snapshot)


def test_only_what_is_here_can_be_measured(recipe):
    with pytest.raises(RecipeError, match="--measure"):
        draw_memory(Recipe.model_validate(LLAMA), gpu="t4", length=64, measures=True)


def test_a_file_that_cannot_be_written_is_said_so(trimtab_command, own_folder, recipe):
    (own_folder / "taken").write_text("")
    code, _, err = trimtab_command("memory", "recipe.yaml", "--gpu", "t4", "--length", 16, "--out", "taken/page.html")
    assert code == 2
    assert "taken/page.html cannot be written" in err
    assert trimtab_command("memory", "recipe.yaml", "--gpu", "t4", "--length", 16, "--snapshot", ".")[0] == 2
    assert not (own_folder / "memory.html").exists(), "refused before anything is computed"


def test_a_full_disk_leaves_the_older_page(own_folder, file_size_limit):
    page = own_folder / "memory.html"
    page.write_text("older")
    with file_size_limit(100), pytest.raises(RecipeError, match=r"(?s)memory\.html cannot be written.*free space"):
        write_snapshot({"segments": "x" * 1000}, page)
    assert page.read_text() == "older"
    assert list(own_folder.iterdir()) == [page]


def test_a_page_replaces_a_page_and_nothing_else(trimtab_command, own_folder, recipe):
    words = ("memory", "recipe.yaml", "--gpu", "t4", "--length", 16, "--quiet")
    assert trimtab_command(*words)[0] == trimtab_command(*words)[0] == 0
    before = recipe.read_text()
    code, _, err = trimtab_command(*words, "--out", "recipe.yaml")
    assert code == 2
    assert "recipe.yaml exists and is not a trimtab report" in err
    assert recipe.read_text() == before


def test_a_step_that_does_not_fit_is_drawn_and_ends_with_exit_code_3(trimtab_command, own_folder, recipe):
    code, out, err = trimtab_command("memory", "recipe.yaml", "--gpu", "t4", "--length", 64, "--memory", "800MiB")
    assert code == 3
    assert "memory.html written" in out
    assert "does not fit" in err
    assert "does not fit" in (own_folder / "memory.html").read_text()


@pytest.mark.slow
def test_predicted_and_measured_on_one_page(trimtab_command, own_folder, tiny):
    """On the CPU, where a step is measured only if asked for."""
    write_csv(own_folder / "reviews.csv", reviews(24))
    words = ("memory", "--model", tiny.folder("bert"), "--data", "reviews.csv", "--device", "cpu", "--quiet")
    assert trimtab_command(*words)[0] == 0
    assert "Measured" not in (own_folder / "memory.html").read_text()
    code, out, err = trimtab_command(*words, "--measure", "--set", "memory.micro_batch=8")
    assert (code, out) == (0, ""), err
    page = (own_folder / "memory.html").read_text()
    assert "Predicted on cpu" in page
    assert "Measured on cpu" in page


@pytest.mark.slow
def test_what_is_measured_is_what_was_predicted(own_folder, tiny):
    recipe = Recipe.model_validate(
        {
            "model": tiny.folder("bert"),
            "data": {"train": reviews(24)},
            "train": {"batch_size": 16},
            "memory": {"micro_batch": 8, "padding": "longest"},
        }
    )
    predicted, measured = draw_memory(recipe, device="cpu", measures=True).records
    peaks = predicted.peak(), measured.peak()
    for part in ("weights", "optimizer state"):  # but for rounding to 512 bytes, which a CPU does not do
        assert peaks[1].parts[part] == pytest.approx(peaks[0].parts[part], rel=0.25)
    stages = ["forward", "backward", "forward", "backward", "optimizer"]
    for record in (predicted, measured):
        assert [name for name, _, _ in record.stage_spans()] == stages
        names = {one.name for one in record.allocations}
        assert "bert.encoder.layer.0.output.dense.weight" in names
        assert "bert.encoder.layer.0.intermediate" in "".join(sorted(names))
