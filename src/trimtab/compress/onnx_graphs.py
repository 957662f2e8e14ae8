"""The parts of a model that become ONNX files: their inputs and outputs, and an example to trace them with.

A classifier or masked language model is one graph from token ids to logits. A decoder also takes and returns the keys
and values of its tokens, so that the next token needs the computation of only one token. An encoder-decoder is two
graphs: the encoder returns the keys and values that the decoder's cross-attention reads, which are computed once for
all tokens.

Shapes: B rows, L tokens, P tokens in the cache, S tokens of a source, H heads of dimension D.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.export import kind_of

MODEL_FILE, ENCODER_FILE, DECODER_FILE = "model.onnx", "encoder_model.onnx", "decoder_model.onnx"
PAST, PRESENT, CROSS = "past_key_values", "present", "cross"  # first parts of the names of keys and values
Inputs = dict[str, Tensor | list[Tensor]]


@dataclass(frozen=True)
class Graph:
    """A part of a model that is one ONNX file.

    Args:
        file: Name of the file.
        module: Computes the graph; takes tensors and lists of keys and values, and returns a tensor or a list of
            tensors.
        example: Inputs to trace it with. Sizes that vary differ from 0 and 1, which torch treats as constants.
        outputs: Names of the outputs.
    """

    file: str
    module: torch.nn.Module
    example: Inputs
    outputs: list[str]


def graphs_of(model: Any, tokenizer: Any) -> list[Graph]:
    """Return the graphs of a model in fp32 on the CPU."""
    inputs = example_inputs(model, tokenizer, 2, 8)
    if getattr(model.config, "is_encoder_decoder", False):
        return _encoder_decoder_graphs(model, inputs)
    cache = _example_cache(model, inputs)
    if cache is None:
        return [Graph(MODEL_FILE, _Logits(model), dict(inputs), ["logits"])]
    return [_decoder_graph(model, inputs, cache)]


def example_inputs(model: Any, tokenizer: Any, num_rows: int, length: int) -> dict[str, Tensor]:
    """Return a batch of random tokens; all rows except the first are padded at the end."""
    config, forward = model.config, inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(num_rows * 1000 + length)
    num_tokens = getattr(config.get_text_config(), "vocab_size", len(tokenizer))
    ids_BL = torch.randint(0, min(num_tokens, len(tokenizer)), (num_rows, length), generator=generator)
    mask_BL = torch.ones_like(ids_BL)
    if num_rows > 1 and length > 2:
        mask_BL[1:, -length // 3 :] = 0
        ids_BL = torch.where(mask_BL.bool(), ids_BL, torch.tensor(tokenizer.pad_token_id or 0))
    inputs = {"input_ids": ids_BL, "attention_mask": mask_BL}
    if "token_type_ids" in tokenizer.model_input_names and "token_type_ids" in forward:
        inputs["token_type_ids"] = torch.zeros_like(ids_BL)
    return inputs


def flat(inputs: Mapping[str, Tensor | Sequence[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield inputs as the files name them: keys and values are past_key_values.0.key, past_key_values.0.value, ..."""
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from zip(cache_names(name, len(value)), value, strict=True)


def cache_names(first: str, num_tensors: int) -> list[str]:
    """Return the names of keys and values, layer by layer."""
    return [f"{first}.{index // 2}.{('key', 'value')[index % 2]}" for index in range(num_tensors)]


def takes_position_ids(model: Any) -> bool:
    """Whether a model takes the positions of tokens as an input; others derive them from the attention mask."""
    return "position_ids" in inspect.signature(model.forward).parameters


class _Logits(torch.nn.Module):
    """A model without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._options = {"use_cache": False} if takes_cache else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **types, **self._options)
        logits: Tensor = outputs.logits
        return logits


class _Decoder(torch.nn.Module):
    """A decoder with the keys and values of earlier tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: list[Tensor],
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        positions = {} if position_ids is None else {"position_ids": position_ids}
        cache = _cache_of(past_key_values)
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **positions
        )
        return outputs.logits, *_tensors_of(outputs.past_key_values)


class _Encoder(torch.nn.Module):
    """An encoder, and the keys and values that the decoder's cross-attention computes from its output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        from transformers.modeling_outputs import BaseModelOutput

        hidden_BSD = self.encode(input_ids, attention_mask)
        outputs = self.model(  # one token, whose own results are unused and so not part of the graph
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden_BSD),  # type: ignore[arg-type]
            attention_mask=attention_mask,
            decoder_input_ids=torch.zeros_like(input_ids[:, :1]),
            use_cache=True,
        )
        return tuple(_tensors_of(outputs.past_key_values.cross_attention_cache))

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the encoder's hidden states."""
        outputs = self.model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)
        hidden_BSD: Tensor = outputs.last_hidden_state
        return hidden_BSD


class _CrossDecoder(torch.nn.Module):
    """The decoder of an encoder-decoder, with all keys and values."""

    def __init__(self, model: Any, hidden_size: int) -> None:
        super().__init__()
        self.model, self._hidden_size = model, hidden_size

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, cross: list[Tensor], past_key_values: list[Tensor]
    ) -> tuple[Tensor, ...]:
        from transformers.cache_utils import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        cache: Any = EncoderDecoderCache(_cache_of(past_key_values), _cache_of(cross))
        cache.is_updated = dict.fromkeys(range(len(cross) // 2), True)
        # models read the shape of hidden states, whose values are in the cache
        hidden_BSD = cross[0].new_zeros(cross[0].shape[0], cross[0].shape[2], self._hidden_size)
        outputs = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden_BSD),  # type: ignore[arg-type]
            attention_mask=attention_mask,
            decoder_input_ids=input_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return outputs.logits, *_tensors_of(outputs.past_key_values.self_attention_cache)


def _decoder_graph(model: Any, inputs: Mapping[str, Tensor], cache: list[Tensor]) -> Graph:
    num_past, mask_BL = cache[0].shape[2], inputs["attention_mask"]
    example: Inputs = {
        "input_ids": inputs["input_ids"],
        "attention_mask": torch.cat([torch.ones_like(mask_BL[:, :num_past]), mask_BL], 1),
        PAST: cache,
    }
    if takes_position_ids(model):
        example["position_ids"] = torch.arange(mask_BL.shape[1]).expand_as(mask_BL) + num_past
    return Graph(MODEL_FILE, _Decoder(model), example, ["logits", *cache_names(PRESENT, len(cache))])


def _encoder_decoder_graphs(model: Any, inputs: Mapping[str, Tensor]) -> list[Graph]:
    source: Any = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    encoder = _Encoder(model)
    with torch.no_grad():
        cross, hidden_BSD = list(encoder(**source)), encoder.encode(**source)
    past = [torch.zeros_like(tensor[:, :, :3]) for tensor in cross]
    example: Inputs = {"input_ids": source["input_ids"][:, :4], "attention_mask": source["attention_mask"]}
    example |= {CROSS: cross, PAST: past}
    decoder = _CrossDecoder(model, hidden_BSD.shape[-1])
    return [
        Graph(ENCODER_FILE, encoder, source, cache_names(CROSS, len(cross))),
        Graph(DECODER_FILE, decoder, example, ["logits", *cache_names(PRESENT, len(past))]),
    ]


def _example_cache(model: Any, inputs: Mapping[str, Tensor]) -> list[Tensor] | None:
    """Return the keys and values of three tokens; None for a model without a cache, or with more than those in it."""
    if kind_of(model) != "causal-lm":
        return None
    with torch.no_grad():
        ids_BP = inputs["input_ids"][:, :3]
        cache = getattr(model(input_ids=ids_BP, attention_mask=torch.ones_like(ids_BP), use_cache=True), PAST, None)
    layers = getattr(cache, "layers", [])
    if not layers or not all(isinstance(getattr(layer, "keys", None), Tensor) for layer in layers):
        return None
    return _tensors_of(cache)


def _cache_of(tensors: Sequence[Tensor]) -> Any:
    """Return transformers' cache of keys and values of all tokens, even if a model attends only to the last ones."""
    from transformers.cache_utils import DynamicCache

    return DynamicCache(list(zip(tensors[::2], tensors[1::2], strict=True)))


def _tensors_of(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
