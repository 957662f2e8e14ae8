"""The batch that a step is traced with: the tensors of a real batch of the task, and the values of its tokens.

Rows contain an ordinary token, and end with the end token of the model, as tokenizers write it. In a padded batch the
last row is one token shorter than the others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trimtab.data.packing import MAX_LENGTH, MAX_ROW_LENGTH, ROW_LENGTH, ROW_STARTS
from trimtab.planner.shapes import BatchShape, StepTask
from trimtab.planner.trace.known_values import KnownValues
from trimtab.planner.trace.recorder import Recorder

_MOST_TOKENS = 4096  # number of tokens to search for an ordinary one


def example_batch(task: StepTask, batch: BatchShape, recorder: Recorder, config: Any) -> dict[str, Any]:
    """Make a batch like the collator of a task.

    Args:
        task: The task.
        batch: The shape.
        recorder: The recorder of the trace, which learns the values of its tokens.
        config: The config of the model.
    """
    shape = (1, batch.packed_tokens) if batch.is_packed else (batch.rows, batch.length)
    num_rows = batch.max_rows or batch.rows if batch.is_packed else batch.rows
    names = ("input_ids", "position_ids") if batch.is_packed else ("input_ids", "attention_mask")
    with recorder.born_as("inputs"):
        made: dict[str, Any] = {name: _integers(*shape) for name in names}
        if batch.is_packed:
            made[ROW_STARTS] = torch.empty(num_rows + 2, dtype=torch.int32, device="meta")
            made[MAX_LENGTH] = made[MAX_ROW_LENGTH] = batch.length
            if batch.marks_equal_rows:
                made[ROW_LENGTH] = batch.length
        if batch.target_length is not None:
            made["decoder_input_ids"] = _integers(batch.rows, batch.target_length)
        if task.loss_kind == "token-cross-entropy":
            label_shape = shape if batch.target_length is None else (batch.rows, batch.target_length)
            made["labels"] = _integers(*label_shape)
        elif task.loss_kind == "cross-entropy":
            made["labels"] = _integers(num_rows)
        else:
            made["labels"] = torch.empty((num_rows, batch.num_labels), device="meta")
    row_length = batch.length if batch.is_packed else 0
    tell_values(recorder.values, made, config, is_padded=batch.is_padded, row_length=row_length)
    return made


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def name_missing_tokens(config: Any, kind: str) -> None:
    """Set token ids that a tokenizer would provide and that forward reads; their values do not matter in a trace.

    Args:
        config: The config of a model.
        kind: The kind of model, as for `trimtab.model.load.load_model`.
    """
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    wanted = ["pad_token_id"] if kind == "sequence-classification" or is_encoder_decoder else []
    wanted += ["decoder_start_token_id"] if kind == "seq2seq-lm" or is_encoder_decoder else []
    for part in (config, config.get_text_config()):
        for name in wanted:
            if getattr(part, name, None) is None:
                setattr(part, name, 0)


def tell_values(
    values: KnownValues, batch: Mapping[str, Any], config: Any, *, is_padded: bool, row_length: int = 0
) -> None:
    """Record the values of token ids and attention masks.

    Args:
        values: Where to record them.
        batch: The batch, on meta, by the names of the model's inputs.
        config: The config of the model.
        is_padded: Whether a row has padding.
        row_length: Tokens of each row if rows are packed into one; 0 if they are not.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.is_meta}
    with _disable_current_modes():  # the host's work is not part of the step
        for name, tensor in tensors.items():
            if tensor.dim() != 2 or not tensor.numel():
                continue
            has_padding = is_padded and not name.startswith("decoder")
            if name in ("input_ids", "decoder_input_ids"):
                values.tell(tensor, example_tokens(config, *tensor.shape, is_padded=has_padding, row_length=row_length))
            elif name in ("attention_mask", "decoder_attention_mask"):
                mask = torch.ones(tensor.shape, dtype=tensor.dtype)
                mask[-1, -1] = not has_padding
                values.tell(tensor, mask)


def example_tokens(
    config: Any, num_rows: int, length: int, *, is_padded: bool = False, row_length: int = 0
) -> torch.Tensor:
    """Token ids as a tokenizer would produce them, of shape [num_rows, length].

    Args:
        config: The config of the model, which names its special tokens.
        num_rows: Number of rows.
        length: Tokens of each row.
        is_padded: Whether the last row is one token shorter.
        row_length: Tokens of each row if rows are packed into one; 0 if they are not.
    """
    text_config = getattr(config, "text_config", None) or config
    tokens = torch.full((num_rows, length), _ordinary_token(config, text_config))
    eos = _first_id(config, text_config, "eos_token_id")
    if eos is not None:
        tokens[:, -1] = eos
        if row_length:
            tokens[:, row_length - 1 :: row_length] = eos
    if is_padded and length > 1:
        tokens[-1, -2] = tokens[-1, -1]
        pad = _first_id(config, text_config, "pad_token_id")
        tokens[-1, -1] = 0 if pad is None else pad
    return tokens


def _first_id(config: Any, text_config: Any, name: str) -> int | None:
    for one in (config, text_config):
        found = getattr(one, name, None)
        if isinstance(found, list | tuple) and found:
            found = found[0]
        if type(found) is int:
            return found
    return None


def _ordinary_token(*configs: Any) -> int:
    """The smallest token id that is not a special token."""
    special: set[int] = set()
    for config in configs:
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_ids", "_token_index")):
                special.update(value if isinstance(value, list | tuple) else (value,))
    return next(number for number in range(_MOST_TOKENS) if number not in special)
