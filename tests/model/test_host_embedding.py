"""What may be kept in host memory, and what may not. That the device reads it there is tested on one."""

import pytest
import torch

from tiny_models import config_of, tokenizer
from trimtab.errors import RecipeError
from trimtab.model.load import load_model
from trimtab.techniques.host_embeddings import keep_embeddings_on_host


def llama(**config):
    return load_model({**config_of("llama"), **config}, "causal-lm", {}, tokenizer())


def test_on_the_cpu_there_is_nothing_to_do():
    model = llama(tie_word_embeddings=False).requires_grad_(False)
    before = model.get_input_embeddings().weight
    assert keep_embeddings_on_host(model, torch.device("cpu")) == 0
    assert model.get_input_embeddings().weight is before


def test_what_trains_stays():
    with pytest.raises(RecipeError, match="the embeddings are trainable"):
        keep_embeddings_on_host(llama(tie_word_embeddings=False), torch.device("cpu"))


def test_what_trains_later_stays():
    model = llama(tie_word_embeddings=False).requires_grad_(False)
    table = model.get_input_embeddings().weight
    with pytest.raises(RecipeError, match="the embeddings are trainable"):
        keep_embeddings_on_host(model, torch.device("cpu"), trained_later=[table])


def test_a_table_that_is_also_the_head_stays():
    with pytest.raises(RecipeError, match="are tied to its output layer"):
        keep_embeddings_on_host(llama(tie_word_embeddings=True).requires_grad_(False), torch.device("cpu"))


def test_another_device_is_refused():
    model = llama(tie_word_embeddings=False).requires_grad_(False)
    with pytest.raises(RecipeError, match="not supported on meta"):
        keep_embeddings_on_host(model, torch.device("meta"))
