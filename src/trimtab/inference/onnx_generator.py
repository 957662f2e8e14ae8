"""Models in ONNX files that generate text: transformers' `generate` calls the files, token by token.

A model here is an instance of its own transformers class, which provides `generate` and the methods that it needs, but
has no layers. Keys and values are in transformers' cache, which `generate` reorders for beams.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.compress.onnx_file import open_session
from trimtab.compress.onnx_graphs import CROSS, DECODER_FILE, ENCODER_FILE, MODEL_FILE, PAST, PRESENT
from trimtab.errors import ModelError
from trimtab.inference.onnx_model import OnnxModel, run_session
from trimtab.model.load import load_config


def load_onnx_model(folder: str | Path) -> OnnxModel:
    """Load the ONNX files of an exported folder.

    Raises:
        ModelError: A file is damaged.
        MissingDependency: onnxruntime is missing.
    """
    is_pair = (Path(folder) / DECODER_FILE).is_file()
    session = open_session(Path(folder) / (DECODER_FILE if is_pair else MODEL_FILE))
    if not any(node.name.startswith(PAST) for node in session.get_inputs()):
        return OnnxModel(folder, session)
    kind: Any = OnnxEncoderDecoder if is_pair else OnnxDecoder
    model: OnnxModel = type(kind.__name__, (kind, _class_of(folder)), {})(folder, session)
    return model


def _class_of(folder: str | Path) -> type:
    """Return the class that a model had when it was exported."""
    import transformers
    from transformers.generation.utils import GenerationMixin

    (name, *_) = load_config(str(folder)).architectures or [""]
    found = getattr(transformers, name, None)
    if not isinstance(found, type) or not issubclass(found, GenerationMixin):
        raise ModelError(
            f"{folder}: config.json names the architecture {name!r}, which is not a generating transformers class",
            "export the model again",
        )
    return found


class OnnxGenerator(OnnxModel):
    """A model with a cache of keys and values; subclasses are also classes of transformers."""

    generation_config: Any = None

    def __init__(self, folder: str | Path, session: Any) -> None:
        from transformers import GenerationConfig

        super().__init__(folder, session)
        has_settings = (Path(folder) / "generation_config.json").is_file()
        read: Any = GenerationConfig.from_pretrained if has_settings else GenerationConfig.from_model_config
        self.generation_config = read(str(folder) if has_settings else self.config)
        nodes = {node.name: node.shape for node in self._session.get_inputs() if node.name.startswith(PAST)}
        self._past_sizes = {name: (shape[1], shape[3]) for name, shape in nodes.items()}  # heads and their dimension

    def generate(self, *args: Any, **options: Any) -> Any:
        """Generate tokens with a cache of all tokens, even for a model that attends only to the last ones.

        Args:
            args: Arguments of transformers' `generate`.
            options: Keyword arguments of transformers' `generate`.
        """
        options.setdefault(PAST, self._new_cache())
        return super().generate(*args, **options)  # type: ignore[misc]

    def _new_cache(self) -> Any:
        raise NotImplementedError

    def _past(self, cache: Any, num_rows: int) -> dict[str, Tensor]:
        """Return the keys and values of a cache as inputs of the file; without a cache, those of zero tokens."""
        layers = [] if cache is None else cache.layers
        found = {}
        for number, (name, (num_heads, size)) in enumerate(self._past_sizes.items()):
            layer = layers[number // 2] if number // 2 < len(layers) else None
            stored = None if layer is None else (layer.keys, layer.values)[number % 2]
            found[name] = torch.empty(num_rows, num_heads, 0, size) if stored is None else stored
        return found

    def _store(self, cache: Any, outputs: dict[str, Tensor]) -> None:
        """Replace the keys and values of a cache with those of all tokens."""
        names = [name.replace(PAST, PRESENT, 1) for name in self._past_sizes]
        for number, (key, value) in enumerate(zip(names[::2], names[1::2], strict=True)):
            if number < len(cache.layers) and cache.layers[number].is_initialized:
                cache.layers[number].keys, cache.layers[number].values = outputs[key], outputs[value]
            else:
                cache.update(outputs[key], outputs[value], number)


class OnnxDecoder(OnnxGenerator):
    """A causal language model."""

    def _new_cache(self) -> Any:
        from transformers.cache_utils import DynamicCache

        return DynamicCache()

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        """Return the logits of tokens, and add their keys and values to the cache."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        num_rows, length = input_ids.shape
        past = self._past(past_key_values, num_rows)
        num_past = next(iter(past.values())).shape[2]
        if attention_mask is None:
            attention_mask = torch.ones(num_rows, num_past + length, dtype=torch.long)
        if position_ids is None:
            position_ids = torch.arange(num_past, num_past + length).expand(num_rows, -1)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, **past}
        outputs = run_session(self._session, inputs)
        if past_key_values is not None:
            self._store(past_key_values, outputs)
        logits: Any = outputs["logits"]
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


class OnnxEncoderDecoder(OnnxGenerator):
    """An encoder-decoder."""

    def __init__(self, folder: str | Path, session: Any) -> None:
        super().__init__(folder, session)
        self._encoder = _Encoder(open_session(Path(folder) / ENCODER_FILE))

    def get_encoder(self, *_: Any, **__: Any) -> torch.nn.Module:
        """Return the encoder, which `generate` calls once."""
        return self._encoder

    def _new_cache(self) -> Any:
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(), DynamicCache())

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        """Return the logits of the decoder's tokens, and add their keys and values to the cache."""
        from transformers.modeling_outputs import Seq2SeqLMOutput

        assert decoder_input_ids is not None
        if encoder_outputs is None:
            encoder_outputs = self._encoder(input_ids, attention_mask)
        cross = {name: value for name, value in encoder_outputs.items() if name.startswith(CROSS)}
        if attention_mask is None:
            first = next(iter(cross.values()))
            attention_mask = torch.ones(first.shape[0], first.shape[2], dtype=torch.long)
        cache = None if past_key_values is None else past_key_values.self_attention_cache
        past = self._past(cache, len(decoder_input_ids))
        inputs = {"input_ids": decoder_input_ids, "attention_mask": attention_mask, **cross, **past}
        outputs = run_session(self._session, inputs)
        if cache is not None:
            self._store(cache, outputs)
        logits: Any = outputs["logits"]
        return Seq2SeqLMOutput(logits=logits, past_key_values=past_key_values)


class _Encoder(torch.nn.Module):
    """The encoder's file; its outputs are the keys and values of the decoder's cross-attention."""

    main_input_name = "input_ids"

    def __init__(self, session: Any) -> None:
        super().__init__()
        self._session = session

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        found = BaseModelOutput()
        for name, value in run_session(self._session, {"input_ids": input_ids, "attention_mask": mask}).items():
            found[name] = value
        return found
