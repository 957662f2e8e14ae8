"""Padding-free batches: which models can run them, and how a model is prepared for them.

A packed batch contains the tokens of all rows one after another, and no attention mask:

- `input_ids`, `position_ids` and, if the model has them, `token_type_ids`: (1, T). Positions count from 0 in each row.
- `cu_seq_lens_q`, `cu_seq_lens_k`: one int32 tensor with the start offsets of R rows, the start of the filler row, T.
  The filler row at the end rounds T up; it may be empty, and its output is ignored.
- `max_length_q`, `max_length_k`: ints, at least the length of the longest row, including filler.

Experts also compute filler, but nothing reads the result. Auxiliary losses of routers are means over tokens, so filler
is masked for them.

transformers passes these names on to attention functions. Heads with one output per token return (1, T, …). Heads with
one output per row read only the first token of each row, so the encoder returns those as (R, 1, H).
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.model.packed_attention import Kernel, register_packed_attention

LENGTHS = "cu_seq_lens_q"  # only the inputs of a packed batch contain it
_ROW_KIND = "sequence-classification"
# A method of transformers' models that looks for padding in batches without a mask, which is a host-device sync.
_PADDING_WARNING = "warn_if_padding_and_no_attention_mask"
# Limit of torch's attention kernels; on some GPUs, the backward of larger heads does not support dropout.
_HEAD_ALIGNMENT, _MAX_HEAD_SIZE, _MAX_HEAD_SIZE_WITH_DROPOUT = 8, 256, 192
_ATTENTION_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")


@dataclass(frozen=True)
class _Encoder:
    """The position of an encoder in a model.

    Attributes:
        stack: Module of the base model whose output the head or pooler reads; "" for the base model itself.
        counts_from_padding: Whether position 0 is stored after the padding token's id, as in RoBERTa.
    """

    stack: str = "encoder"
    counts_from_padding: bool = False


# Model types that the tests compare with padded batches.
_ENCODERS = {
    "albert": _Encoder(),
    "bert": _Encoder(),
    "camembert": _Encoder(counts_from_padding=True),
    "distilbert": _Encoder("transformer"),
    "electra": _Encoder(),
    "modernbert": _Encoder(""),
    "roberta": _Encoder(counts_from_padding=True),
    "xlm-roberta": _Encoder(counts_from_padding=True),
}
_DECODERS = frozenset(
    [
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "granitemoe",
        "llama",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    ]
)
_REASONS = {
    "bloom": "its attention adds ALiBi position biases",
    "deberta": "its attention adds relative positions",
    "deberta-v2": "its attention adds relative positions",
    "gemma2": "its attention caps scores",
    "gpt_oss": "its attention has sinks",
    "mpt": "its attention adds ALiBi position biases",
    "stablelm": "its layers do not pass row boundaries on to attention",
}


def find_problem(model: Any, model_kind: str, kernel: Kernel | None) -> str | None:
    """Why a model cannot run packed batches; None if it can.

    Args:
        model: A transformers model, with or without adapters.
        model_kind: "sequence-classification", "causal-lm", "masked-lm" or "seq2seq-lm".
        kernel: The result of `trimtab.model.packed_attention.kernel_for`.
    """
    config = getattr(model, "config", None)
    name = str(getattr(config, "model_type", type(model).__name__))
    if kernel is None:
        return "no attention kernel for packed rows runs on this device"
    if not type(model).__module__.startswith("transformers.models."):
        return f"{type(model).__name__} is not a class of transformers"
    if name in _REASONS:
        return f"{name} models need padded batches: {_REASONS[name]}"
    known = _DECODERS if model_kind == "causal-lm" else _ENCODERS if model_kind in (_ROW_KIND, "masked-lm") else ()
    if name not in known:
        return f"{name} models with a {model_kind} head are not known to work without padding"
    return _config_problem(config, model_kind) or _attention_problem(model) or _kernel_problem(config, kernel)


def _config_problem(config: Any, model_kind: str) -> str | None:
    """Settings that change the computation of a model of a known type."""
    if model_kind == _ROW_KIND and getattr(config, "classifier_pooling", "cls") != "cls":
        return f"classifier_pooling: {config.classifier_pooling} reads all tokens of a row"
    if model_kind != "causal-lm" and getattr(config, "is_decoder", False):
        return "the encoder is configured as a decoder"
    is_causal = getattr(config, "is_causal", True) and not getattr(config, "use_bidirectional_attention", False)
    if model_kind == "causal-lm" and not is_causal:
        return "the decoder is configured with attention in both directions"
    return None


def _attention_problem(model: Any) -> str | None:
    """Check that transformers looks up the attention function by name and builds the masks of "sdpa"."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        return f"{type(model).__name__} computes attention itself"
    name = model.config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS or ALL_MASK_ATTENTION_FUNCTIONS.get(name) is not sdpa_mask:
        return f"the attention implementation is {name}, not sdpa"
    return None


def _kernel_problem(config: Any, kernel: Kernel) -> str | None:
    if kernel is Kernel.ROWS:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    most = _MAX_HEAD_SIZE_WITH_DROPOUT if _attention_dropout(config) else _MAX_HEAD_SIZE
    if size % _HEAD_ALIGNMENT or size > most:
        return f"attention heads of size {size}: kernels for packed rows need a multiple of 8, at most {most}"
    if kernel is Kernel.EFFICIENT and _attention_dropout(config):
        return "attention dropout in packed rows needs half precision, and a GPU of the Ampere generation or newer"
    if kernel is Kernel.EFFICIENT and config.model_type == "modernbert":
        return "local attention in both directions needs half precision, and a GPU of the Ampere generation or newer"
    return None


def _attention_dropout(config: Any) -> float:
    """The largest attention dropout in a config; models have different names for it."""
    return max(float(getattr(config, name, 0) or 0) for name in _ATTENTION_DROPOUTS)


# ---------------------------------------------------------------------- prepare a model


def enable(model: Any, model_kind: str, kernel: Kernel) -> None:
    """Make a model accept packed batches, in place; padded ones are computed as before.

    Args:
        model: A model without a problem, see `find_problem`. Nothing happens if it is already enabled.
        model_kind: As for `find_problem`.
        kernel: As for `find_problem`; on the `meta` device the kernel to simulate.
    """
    if any(isinstance(hook, _Switch) for hook in model._forward_pre_hooks.values()):
        return
    encoder = _ENCODERS.get(model.config.model_type) if model_kind != "causal-lm" else None
    offset = model.base_model.embeddings.padding_idx + 1 if encoder and encoder.counts_from_padding else 0
    for module in model.modules():
        if hasattr(module, _PADDING_WARNING):
            setattr(module, _PADDING_WARNING, _ignore)
    # nothing follows a packed batch, so keys and values are not copied to a cache
    arguments = {"use_cache": False} if model_kind == "causal-lm" else {}
    switch = _Switch(model, kernel, offset, arguments)
    model.register_forward_pre_hook(switch, with_kwargs=True)
    model.register_forward_hook(switch.end_forward, always_call=True)
    if encoder and model_kind == _ROW_KIND:
        model.base_model.get_submodule(encoder.stack).register_forward_hook(_keep_first_tokens, with_kwargs=True)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


class _Switch:
    """Hooks around a model's forward: a packed batch gets no masks, and positions in the model's convention.

    Only masks depend on it. The attention function sees from its arguments whether a batch is packed, also when a block
    is recomputed after the forward.
    """

    def __init__(self, model: Any, kernel: Kernel, offset: int, arguments: dict[str, Any]) -> None:
        configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        found = {id(config): config for config in configs if hasattr(config, "_attn_implementation")}
        self._configs = list(found.values())
        self._kernel = kernel
        self._offset = offset
        self._arguments = arguments
        self._names = ("", "")
        self._install()

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare a forward."""
        self._install()
        if kwargs.get(LENGTHS) is None:
            return None
        self._set(self._names[1])
        positions = {"position_ids": kwargs["position_ids"] + self._offset} if self._offset else {}
        return args, kwargs | positions | self._arguments | _router_mask(model, kwargs)

    def end_forward(self, *_: Any) -> None:
        """Build masks again, because parts of a model can be called without the model."""
        self._set(self._names[0])

    def _install(self) -> None:
        """Set the attention function, even if another implementation was chosen since the last forward."""
        current = self._configs[0]._attn_implementation
        if current not in self._names:
            self._names = register_packed_attention(self._kernel, current)
            self._set(self._names[0])

    def _set(self, name: str) -> None:
        for config in self._configs:
            config._attn_implementation = name


def _router_mask(model: Any, kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The mask for the auxiliary loss of a model's routers; attention does not use it."""
    if getattr(model.config, "output_router_logits", None) is not True:
        return {}
    boundaries, ids = kwargs[LENGTHS], kwargs["position_ids"]
    is_token = torch.arange(ids.shape[1], device=ids.device) < boundaries[-2]
    return {"attention_mask": is_token[None].to(ids.dtype)}


def _keep_first_tokens(stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Reduce the hidden states (1, T, H) of a packed batch to the first token of each row, (R, 1, H)."""
    boundaries = kwargs.get(LENGTHS)
    if boundaries is None:
        return None
    hidden = output.last_hidden_state
    starts = boundaries[:-2].clamp(max=hidden.shape[1] - 1)  # an empty row may start after the last token
    output.last_hidden_state = hidden.squeeze(0).index_select(0, starts)[:, None]
    return output
