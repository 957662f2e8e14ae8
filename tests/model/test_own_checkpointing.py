"""transformers' own checkpointing, under the old and the new names."""

import pytest

from tiny_models import KINDS, config_of, tokenizer
from trimtab.model.load import load_model
from trimtab.model.own_checkpointing import checkpoints_itself, start_own_checkpointing, stop_own_checkpointing


def test_on_and_off():
    model = load_model(config_of("bert"), KINDS["bert"], {}, tokenizer())
    assert not checkpoints_itself(model)
    start_own_checkpointing(model)
    assert checkpoints_itself(model)
    stop_own_checkpointing(model)
    assert not checkpoints_itself(model)


@pytest.mark.parametrize("word", ["gradient", "activation"])
def test_names_of_either_version(word):
    def enable(self, options):
        self.options = options

    made = type("Model", (), {f"is_{word}_checkpointing": True, f"{word}_checkpointing_enable": enable})()
    assert checkpoints_itself(made)
    start_own_checkpointing(made)
    assert made.options == {"use_reentrant": False}
    assert not checkpoints_itself(object())
