"""LoRA adapters on a frozen model: added in place, kept in fp32, saved and loaded as PEFT folders.

The model keeps its class. Its linear modules are replaced by PEFT's LoRA modules, with our forward (`lora_product`).
Modules that are trained in full are not replaced, so there is no second copy of them as in PEFT.
"""

import os
import re
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from trimtab.errors import ModelError, RecipeError
from trimtab.log import say
from trimtab.model.adapter_patterns import resolve_patterns
from trimtab.model.adapter_targets import ALL_LINEAR, match_values, select_full_modules, select_targets, shorten_names
from trimtab.model.load import grown_rows
from trimtab.model.lora_product import bind_product
from trimtab.model.precision import convert_to_fp32
from trimtab.model.quantization import num_weights

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = "default"  # PEFT's name of the only adapter of a model; not part of the names in its files
_PREFIX = "base_model.model."  # of names in PEFT's files, from its wrapper around the model
_ATTRIBUTE = "_trimtab_adapter"
_HALF = (torch.float16, torch.bfloat16)
_TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
}


@dataclass(frozen=True)
class LoraSpec:
    """Configuration of a LoRA adapter.

    Attributes:
        rank: Rank of the low-rank matrices.
        alpha: The low-rank product is scaled by alpha / rank; None for twice the rank of each module.
        dropout: Dropout probability of the adapter's input.
        targets: "all-linear" (every linear module of the base model, no head), or globs on module names, where `*` also
            matches dots and a bare name such as q_proj matches the last part of a name. A module that contains linear
            modules selects all of them.
        layers: First and last transformer block to adapt, counted from 0, both inclusive; negative values count from
            the end; encoder blocks come before decoder blocks. None for all.
        ranks: Other ranks by pattern on module names; the last matching pattern wins.
        alphas: Other alphas, likewise.
        trains: Patterns of modules to train in full, besides newly initialized modules, which always are.
        rslora: Scale by alpha / sqrt(rank) instead.
    """

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | Sequence[str] = ALL_LINEAR
    layers: tuple[int, int] | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    trains: Sequence[str] = ()
    rslora: bool = False

    def __post_init__(self) -> None:
        for key, rank in {"rank": self.rank, **{f"ranks.{name}": rank for name, rank in self.ranks.items()}}.items():
            if rank < 1:
                raise RecipeError(f"adapter.{key} is {rank}", "use a whole number of at least 1")
        if not 0 <= self.dropout < 1:
            raise RecipeError(f"adapter.dropout is {self.dropout}", "use a share from 0 up to, but not including, 1")


@dataclass(frozen=True)
class Base:
    """The base model of an adapter.

    Attributes:
        name: Its folder or Hub name; None for a model built from a config.
        revision: The Hub commit that was loaded, if known.
    """

    name: str | None = None
    revision: str | None = None


class Adapter:
    """The adapter inside a model: its modules, and how it is saved.

    Args:
        model: The model that contains the adapter.
        config: PEFT's config.
        base: The base model.
        targets: Names of the modules with low-rank matrices.
        trains: Names of the modules that are trained in full and saved whole.
    """

    def __init__(
        self, model: torch.nn.Module, config: Any, base: Base, targets: Sequence[str], trains: Sequence[str]
    ) -> None:
        self.base = base
        self.targets = tuple(targets)
        self.trains = tuple(trains)
        self._model = model
        self._config = config

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters: low-rank matrices and modules that are trained in full."""
        unique = {id(tensor): tensor for tensor in self.tensors().values()}
        return sum(tensor.numel() for tensor in unique.values() if tensor.requires_grad)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that are saved, by their names in the model; tied weights appear under each name."""
        whole = {*self.trains, *_tied_to(self._model, self.trains)}
        found: dict[str, torch.Tensor] = {}
        for name in self.targets:
            for inner, parameter in self._model.get_submodule(name).named_parameters():
                if not inner.startswith("base_layer."):
                    found[f"{name}.{inner}"] = parameter
        for name in sorted(whole):
            found.update(self._model.get_submodule(name).state_dict(prefix=f"{name}.", keep_vars=True))
        return found

    def save(self, folder: str | os.PathLike[str], weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Save a folder that `peft.PeftModel.from_pretrained(base, folder)` loads.

        Args:
            folder: Target folder, created if necessary; files of an older adapter are replaced.
            weights: Tensors to save instead of the model's current ones, by the names of `tensors`. Additional names
                are ignored.
        """
        from safetensors.torch import save_file

        names = self.tensors()
        source = names if weights is None else weights
        # Tied weights share memory, which safetensors does not allow.
        stored: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name in names:
            tensor = source[name].detach().contiguous()
            stored[_PREFIX + name.replace(f".{_NAME}", "")] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        save_file(stored, place / WEIGHTS_FILE, metadata={"format": "pt"})
        self._config.save_pretrained(str(place))


def adapter_of(model: torch.nn.Module) -> Adapter | None:
    """The adapter of a model, also if it is wrapped by DDP or torch.compile; None if it has none."""
    inner: Any = model
    while inner is not None:
        found = inner.__dict__.get(_ATTRIBUTE)
        if found is not None:
            return found  # type: ignore[no-any-return]
        wrapped = inner.__dict__.get("_modules", {})
        inner = wrapped.get("_orig_mod") or wrapped.get("module")
    return None


def add_adapter(model: torch.nn.Module, spec: LoraSpec) -> Adapter:
    """Add low-rank matrices to a model in place, freeze the rest, and log the number of trainable parameters.

    The matrices are initialized as in PEFT (the second is zero, so outputs do not change at first), but from torch's
    CPU generator: they are the same on every device and for every dtype of the base model.

    Args:
        model: A transformers model, before it is prepared.
        spec: Configuration of the adapter.

    Raises:
        RecipeError: A pattern matches nothing, or a module that cannot be trained that way.
    """
    if adapter_of(model) is not None:
        raise RecipeError(f"{type(model).__name__} already has an adapter", "load the base model again")
    kept = select_full_modules(model, spec.trains)
    targets = list(select_targets(model, spec.targets, spec.layers, kept))
    ranks = dict.fromkeys(targets, spec.rank) | match_values(targets, spec.ranks, "adapter.ranks")
    alphas = {name: 2 * ranks[name] if spec.alpha is None else spec.alpha for name in targets}
    alphas |= match_values(targets, spec.alphas, "adapter.alphas")
    config = _config_of(model, spec, ranks, alphas, kept)
    adapter = _inject(model, config, targets, kept)
    _initialize(model, targets)
    _make_trainable(model, adapter)
    _report(model, adapter, list(ranks.values()))
    return adapter


def _report(model: Any, adapter: Adapter, ranks: Sequence[int]) -> None:
    total = sum(num_weights(parameter) for parameter in model.parameters())
    low, high = min(ranks), max(ranks)
    rank = str(low) if low == high else f"{low} to {high}"
    kept = adapter.trains
    whole = f"; {', '.join(kept[:3])}{' …' if len(kept) > 3 else ''} in full" if kept else ""
    num_parameters = adapter.num_parameters
    say(
        f"adapter: LoRA of rank {rank} on {len(ranks)} modules{whole}; "
        f"{num_parameters:,} trainable parameters ({num_parameters / max(1, total):.2%})"
    )
    num_rows, embeddings = grown_rows(model), model.get_input_embeddings()
    if num_rows and not embeddings.weight.requires_grad:
        name = next(name for name, module in model.named_modules() if module is embeddings)
        say(f"adapter: {num_rows} new rows of the embeddings are frozen; to train them: adapter.trains: [{name}]")


def load_adapter(model: torch.nn.Module, folder: str | os.PathLike[str], trainable: bool = False) -> Adapter:
    """Load a PEFT folder, written by trimtab or another program, into a base model.

    Args:
        model: The base model, as it was loaded.
        folder: Folder with adapter_config.json and the weights.
        trainable: Whether the adapter and its whole modules are trainable; otherwise the whole model is frozen.

    Raises:
        ModelError: The folder contains no LoRA adapter, or one of another model.
    """
    from peft import PeftConfig, PeftType
    from peft.utils.save_and_load import load_peft_weights

    if adapter_of(model) is not None:
        raise ModelError(f"{type(model).__name__} already has an adapter", "load the base model again")
    place = Path(folder)
    if not (place / CONFIG_FILE).is_file():
        raise ModelError(f"{place} holds no adapter: it has no {CONFIG_FILE}", "name the folder of an adapter")
    with _peft_errors_explained(place):
        config = PeftConfig.from_pretrained(str(place))
        if config.peft_type != PeftType.LORA:
            raise ModelError(f"{place} holds a {config.peft_type} adapter", "use a LoRA adapter")
        weights = load_peft_weights(str(place), device="cpu")
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
    whole = {name: tensor for name, tensor in weights.items() if not re.search(r"\.lora_\w+(\.|$)", name)}
    kept = _modules_of(model, whole, place)
    adapter = _inject(model, config, None, kept, place / CONFIG_FILE)
    _read_weights(model, weights, whole, place)
    if trainable:
        _make_trainable(model, adapter)
    else:
        model.requires_grad_(False)
    return adapter


def _config_of(
    model: Any, spec: LoraSpec, ranks: Mapping[str, int], alphas: Mapping[str, Any], kept: Sequence[str]
) -> Any:
    from peft import LoraConfig

    common_rank, common_alpha = statistics.mode(ranks.values()), statistics.mode(alphas.values())
    whole = sorted({*kept, *_tied_to(model, kept)})
    linear = [model.get_submodule(name) for name in ranks]
    with _peft_errors_explained("the adapter"):
        config = LoraConfig(
            r=common_rank,
            lora_alpha=common_alpha,
            lora_dropout=spec.dropout,
            target_modules=shorten_names(list(ranks), model),
            rank_pattern={re.escape(name): rank for name, rank in ranks.items() if rank != common_rank},
            alpha_pattern={re.escape(name): alpha for name, alpha in alphas.items() if alpha != common_alpha},
            use_rslora=spec.rslora,
            fan_in_fan_out=all(not isinstance(module, torch.nn.Linear) for module in linear),
            modules_to_save=whole or None,
            ensure_weight_tying=_peft_can_tie(model, whole),
            task_type=_task_type(model, kept),
            inference_mode=True,
        )
    base = _base_of(model)
    config.base_model_name_or_path, config.revision = base.name, base.revision
    return config


def _inject(
    model: Any, config: Any, targets: Sequence[str] | None, kept: Sequence[str], place: Any = "the adapter"
) -> Adapter:
    """Replace linear modules by PEFT's LoRA modules, and check that they are exactly `targets` if given."""
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    injected = resolve_patterns(config, model, place)
    # Modules that are trained in full are left alone: PEFT's wrapper would hold a second copy of them.
    injected.modules_to_save, injected.ensure_weight_tying = None, False
    injected.inference_mode = False
    with _peft_errors_explained("the adapter"):
        inject_adapter_in_model(injected, model, _NAME)
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if targets is not None and set(layers) != set(targets):
        odd = sorted(set(layers) ^ set(targets))
        raise RecipeError(f"adapter.targets: PEFT cannot distinguish {odd[0]} from other modules", "name other modules")
    for layer in layers.values():
        layer.train(layer.get_base_layer().training)  # new modules are in training mode
        bind_product(layer)
    adapter = Adapter(model, config, Base(config.base_model_name_or_path, config.revision), list(layers), kept)
    model.__dict__[_ATTRIBUTE] = adapter
    return adapter


def _initialize(model: torch.nn.Module, targets: Sequence[str]) -> None:
    for name in targets:
        layer: Any = model.get_submodule(name)
        down, up = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        # an adapter on meta (for a plan) draws no numbers, so planning does not change the random numbers of a run
        drawn = torch.empty(down.shape, dtype=torch.float32, device="meta" if down.is_meta else "cpu")
        torch.nn.init.kaiming_uniform_(drawn, a=5**0.5)
        down.data, up.data = drawn.to(down.device), torch.zeros_like(up, dtype=torch.float32)


def _make_trainable(model: Any, adapter: Adapter) -> None:
    """Freeze all but the adapter, and convert trainable parameters to fp32 even if the base is in half precision."""
    half = {parameter.dtype for parameter in model.parameters() if parameter.dtype in _HALF}
    model.requires_grad_(False)
    trained: dict[int, torch.nn.Parameter] = {}
    for name in adapter.targets:
        layer = model.get_submodule(name)
        trained |= {id(p): p for inner, p in layer.named_parameters() if not inner.startswith("base_layer.")}
    for name in adapter.trains:
        trained |= {id(parameter): parameter for parameter in model.get_submodule(name).parameters()}
    convert_to_fp32(list(trained.values()))
    for parameter in trained.values():
        parameter.requires_grad_(True)
    if half:
        output = model.get_output_embeddings()
        for name in (*adapter.trains, *_tied_to(model, adapter.trains)):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(_cast_inputs_to_fp32)
            if module is not output:
                module.register_forward_hook(partial(_cast_output, dtype=next(iter(half))))


def _cast_inputs_to_fp32(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Cast half-precision inputs of an fp32 module, which it cannot take outside of autocast."""
    if torch.is_autocast_enabled(next(module.parameters()).device.type):
        return None
    return tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype in _HALF else x for x in args)


def _cast_output(module: torch.nn.Module, args: Any, output: Any, dtype: torch.dtype) -> Any:
    """Cast an fp32 output (of embeddings) to the dtype of the model, whose activations would be fp32 otherwise."""
    is_single = isinstance(output, torch.Tensor) and output.dtype is torch.float32
    return output.to(dtype) if is_single else output


def _read_weights(
    model: Any, weights: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], place: Path
) -> None:
    from peft import set_peft_model_state_dict

    small = {name: tensor for name, tensor in weights.items() if name not in whole}
    # PEFT creates the matrices in the dtype of the base; they are saved in fp32 and stay fp32.
    convert_to_fp32([p for name, p in model.named_parameters() if f".{_NAME}" in name and ".lora_" in name])
    with _peft_errors_explained(place):
        result: Any = set_peft_model_state_dict(model, dict(small), _NAME)
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if missing or result.unexpected_keys:
        odd = (missing or result.unexpected_keys)[0]
        raise ModelError(
            f"{place} is not an adapter of this {type(model).__name__}: "
            f"{odd} is {'missing in it' if missing else 'not in the model'}",
            f"load its base model: {model.__dict__[_ATTRIBUTE].base.name}",
        )
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in whole.items():
            state[name].copy_(tensor)


def _modules_of(model: Any, whole: Mapping[str, torch.Tensor], place: Path) -> list[str]:
    """The modules that an adapter folder contains whole; tied modules under one of their names."""
    state = model.state_dict(keep_vars=True)
    for name, tensor in whole.items():
        if name not in state or state[name].shape != tensor.shape:
            found = f"{list(state[name].shape)} in the model" if name in state else "not in the model"
            raise ModelError(
                f"{place} is not an adapter of this {type(model).__name__}: "
                f"{name} is {list(tensor.shape)} in it, {found}",
                "load the base model that it was trained on, with the same head and the same tokenizer",
            )
    modules = {name.rpartition(".")[0] for name in whole}
    first: dict[int, str] = {}
    # Embeddings come first, so a head tied to them is known under the name of the embeddings.
    for name in sorted(modules, key=lambda name: (not isinstance(model.get_submodule(name), torch.nn.Embedding), name)):
        first.setdefault(id(next(iter(model.get_submodule(name).parameters()), name)), name)
    return sorted(first.values())


def _tied_to(model: Any, kept: Sequence[str]) -> list[str]:
    """Other modules that share a weight with one of `kept`."""
    trained = {id(p) for name in kept for p in model.get_submodule(name).parameters()}
    inside = tuple(f"{name}." for name in kept)
    found = dict.fromkeys(
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in trained and not name.startswith(inside)
    )
    return list(found)


def _peft_can_tie(model: Any, whole: Sequence[str]) -> bool:
    """Whether PEFT's ensure_weight_tying works: it ties lm_head only, and makes a linear module of a tied embedding."""
    embeddings = model.get_input_embeddings()
    modules = {name: model.get_submodule(name) for name in whole}
    tied = {
        name: module
        for name, module in modules.items()
        if module is not embeddings and getattr(module, "weight", None) is embeddings.weight
    }
    known = any(name.rpartition(".")[2] == "lm_head" for name in tied)
    return known and all(isinstance(module, torch.nn.Linear) for module in tied.values())


def _base_of(model: Any) -> Base:
    config = getattr(model, "config", None)
    name = getattr(config, "name_or_path", None) or None
    if name is not None and Path(name).exists():
        name = str(Path(name).absolute())
    return Base(name, getattr(config, "_commit_hash", None))


def _task_type(model: torch.nn.Module, kept: Sequence[str]) -> str | None:
    for ending, task_type in _TASK_TYPES.items():
        if type(model).__name__.endswith(ending):
            # with SEQ_CLS, PEFT expects the head of the classifier in the file
            has_head = any(name.partition(".")[0] in ("classifier", "score") for name in kept)
            return task_type if task_type != "SEQ_CLS" or has_head else None
    return None


@contextmanager
def _peft_errors_explained(what: Any) -> Iterator[None]:
    """Suppress PEFT's warnings (about defaults that it corrects itself) and turn its errors into ModelErrors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UnpicklingError as error:
        raise ModelError(
            f"{what}: its weights are a pickle that holds more than tensors, and loading it could execute any code",
            f"get the adapter with {WEIGHTS_FILE} in it",
        ) from error
    except (SafetensorError, EOFError) as error:
        raise ModelError(f"the weights in {what} cannot be read: {error}", "download or save them again") from error
    except (ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
        raise ModelError(f"PEFT cannot use {what}: {error}", "fix the value that the message names") from error
