"""Write a Llama-like model with its tokenizer as one GGUF file, and check the file by reading it back.

GGUF stores the two halves of each rotary pair next to each other, so rows of a Llama's query and key weights are
permuted.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.compress.gguf_tokenizer import add_tokenizer, check_tokens
from trimtab.errors import ModelError, summarize_error
from trimtab.hardware.extras import require_extra
from trimtab.model.gguf_rope import FACTORS, add_rope, check_rope, check_written_rope, rope_factors
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model, load_tokenizer

# model_type: (GGUF's architecture, whether rows of q and k are permuted). Without a window, a Mistral is a Llama.
_ARCHITECTURES = {"llama": ("llama", True), "mistral": ("llama", True), "qwen2": ("qwen2", False)}
_ARCHITECTURES |= {"qwen3": ("qwen3", False)}
TYPES = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0"}
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
_CURE = "--to onnx or --to merged"
_Q8_BLOCK = 32  # values that share a scale
_MAX_EPS = 1024  # the file keeps eps and theta in fp32, which changes the last bits of logits


@dataclass(frozen=True)
class GgufCheck:
    """The result of reading a GGUF file back.

    Args:
        model: The model that was read back.
        num_tensors: Number of tensors whose values equal the written ones.
        max_difference: Largest difference of a logit from the original model, which includes rounded weights.
        max_logit: Largest magnitude of a logit of the original model.
    """

    model: Any
    num_tensors: int
    max_difference: float
    max_logit: float


def write_gguf(model: Any, tokenizer: Any, path: Path, dtype: str = "f16") -> None:
    """Write a causal language model and its tokenizer as a GGUF file.

    Args:
        model: A Llama, Mistral, Qwen2 or Qwen3 model on the CPU.
        tokenizer: Its tokenizer: byte-level BPE, or BPE in the style of SentencePiece.
        path: The file to write.
        dtype: Type of the matrices: "f32", "f16" or "q8_0"; vectors are always f32.

    Raises:
        ModelError: GGUF cannot represent the model or the tokenizer.
        MissingDependency: The package gguf is missing.
    """
    require_extra("gguf", "a .gguf file")
    _refuse_others(model)
    import gguf

    try:
        _write(gguf, model, tokenizer, path, dtype)
    except OSError as error:
        if error.errno is not None:
            raise
        # NumPy reports a write that was cut short, because the disk is full, without the system's error
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def _write(gguf: Any, model: Any, tokenizer: Any, path: Path, dtype: str) -> None:
    config = model.config
    architecture = _ARCHITECTURES[config.model_type][0]
    writer = gguf.GGUFWriter(path, architecture)
    try:
        # not mistral: transformers would look for that architecture, which does not exist
        writer.add_name(architecture)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
        _add_hyperparameters(writer, config)
        add_rope(writer, model)
        add_tokenizer(writer, tokenizer, model.get_input_embeddings().weight.shape[0])
        for name, tensor in gguf_tensors(model):
            kind = _type_of(tensor, dtype)
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_hyperparameters(writer: Any, config: Any) -> None:
    head_size = _head_size(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(config.vocab_size)


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def gguf_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model in fp32, with GGUF's names and order of rows."""
    import gguf

    config = model.config
    name_of_architecture, permutes = _ARCHITECTURES[config.model_type]
    known = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[name_of_architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    is_tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if is_tied and name == "lm_head.weight":
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ModelError(f"GGUF has no name for {name} of {type(model).__name__}", _CURE)
        values = tensor.detach().float().contiguous()
        if permutes and (num_heads := heads.get(name.split(".")[-2])):
            values = _permuted(values, num_heads)
        yield found, values
    if (factors := rope_factors(config)) is not None:
        yield FACTORS, factors


def _permuted(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Put the two halves of each rotary pair next to each other."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape).contiguous()


def _type_of(tensor: torch.Tensor, dtype: str) -> Any:
    import gguf

    if tensor.dim() < 2:
        return gguf.GGMLQuantizationType.F32
    if dtype == "q8_0" and tensor.shape[-1] % _Q8_BLOCK:
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType[TYPES[dtype]]


@torch.no_grad()
def check_gguf(path: Path, model: Any, tokenizer: Any, dtype: str) -> GgufCheck:
    """Read a GGUF file back and compare it with its model: tensors, tokens of sample texts, and logits.

    Args:
        path: The file.
        model: The model that it was written from.
        tokenizer: Its tokenizer.
        dtype: The type that it was written with.

    Raises:
        ModelError: Something differs by more than the rounding of the type.
    """
    num_tensors = _check_tensors(path, model, dtype)
    check_tokens(tokenizer, load_tokenizer(str(path)))
    # not with the tokenizer of the file: transformers adds <|endoftext|> to byte-level ones without that token
    loaded: Any = load_model(str(path), "causal-lm", {}, tokenizer)
    generator = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(0, len(tokenizer), (2, min(model.config.max_position_embeddings, 32)), generator=generator)
    arguments = {"input_ids": ids_BL, "use_cache": False}
    with quiet_transformers():
        found = loaded(**arguments).logits
        own = model(**arguments).logits
        # the original code with the weights of the file: any remaining difference is a wrong number in the file's
        # header
        weights = _weights_read_back(model, loaded, dtype)
        same = torch.func.functional_call(model, weights, kwargs=arguments, tie_weights=False).logits
    limit = _MAX_EPS * torch.finfo(torch.float32).eps * same.abs().max().item()
    gap = (found - same).abs().max().item()
    if not gap <= limit:
        raise ModelError(
            f"the GGUF file differs from the model: read back, its logits differ by up to {gap:.3g}, more than "
            f"rounding explains ({limit:.3g}); nothing was written",
            _CURE,
        )
    return GgufCheck(loaded, num_tensors, (found - own).abs().max().item(), own.abs().max().item())


def _check_tensors(path: Path, model: Any, dtype: str) -> int:
    """Compare rotary embeddings and each tensor of the file with the expected values; return their number."""
    import gguf

    reader = _open_gguf(path)
    check_written_rope(reader, model, _CURE)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    written = dict(gguf_tensors(model))
    for name in written.keys() | stored.keys():
        found = stored.get(name)
        if (
            found is None
            or name not in written
            or not torch.equal(
                torch.from_numpy(gguf.quants.dequantize(found.data, found.tensor_type).copy()),
                _rounded(written[name], dtype),
            )
        ):
            raise ModelError(f"{name} in the GGUF file is not what was written", _CURE)
    return len(written)


def _rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a tensor with the values as stored in the file."""
    import gguf

    kind = _type_of(values, dtype)
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind).copy())


def _open_gguf(path: Path) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{path} is not a GGUF file: {summarize_error(error)}", "export the model again") from error


def _weights_read_back(model: Any, loaded: Any, dtype: str) -> dict[str, torch.Tensor]:
    """Return the weights that transformers read from the file, after a comparison with those of the model."""
    state: dict[str, torch.Tensor] = loaded.state_dict()
    own: dict[str, torch.Tensor] = model.state_dict()
    for name, tensor in own.items():
        # rounding is by rows, so it does not matter that the file has them in another order
        if name not in state or not torch.equal(state[name], _rounded(tensor.float().contiguous(), dtype)):
            raise ModelError(f"{name} has different values when the GGUF file is read back; nothing was written", _CURE)
    return {name: state[name] for name in own}


def _refuse_others(model: Any) -> None:
    config = model.config
    if config.model_type not in _ARCHITECTURES or not type(model).__name__.endswith("ForCausalLM"):
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{type(model).__name__} cannot be written as GGUF (supported: causal {known})", _CURE)
    check_rope(config, _ARCHITECTURES[config.model_type][0], _CURE)
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral" and window is not None and window < config.max_position_embeddings:
        raise ModelError(f"a sliding window of {window} tokens cannot be stored in GGUF", _CURE)
