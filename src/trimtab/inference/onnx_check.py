"""Compare a model in ONNX files with the torch model it was written from, running it in its loaded form.

Decoders get their tokens in pieces, with a cache that the files themselves filled; torch computes all tokens together.
Shapes: B rows, L tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.compress.onnx_graphs import example_inputs, takes_position_ids
from trimtab.errors import ModelError
from trimtab.inference.onnx_generator import OnnxDecoder, OnnxEncoderDecoder
from trimtab.model.config import max_positions

# Sums of products in another order differ by some eps of the largest value, and layers amplify that: tiny models of
# eight families differ by 30 eps at most, MiniLM by 13, the 30 layers of SmolLM2 by 270. A wrong graph differs by 1e5.
_MAX_EPS = 1024
_LONGEST = 48


@dataclass(frozen=True)
class OnnxCheck:
    """How far the outputs of ONNX files are from those of their torch model.

    Args:
        max_difference: Largest difference of two logits.
        max_logit: Largest magnitude of a logit of the torch model.
        num_shapes: Number of shapes that were compared.
    """

    max_difference: float
    max_logit: float
    num_shapes: int

    @property
    def limit(self) -> float:
        """The largest difference that rounding in fp32 explains."""
        return _MAX_EPS * torch.finfo(torch.float32).eps * self.max_logit


@torch.no_grad()
def compare_onnx(exported: Any, model: Any, tokenizer: Any) -> OnnxCheck:
    """Compare a model in ONNX files with its torch model on random tokens: one row and several, short and long, padded.

    Raises:
        ModelError: The outputs of the files have other shapes.
    """
    difference, largest, num_shapes = 0.0, 0.0, 0
    for found, expected in _pairs(exported, model, tokenizer):
        if found.shape != expected.shape:
            raise ModelError(
                f"the ONNX file gives outputs of shape {tuple(found.shape)} where the model gives "
                f"{tuple(expected.shape)}; nothing was written",
                "--to merged",
            )
        gap = (found - expected).abs().max().item()
        difference = gap if not gap <= difference else difference  # keeps NaN
        largest = max(largest, expected.abs().max().item())
        num_shapes += 1
    return OnnxCheck(difference, largest, num_shapes)


def require_close(check: OnnxCheck) -> None:
    """Raise an error if an ONNX model differs from its torch model by more than rounding explains; NaN always does."""
    if not check.max_difference <= check.limit:
        raise ModelError(
            f"the ONNX file differs from the model: logits by up to {check.max_difference:.3g}, rounding explains "
            f"{check.limit:.3g}; nothing was written",
            "--to merged",
        )


def _pairs(exported: Any, model: Any, tokenizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits of the files and of the model."""
    longest = min(max_positions(model) or _LONGEST, _LONGEST)
    for num_rows, length in [(1, 1), (1, longest // 2), (2, 8), (5, longest)]:
        inputs = example_inputs(model, tokenizer, num_rows, length)
        if isinstance(exported, OnnxEncoderDecoder):
            yield _of_encoder_decoder(exported, model, inputs)
            continue
        found, expected = exported(**inputs).logits, model(**inputs).logits
        if isinstance(exported, OnnxDecoder):
            is_token_BL = inputs["attention_mask"].bool()  # models treat padding positions differently
            yield found[is_token_BL], expected[is_token_BL]
            yield _of_decoder(exported, model, inputs)
        else:
            yield found, expected


def _of_decoder(exported: OnnxDecoder, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return logits of tokens that are added to the cache; rows are padded at the start, as for generation."""
    ids_BL, mask_BL = inputs["input_ids"].flip(1), inputs["attention_mask"].flip(1)
    positions_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
    positions = {"position_ids": positions_BL} if takes_position_ids(model) else {}
    expected_BLV = model(input_ids=ids_BL, attention_mask=mask_BL, **positions).logits
    cache, found = exported._new_cache(), []
    for start, end in _pieces(ids_BL.shape[1]):
        at = slice(start, end)
        step = {"attention_mask": mask_BL[:, :end], "position_ids": positions_BL[:, at], "past_key_values": cache}
        found.append(exported(ids_BL[:, at], **step).logits)
    is_token_BL = mask_BL.bool()  # positions that attend to nothing have no defined result
    return torch.cat(found, 1)[is_token_BL], expected_BLV[is_token_BL]


def _of_encoder_decoder(exported: OnnxEncoderDecoder, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return logits of the decoder's tokens: as many as the source has, in another order."""
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    target_BL = source["input_ids"].flip(1)
    expected_BLV = model(**source, decoder_input_ids=target_BL).logits
    cache, found = exported._new_cache(), []
    of_source = exported.get_encoder()(**source)
    for start, end in _pieces(target_BL.shape[1]):
        step = {"attention_mask": source["attention_mask"], "encoder_outputs": of_source, "past_key_values": cache}
        found.append(exported(decoder_input_ids=target_BL[:, start:end], **step).logits)
    return torch.cat(found, 1), expected_BLV


def _pieces(length: int) -> list[tuple[int, int]]:
    """Return ranges that cover a length: half of it, two single tokens, and the rest."""
    ends = sorted({end for end in (length // 2, length // 2 + 1, length // 2 + 2, length) if 0 < end <= length})
    return list(zip([0, *ends[:-1]], ends, strict=True))
