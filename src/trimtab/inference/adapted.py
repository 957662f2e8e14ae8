"""Load a model from the folder of an adapter: find and load its base, and add the adapter."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.export import read_facts, read_quantization
from trimtab.errors import ModelError, UserError
from trimtab.inference.model_kind import KINDS_OF_TASKS, model_kind
from trimtab.log import say
from trimtab.model.adapter_configs import is_small
from trimtab.model.adapters import load_adapter
from trimtab.model.hub import adapter_config_path, is_side_network
from trimtab.model.load import load_config, load_model, load_tokenizer, newly_initialized, resolve_source
from trimtab.model.quantization import Quantization

_KINDS = {
    "SEQ_CLS": "sequence-classification",
    "CAUSAL_LM": "causal-lm",
    "SEQ_2_SEQ_LM": "seq2seq-lm",
}  # PEFT's task types


_UNMERGED = "use it without merging: trimtab predict, trimtab evaluate, trimtab.load"


@dataclass(frozen=True)
class AdapterSource:
    """Description of an adapter, read from its folder.

    Args:
        folder: The folder.
        base: The base model: a folder or a Hub name.
        kind: Kind of the model, as in `load_model`.
        head: Settings of the head.
        base_dtype: dtype of the base in training.
        quantization: How the base is quantized; None if it is not.
        facts: The contents of trimtab.json; empty for adapters that trimtab did not train.
    """

    folder: Path
    base: str
    kind: str
    head: Mapping[str, Any]
    base_dtype: torch.dtype = torch.float32
    quantization: Quantization | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_adapter_source(folder: str | Path, *, trust_remote_code: bool = False) -> AdapterSource:
    """Read the description of an adapter, and check that its base exists.

    Args:
        folder: A folder that trimtab or PEFT wrote.
        trust_remote_code: Whether Python code in the folder of the base may run.

    Raises:
        ModelError: If the base does not exist or cannot be loaded.
    """
    folder = Path(folder)
    path = adapter_config_path(folder)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"it contains a {type(settings).__name__}, expected an object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "export or download the adapter again") from error
    facts = read_facts(folder)
    base = settings.get("base_model_name_or_path") or facts.get("base")
    if not base and "base" in facts:
        raise ModelError(
            f"{folder} is an adapter for a model that was created from a config: the random weights of its base were "
            "not saved",
            "train adapters on a saved model: train the base first, or save it with save_pretrained",
        )
    if not base:
        raise ModelError(f"{path} does not name its base model", "set base_model_name_or_path in it")
    base_config = _load_base_config(folder, str(base), trust_remote_code)
    adapter = facts.get("adapter") or {}
    of_facts = KINDS_OF_TASKS.get(str(facts.get("task"))) or facts.get("kind")
    kind = of_facts or _KINDS.get(str(settings.get("task_type"))) or model_kind(str(base), base_config)
    head = facts.get("head") or {}
    if kind == "sequence-classification" and not head:
        head = _read_head(folder)
    return AdapterSource(
        folder=folder,
        base=str(base),
        kind=kind,
        head=head,
        base_dtype=getattr(torch, adapter.get("base_dtype", "float32")),
        quantization=read_quantization(facts),
        facts=facts,
    )


def _load_base_config(folder: Path, base: str, trust_remote_code: bool) -> Any:
    try:
        resolve_source(base)
    except UserError as error:
        raise ModelError(
            f"{folder} is an adapter for {base}, which no longer exists",
            f"restore it, or set base_model_name_or_path in {adapter_config_path(folder)} to its new path",
        ) from error
    try:
        return load_config(base, trust_remote_code=trust_remote_code)
    except UserError as error:
        raise ModelError(
            f"{folder} is an adapter for {base}, which cannot be loaded: {error.problem}", error.cure
        ) from error


def refuse_unmergeable(folder: str | Path) -> None:
    """Refuse an adapter that cannot become part of the weights of its base.

    Raises:
        ModelError: The adapter cannot be merged; the message says why.
    """
    if is_side_network(folder):
        raise ModelError(
            f"{folder} is a side network: it runs in addition to the base and cannot be merged into its weights",
            f"{_UNMERGED}; or train a LoRA adapter to merge it",
        )
    config = adapter_config_path(folder).read_text(encoding="utf-8", errors="replace")
    if "PROMPT_TUNING" in config or "PREFIX_TUNING" in config:
        raise ModelError(
            f"{folder} contains virtual tokens, which are prepended to each row and cannot be merged into weights",
            f"{_UNMERGED}; or train a LoRA adapter to merge it",
        )


def load_adapter_tokenizer(source: AdapterSource, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer in the folder of an adapter, or that of its base if there is none."""
    has_own = (source.folder / "tokenizer_config.json").is_file()
    return load_tokenizer(str(source.folder) if has_own else source.base, trust_remote_code=trust_remote_code)


def _read_head(folder: Path) -> dict[str, int]:
    """Read the number of labels from an adapter of PEFT: its last layer is the narrowest one that is saved whole."""
    from safetensors import SafetensorError, safe_open

    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if not is_small(name) and name.endswith(".weight")]  # noqa: SIM118
            sizes = [file.get_slice(name).get_shape() for name in names]
    except SafetensorError as error:
        raise ModelError(f"{path} cannot be read: {error}", "export or download it again") from error
    return {"num_labels": min(size[0] for size in sizes)} if sizes else {}


def load_adapted_model(
    source: AdapterSource,
    tokenizer: Any,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a base with its adapter, frozen and in eval mode.

    Args:
        source: The adapter.
        tokenizer: Its tokenizer.
        device: Device that the model will be on.
        dtype: dtype of the base, even if it was quantized in training. None means fp32, or quantized as in training.
        trust_remote_code: Whether Python code in the folder of the base may run.

    Raises:
        ModelError: If neither the base nor the adapter has the weights of some part of the model.
    """
    model = load_bare_base(source, tokenizer, device, dtype=dtype, trust_remote_code=trust_remote_code)
    add_trained_adapter(source, model)
    return model.eval()


def load_bare_base(
    source: AdapterSource,
    tokenizer: Any,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load the base of an adapter for inference, without the adapter; arguments as in `load_adapted_model`."""
    quantization = None
    if dtype is None and source.quantization is not None:
        quantization, dtype = source.quantization, source.base_dtype
        if device.type == "cpu":  # slow in half precision
            quantization, dtype = replace(quantization, compute_dtype=torch.float32), torch.float32
    return load_base(
        source,
        tokenizer,
        dtype=dtype or torch.float32,
        quantization=quantization,
        device=None if quantization is None else device,
        trust_remote_code=trust_remote_code,
    )


def add_trained_adapter(source: AdapterSource, model: Any) -> None:
    """Add an adapter to its base, frozen.

    Raises:
        ModelError: If neither the base nor the adapter has the weights of some part of the model.
    """
    adapter = load_adapter(model, source.folder)
    missing = sorted(newly_initialized(model) - set(adapter.tensors()))
    if missing:
        raise ModelError(
            f"neither {source.folder} nor its base {source.base} has weights for {', '.join(missing[:2])}",
            "train it first, or set base_model_name_or_path to the base that it was trained on",
        )
    whole = ", ".join(adapter.trains[:3]) + (" …" if len(adapter.trains) > 3 else "")
    what = "side network" if adapter.is_side_network else f"adapter on {len(adapter.targets)} modules"
    say(f"{source.folder}: {what}" + (f"; replaces {whole}" if whole else ""))


def load_base(
    source: AdapterSource,
    tokenizer: Any,
    *,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load the base of an adapter as in training, with another dtype or quantization if wanted.

    Args:
        source: The adapter.
        tokenizer: Its tokenizer.
        dtype: dtype of the weights.
        quantization: How the linear modules are quantized.
        device: Device to load to; the host by default.
        trust_remote_code: Whether Python code in the folder of the base may run.
    """
    with torch.random.fork_rng():
        # Embedding rows that are added for the tokenizer are random: the seed of the run reproduces them.
        torch.manual_seed(source.facts.get("recipe", {}).get("seed", 0))
        return load_model(
            source.base,
            source.kind,
            source.head,
            tokenizer,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            quantization=quantization,
            device=device,
        )
