"""`fit` with a model and a tokenizer as objects: the same run as with their folder, and it resumes like one."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM

from tiny_models import same_weights
from tiny_runs import NO_DROPOUT, reviews, tiny_config, tokenizer, write_csv
from trimtab import Recipe, fit, load, resume
from trimtab.errors import ModelError, RecipeError
from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.load import load_model

pytestmark = pytest.mark.usefixtures("own_folder")


def new_model(seed=0):
    torch.manual_seed(seed)
    return load_model(tiny_config("bert", **NO_DROPOUT["bert"]), "masked-lm", {}, tokenizer())


def recipe(out, model="none-of-this-name", **changes):
    if not Path("reviews.csv").exists():
        write_csv(Path("reviews.csv"), reviews(40))
    settings = {"train": {"max_steps": 4}, "checkpoint": {"every": "2steps"}} | changes
    return Recipe(model=model, data={"train": "reviews.csv"}, out=out, **settings)


def weights(run):
    return load(run, device="cpu").model


def test_objects_train_as_their_folder_does(caplog):
    model, tok = new_model(), tokenizer()
    model.save_pretrained("saved")
    tok.save_pretrained("saved")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level(logging.INFO, "trimtab"):
        fit(recipe("runs/reviews/objects"), model=model, tokenizer=tok, progress="quiet")
    assert sum("resuming this run needs that folder" in line for line in caplog.messages) == 2
    fit(recipe("runs/reviews/named", "saved"), progress="quiet")
    assert same_weights(weights("runs/reviews/objects"), weights("runs/reviews/named"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())  # a copy was trained
    # only one of the two
    fit(recipe("runs/reviews/model", "saved"), model=new_model(), progress="quiet")
    assert same_weights(weights("runs/reviews/model"), weights("runs/reviews/named"))
    fit(recipe("runs/reviews/tokenizer", "saved"), tokenizer=tok, progress="quiet")
    assert same_weights(weights("runs/reviews/tokenizer"), weights("runs/reviews/named"))
    assert len(list(Path("runs/given").iterdir())) == 2  # equal objects are kept once


def test_a_run_with_objects_resumes():
    objects = {"model": new_model(), "tokenizer": tokenizer()}
    longer = {"train": {"max_steps": 6}}
    fit(recipe("runs/reviews/whole", **longer), **objects, progress="quiet")
    fit(recipe("runs/reviews/one", train={"max_steps": 6, "schedule": "linear"}), **objects, progress="quiet")
    shutil.rmtree("runs/reviews/one/checkpoints/step-6")
    result = resume("runs/reviews/one", progress="quiet")
    assert result.fit.step == 6
    assert same_weights(weights("runs/reviews/one"), weights("runs/reviews/whole"))
    with pytest.raises(RecipeError, match="model"):  # another object is another run
        fit(recipe("runs/reviews/one", **longer), model=new_model(1), tokenizer=tokenizer(), resume=True)
    shutil.rmtree("runs/given")
    with pytest.raises(ModelError, match="started with an object that .* that folder no longer exists") as e:
        resume("runs/reviews/one", progress="quiet")
    assert "pass the same objects again" in e.value.cure
    assert resume("runs/reviews/one", sets=["train.max_steps=8"], **objects, progress="quiet").fit.step == 8


class Own(BertForMaskedLM):
    """A class that is not in transformers."""


def test_objects_that_could_not_be_loaded_again():
    asked = recipe("runs/reviews/one")
    replaced = new_model()
    replaced.bert.encoder.layer[0].output.dense = torch.nn.Linear(7, 7)
    adapted = new_model()
    add_adapter(adapted, LoraSpec(rank=2))
    for model, problem in (
        (torch.nn.Linear(2, 2), r"model is a Linear[^$]*own loop: model, optimizer, loader = trimtab\.Engine"),
        ("bert", "model is a str"),
        (Own(new_model().config), "Own is a custom class"),
        (replaced, "does not match its config"),
        (adapted, "has an adapter"),
    ):
        with pytest.raises(ModelError, match=problem):
            fit(asked, model=model, tokenizer=tokenizer(), progress="quiet")
    with pytest.raises(ModelError, match="tokenizer is a str"):
        fit(asked, tokenizer="bert", progress="quiet")
    assert not Path("runs/reviews").exists()
