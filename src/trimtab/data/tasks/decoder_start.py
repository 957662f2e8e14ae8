"""The token that a decoder starts with: from the config, or, for multilingual models, the target's language code."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.data.tasks.tokenization import backend_unchanged

# For these, transformers moves the last token of a target (the language code in MBart's and PLBart's tokenizers) to the
# front. Training does not use their `decoder_start_token_id`.
_STARTS_WITH_LAST_TOKEN = frozenset(("mbart", "plbart", "fsmt"))


def starts_with_last_token(model_type: str | None) -> bool:
    """Whether the decoder of this model type reads the last token of the target first, in training."""
    return model_type in _STARTS_WITH_LAST_TOKEN


@dataclass(frozen=True)
class DecoderStart:
    """How the inputs of a decoder start.

    Attributes:
        token_id: The token that every row starts with; None for the pad token, as in T5.
        is_last_token: Whether a row starts with the last token of its target instead.
    """

    token_id: int | None = None
    is_last_token: bool = False

    @classmethod
    def of(cls, config: Any) -> "DecoderStart":
        """Read the start from a transformers config."""
        token_id = getattr(config, "decoder_start_token_id", None)
        is_last = starts_with_last_token(getattr(config, "model_type", None))
        return cls(None if token_id is None else int(token_id), is_last)

    def shifted(self, targets: Tensor, mask: Tensor, pad_id: int) -> Tensor:
        """The inputs of the decoder for targets that are padded on the right; `mask` is True at their tokens."""
        first = pad_id if self.token_id is None else self.token_id
        return shift_right(targets, mask, None if self.is_last_token else first)


def shift_right(targets: Tensor, mask: Tensor, start_id: int | None) -> Tensor:
    """Shift targets by one position to the decoder's input.

    Args:
        targets: Token ids of shape [rows, positions], padded on the right.
        mask: True at the tokens of a target, False at padding.
        start_id: The token that every row starts with; None for the last token of each target.
    """
    if start_id is None:
        first = targets.gather(1, mask.sum(dim=1, keepdim=True) - 1)
    else:
        first = torch.full((len(targets), 1), start_id)
    return torch.cat([first, targets[:, :-1]], dim=1)


def generation_start(tokenizer: Any, model_type: str | None) -> dict[str, int]:
    """Return the generation settings with which a model starts as its training targets do.

    Args:
        tokenizer: The tokenizer of the targets.
        model_type: From the model's config.

    Returns:
        `decoder_start_token_id` and `forced_bos_token_id`, if the target language determines them.
    """
    settings: dict[str, int] = {}
    with backend_unchanged(tokenizer):
        if starts_with_last_token(model_type):
            settings["decoder_start_token_id"] = int(tokenizer(text_target="")["input_ids"][-1])
        if getattr(tokenizer, "tgt_lang", None):
            empty, one = (tokenizer(text_target=text)["input_ids"] for text in ("", "a"))
            if empty[0] == one[0] and empty[0] in tokenizer.all_special_ids:  # every target starts with its language
                settings["forced_bos_token_id"] = int(empty[0])
    return settings
