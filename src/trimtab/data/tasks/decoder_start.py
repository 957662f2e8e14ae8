"""The token with which a decoder starts: one of the config, or, for models of many languages, that of the target."""

from typing import Any

import torch
from torch import Tensor

# transformers moves the last token of a target (the code of its language, in MBart's and PLBart's tokenizers) to the
# front for these. Their `decoder_start_token_id` plays no part in training.
_STARTS_WITH_LAST_TOKEN = frozenset(("mbart", "plbart", "fsmt"))


def starts_with_last_token(model_type: str | None) -> bool:
    """Whether the decoder of such a model reads the last token of a target first, in training."""
    return model_type in _STARTS_WITH_LAST_TOKEN


def shifted_right(targets: Tensor, mask: Tensor, start_id: int | None) -> Tensor:
    """What a decoder reads to write `targets`.

    Args:
        targets: Token ids of (rows, positions), with padding on the right.
        mask: True where a token of a target stands.
        start_id: The token that every row starts with; None for the last token of each target.
    """
    if start_id is None:
        first = targets.gather(1, mask.sum(dim=1, keepdim=True) - 1)
    else:
        first = torch.full((len(targets), 1), start_id)
    return torch.cat([first, targets[:, :-1]], dim=1)


def generation_start(tokenizer: Any, model_type: str | None) -> dict[str, int]:
    """Settings with which a model generates what it was trained to write: its first tokens follow from the tokenizer.

    Args:
        tokenizer: The tokenizer that made the targets.
        model_type: Of the model's config.

    Returns:
        `decoder_start_token_id` and `forced_bos_token_id`, as far as they follow from the language of the targets.
    """
    settings: dict[str, int] = {}
    if starts_with_last_token(model_type):
        settings["decoder_start_token_id"] = int(tokenizer(text_target="")["input_ids"][-1])
    if getattr(tokenizer, "tgt_lang", None):
        empty, one = (tokenizer(text_target=text)["input_ids"] for text in ("", "a"))
        if empty[0] == one[0] and empty[0] in tokenizer.all_special_ids:  # every target begins with its language
            settings["forced_bos_token_id"] = int(empty[0])
    return settings
