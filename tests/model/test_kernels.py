"""Which kernels a model gets; that they compute the same is tested on a GPU."""

import importlib.util

import pytest
import torch

from tiny_models import config_of, tokenizer
from trimtab.errors import MissingDependency, RecipeError
from trimtab.model.load import load_model
from trimtab.techniques.kernels import choose_kernels

CPU = torch.device("cpu")


def test_auto_is_plain_on_a_cpu():
    model = load_model(config_of("llama"), "causal-lm", {}, tokenizer())
    assert choose_kernels("auto", model, CPU, torch.bfloat16) == "plain"
    assert choose_kernels("plain", model, CPU, None) == "plain"


def test_what_is_not_there_is_refused(monkeypatch):
    model = load_model(config_of("llama"), "causal-lm", {}, tokenizer())
    if importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(MissingDependency, match=r"pip install 'trimtab\[liger\]'"):
            choose_kernels("liger", model, CPU, None)
    monkeypatch.setattr("trimtab.hardware.extras.has_package", lambda name: True)
    with pytest.raises(RecipeError, match="needs an NVIDIA GPU"):
        choose_kernels("liger", model, CPU, None)
