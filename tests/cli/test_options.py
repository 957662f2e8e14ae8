"""Arguments that commands share."""

from pathlib import Path

import pytest

from tiny_models import TEXTS
from trimtab.cli.options import folder_of_form
from trimtab.errors import RecipeError
from trimtab.inference.load import load


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("runs/reviews/first", "first-int8"),
        ("runs/reviews/first/", "first-int8"),
        ("runs/reviews/first/best", "first-int8"),
        ("../first", "first-int8"),
        (".", "model-int8"),
        ("user/some-model.v2", "some-model.v2-int8"),
        ("bert", "bert-int8"),
        ("models:/reviews@best", "reviews-int8"),
        ("models:/reviews/3", "reviews-int8"),
        ("best:reviews", "reviews-int8"),
        ("stories/llama.gguf", "llama-int8"),
    ],
)
def test_a_folder_is_named_after_model_and_form(model, name):
    assert folder_of_form(model, "int8", None) == Path(name)


def test_a_folder_that_is_given_is_used():
    assert folder_of_form("runs/first", "int8", Path("other")) == Path("other")


def test_quantize_without_a_folder_writes_here(own_folder, tiny, trimtab):
    """The model is in another folder, which is not written to."""
    source = Path(tiny.folder("llama"))
    before = sorted(path.name for path in source.parent.iterdir())
    (own_folder / "rows.txt").write_text("\n".join(TEXTS * 4))
    code, out, err = trimtab("quantize", source, "--to", "int8", "--data", "rows.txt", "--rows", 8, "--device", "cpu")
    assert code == 0, err
    target = own_folder / f"{source.name}-int8"
    assert f"{target.name}: " in out
    assert load(target, device="cpu").task_name == "causal-lm"
    assert sorted(path.name for path in source.parent.iterdir()) == before


def test_a_folder_that_nobody_named_is_not_replaced(own_folder):
    (own_folder / "first-int8").mkdir()
    with pytest.raises(RecipeError, match="first-int8 already exists"):
        folder_of_form("runs/other/first", "int8", None)
