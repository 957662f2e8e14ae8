"""A model out of an adapter's folder: its base is found and loaded, and the adapter laid onto it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.export import read_facts
from trimtab.errors import ModelError, UserError
from trimtab.log import say
from trimtab.model.adapters import load_adapter
from trimtab.model.load import load_config, load_model, load_tokenizer, newly_initialised, resolve_source
from trimtab.model.nf4 import Nf4

_KINDS = {"SEQ_CLS": "sequence-classification", "CAUSAL_LM": "causal-lm", "SEQ_2_SEQ_LM": "seq2seq-lm"}  # of PEFT


@dataclass(frozen=True)
class AdapterSource:
    """What an adapter's folder says of itself.

    Args:
        folder: Where it is.
        base: The model that it belongs to: a folder or a hub name.
        kind: Of the model, as `load_model` takes it.
        head: Settings of the head.
        base_dtype: In which its base was held while it was trained.
        nf4: How a base of 4 bits was quantized; None of any other base.
        facts: What trimtab wrote about it; empty for adapters of others.
    """

    folder: Path
    base: str
    kind: str
    head: Mapping[str, Any]
    base_dtype: torch.dtype = torch.float32
    nf4: Nf4 | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_adapter_source(folder: str | Path, *, trust_remote_code: bool = False) -> AdapterSource:
    """Read what is known of an adapter, and see that its base is there.

    Args:
        folder: A folder that trimtab or PEFT wrote.
        trust_remote_code: Whether Python code that lies beside the base may run.

    Raises:
        ModelError: If there is no base that the adapter could be laid onto.
    """
    place = Path(folder)
    path = place / "adapter_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"it holds a {type(settings).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "write the adapter again") from error
    facts = read_facts(place)
    base = settings.get("base_model_name_or_path") or facts.get("base")
    if not base and "base" in facts:
        raise ModelError(
            f"{place} is an adapter for a model that was made from a config: the random weights of its base were never "
            "written, and an adapter alone is no model",
            "train adapters on a model that lies in a folder: train the base first, or save it with save_pretrained",
        )
    if not base:
        raise ModelError(f"{path} does not say which model it belongs to", "set base_model_name_or_path in it")
    base_config = _config_of_base(place, str(base), trust_remote_code)
    adapter = facts.get("adapter") or {}
    kind = facts.get("kind") or _KINDS.get(str(settings.get("task_type"))) or kind_of(str(base), base_config)
    head = facts.get("head") or {}
    if kind == "sequence-classification" and not head:
        head = _head_in(place)
    return AdapterSource(
        folder=place,
        base=str(base),
        kind=kind,
        head=head,
        base_dtype=getattr(torch, adapter.get("base_dtype", "float32")),
        nf4=_quantized(adapter.get("nf4")),
        facts=facts,
    )


def _quantized(facts: Mapping[str, Any] | None) -> Nf4 | None:
    return None if facts is None else Nf4(getattr(torch, facts["compute_dtype"]), facts["double_quant"])


def _config_of_base(folder: Path, base: str, trust_remote_code: bool) -> Any:
    try:
        resolve_source(base)
    except UserError as error:
        raise ModelError(
            f"{folder} is an adapter for {base}, which is no longer there",
            f"put it back, or write where it is now into {folder / 'adapter_config.json'}: base_model_name_or_path",
        ) from error
    try:
        return load_config(base, trust_remote_code=trust_remote_code)
    except UserError as error:
        raise ModelError(
            f"{folder} is an adapter for {base}, which cannot be loaded: {error.problem}", error.cure
        ) from error


def tokenizer_of(source: AdapterSource, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that lies beside an adapter, else that of its base."""
    has_own = (source.folder / "tokenizer_config.json").is_file()
    return load_tokenizer(str(source.folder) if has_own else source.base, trust_remote_code=trust_remote_code)


def _head_in(folder: Path) -> dict[str, int]:
    """The size of a classifier's head in an adapter that PEFT wrote: its last layer is the narrowest that is whole."""
    from safetensors import SafetensorError, safe_open

    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if ".lora_" not in name and name.endswith(".weight")]  # noqa: SIM118
            sizes = [file.get_slice(name).get_shape() for name in names]
    except SafetensorError as error:
        raise ModelError(f"{path} cannot be read: {error}", "fetch or write it again") from error
    return {"num_labels": min(size[0] for size in sizes)} if sizes else {}


def load_adapted(
    source: AdapterSource,
    tokenizer: Any,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """A base with its adapter, frozen and in eval mode.

    Args:
        source: What the adapter's folder says.
        tokenizer: The adapter's.
        device: Where it will compute.
        dtype: In which the base is held, also one that had 4 bits in training. None is fp32, or 4 bits again.
        trust_remote_code: Whether Python code that lies beside the base may run.

    Raises:
        ModelError: If parts of the model are neither in the base nor in the adapter.
    """
    nf4 = None
    if dtype is None and source.nf4 is not None:
        nf4, dtype = source.nf4, source.base_dtype
        if device.type == "cpu":  # which computes halves slowly
            nf4, dtype = Nf4(torch.float32, nf4.double_quant), torch.float32
    model = load_base(
        source,
        tokenizer,
        dtype=dtype or torch.float32,
        nf4=nf4,
        device=None if nf4 is None else device,
        trust_remote_code=trust_remote_code,
    )
    adapter = load_adapter(model, source.folder)
    missing = sorted(newly_initialised(model) - set(adapter.tensors()))
    if missing:
        raise ModelError(
            f"neither {source.folder} nor its base {source.base} has weights for {', '.join(missing[:2])}",
            "train it first, or name the base that it was trained on",
        )
    whole = ", ".join(adapter.trains[:3]) + (" …" if len(adapter.trains) > 3 else "")
    say(f"{source.folder}: its adapter on {len(adapter.targets)} modules" + (f"; {whole} from it" if whole else ""))
    return model.eval()


def load_base(
    source: AdapterSource,
    tokenizer: Any,
    *,
    dtype: torch.dtype,
    nf4: Nf4 | None = None,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The base of an adapter as it was when the adapter was made, in another form if need be.

    Args:
        source: What the adapter's folder says.
        tokenizer: The adapter's.
        dtype: In which the weights are held.
        nf4: How its linear modules are quantized.
        device: Where it is loaded; the host if left out.
        trust_remote_code: Whether Python code that lies beside the base may run.
    """
    with torch.random.fork_rng():
        # rows that the embeddings grow for the tokenizer are random, and the same again from the same seed
        torch.manual_seed(source.facts.get("recipe", {}).get("seed", 0))
        return load_model(
            source.base,
            source.kind,
            source.head,
            tokenizer,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            nf4=nf4,
            device=device,
        )


def kind_of(name: str, config: Any) -> str:
    """The kind of model that the class it was saved from tells.

    Raises:
        ModelError: If that class has no head that predicts.
    """
    architecture = next(iter(getattr(config, "architectures", None) or []), None)
    if architecture is None or architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal-lm"
    if architecture.endswith("ForSequenceClassification"):
        return "sequence-classification"
    if architecture.endswith("ForMaskedLM"):
        return "masked-lm"
    is_pair = getattr(config, "is_encoder_decoder", False) and not architecture.endswith("Model")
    if is_pair or architecture in ("EncoderDecoderModel", "MarianMTModel"):
        return "seq2seq-lm"
    raise ModelError(
        f"{name} is a {architecture}, which has no head that predicts",
        f"train one: trimtab train --model {name} --data FILE",
    )
