"""Adapters on a frozen model: added in place, kept in fp32, saved and loaded as PEFT folders.

The model keeps its class. Linear modules are replaced by PEFT's LoRA or IA3 modules; plain LoRA gets trimtab's own
forward (`lora_product`). Modules that are trained in full are not replaced, so there is no second copy of them as in
PEFT. A side network (`side_network`) is an additional module of the model, and is saved in separate files.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from trimtab.errors import ModelError, RecipeError
from trimtab.log import say
from trimtab.model.adapter_configs import (
    NAME,
    WEIGHTS_FILE,
    Base,
    Ia3Spec,
    LoraSpec,
    base_of,
    delta_of,
    initialize_lora,
    is_small,
    peft_errors_explained,
    plan_adapter,
    tied_to,
)
from trimtab.model.adapter_patterns import resolve_patterns
from trimtab.model.adapter_targets import select_full_modules
from trimtab.model.expert_weights import adapted_names
from trimtab.model.hub import PEFT_CONFIG, is_side_network
from trimtab.model.load import grown_rows
from trimtab.model.lora_product import bind_product
from trimtab.model.nf4 import dequantized, is_nf4
from trimtab.model.peft_renaming import are_names_of, kept_names, renamed_targets
from trimtab.model.precision import convert_to_fp32
from trimtab.model.prefix_tuning import PrefixSpec, attach_prefix, check_prefix, prefix_config
from trimtab.model.quantization import num_weights
from trimtab.model.side_network import (
    SIDE_MODULE,
    SIDE_WEIGHTS,
    SideConfig,
    SideSpec,
    attach_side_network,
    check_whole_modules,
    fill_side_network,
    plan_side_network,
    read_side_weights,
)
from trimtab.model.virtual_tokens import (
    IN_FILE,
    VIRTUAL_MODULE,
    PromptSpec,
    attach_virtual_tokens,
    check_prompt,
    prompt_config,
)

_PREFIX_TUNING = "PREFIX_TUNING"
_VIRTUAL = ("PROMPT_TUNING", _PREFIX_TUNING)  # kinds of PEFT that train virtual tokens
_PREFIX = "base_model.model."  # prefix of names in PEFT's files, from its wrapper around the model
_ATTRIBUTE = "_trimtab_adapter"
_HALF = (torch.float16, torch.bfloat16)


class Adapter:
    """The adapter inside a model: its modules, and how it is saved.

    Args:
        model: The model that contains the adapter.
        config: PEFT's config, or that of a side network.
        base: The base model.
        targets: Names of the modules with adapter weights.
        trains: Names of the modules that are trained in full and saved whole.
    """

    def __init__(
        self, model: torch.nn.Module, config: Any, base: Base, targets: Sequence[str], trains: Sequence[str]
    ) -> None:
        self.base = base
        self.targets = tuple(targets)
        self.trains = tuple(trains)
        self.starts: Mapping[str, torch.Tensor] = {}  # matrices whose product was subtracted from the base
        self._model = model
        self._config = config

    @property
    def is_side_network(self) -> bool:
        """Whether it is separate from the base, not inside its modules."""
        return isinstance(self._config, SideConfig)

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters: those of the adapter and of modules that are trained in full."""
        unique = {id(tensor): tensor for tensor in self.tensors().values()}
        return sum(tensor.numel() for tensor in unique.values() if tensor.requires_grad)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that are saved, by their names in the model; tied weights appear under each name."""
        whole = {*self.trains, *tied_to(self._model, self.trains)}
        found: dict[str, torch.Tensor] = {}
        for name in self.targets:
            for inner, parameter in self._model.get_submodule(name).named_parameters():
                if not inner.startswith("base_layer."):
                    found[f"{name}.{inner}"] = parameter
        for name in sorted(whole):
            found.update(self._model.get_submodule(name).state_dict(prefix=f"{name}.", keep_vars=True))
        return found

    def save(self, folder: str | os.PathLike[str], weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Save a folder that `peft.PeftModel.from_pretrained(base, folder)` loads; only trimtab loads side networks.

        Args:
            folder: Target folder, created if necessary; files of an older adapter are replaced.
            weights: Tensors to save instead of the model's current ones, by the names of `tensors`. Additional names
                are ignored.
        """
        from safetensors.torch import save_file

        tensors = self.tensors()
        source, config = {name: (tensors if weights is None else weights)[name] for name in tensors}, self._config
        if self.starts:
            config, source = delta_of(config, source, self.starts)
        # Tied weights share memory, which safetensors does not allow.
        stored: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, values in source.items():
            tensor = values.detach().contiguous()
            stored_name = name if self.is_side_network else _name_in_file(name)
            stored[stored_name] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        file = SIDE_WEIGHTS if self.is_side_network else WEIGHTS_FILE
        save_file(stored, place / file, metadata={"format": "pt"})
        config.save_pretrained(str(place))


def _name_in_file(name: str) -> str:
    """The name of a tensor in PEFT's files; DoRA's magnitudes are modules in memory but not in files."""
    if name == f"{VIRTUAL_MODULE}.weight":
        return IN_FILE
    return _PREFIX + name.replace(f".lora_magnitude_vector.{NAME}.weight", ".lora_magnitude_vector").replace(
        f".{NAME}", ""
    )


def adapter_of(model: torch.nn.Module) -> Adapter | None:
    """The adapter of a model, even if it is wrapped by DDP or torch.compile; None if it has none."""
    inner: Any = model
    while inner is not None:
        found = inner.__dict__.get(_ATTRIBUTE)
        if found is not None:
            return found  # type: ignore[no-any-return]
        wrapped = inner.__dict__.get("_modules", {})
        inner = wrapped.get("_orig_mod") or wrapped.get("module")
    return None


def has_peft_adapter(module: torch.nn.Module) -> bool:
    """Whether a module is one of PEFT's, around a module of the base."""
    return hasattr(module, "lora_A") or hasattr(module, "ia3_l")


def add_adapter(model: torch.nn.Module, spec: LoraSpec | Ia3Spec | SideSpec | PromptSpec | PrefixSpec) -> Adapter:
    """Add an adapter to a model in place, freeze the rest, and log the number of trainable parameters.

    Outputs do not change at first. Initial values are those of PEFT, but drawn from torch's CPU generator: they are the
    same on every device and for every dtype of the base model.

    Args:
        model: A transformers model, before it is prepared.
        spec: Configuration of the adapter.

    Raises:
        RecipeError: A pattern matches nothing, or a module that cannot be trained that way.
    """
    if adapter_of(model) is not None:
        raise RecipeError(f"{type(model).__name__} already has an adapter", "load the base model again")
    kept = select_full_modules(model, () if isinstance(spec, PromptSpec | PrefixSpec) else spec.trains)
    if isinstance(spec, PromptSpec | PrefixSpec):
        is_prefix = isinstance(spec, PrefixSpec)
        (check_prefix if is_prefix else check_prompt)(model, kept)
        base = base_of(model)
        make_config = prefix_config if is_prefix else prompt_config
        adapter = _attach_virtual(model, make_config(model, spec.tokens, (base.name, base.revision)))
        words = f"{'keys and values of ' if is_prefix else ''}{spec.tokens} virtual tokens before each row"
    elif isinstance(spec, SideSpec):
        base = base_of(model)
        config = plan_side_network(model, spec, (base.name, base.revision))
        check_whole_modules(model, kept)
        adapter = _attach_side(model, config, kept)
        words = f"side network of width {config.width} that reads {len(config.taps)} of {config.num_blocks} blocks"
    else:
        plan = plan_adapter(model, spec, kept)
        if renamed := renamed_targets(plan.config, model):
            names = ", ".join(sorted(renamed))
            say(f"adapter: PEFT would load {names} as adapters of experts; load this adapter with trimtab, or merge it")
        with kept_names():
            adapter, words = _inject(model, plan.config, plan.targets, kept), plan.words
        if isinstance(spec, LoraSpec):
            adapter.starts = initialize_lora(model, adapter.targets, spec)
    _make_trainable(model, adapter)
    _report(model, adapter, words)
    return adapter


def _attach_virtual(model: Any, config: Any) -> Adapter:
    if config.peft_type == _PREFIX_TUNING:
        attach_prefix(model, config)
    else:
        attach_virtual_tokens(model, config.num_virtual_tokens)
    adapter = Adapter(model, config, Base(config.base_model_name_or_path, config.revision), [VIRTUAL_MODULE], [])
    model.__dict__[_ATTRIBUTE] = adapter
    return adapter


def _attach_side(model: Any, config: SideConfig, kept: Sequence[str]) -> Adapter:
    attach_side_network(model, config)
    adapter = Adapter(model, config, Base(config.base_model_name_or_path, config.revision), [SIDE_MODULE], kept)
    model.__dict__[_ATTRIBUTE] = adapter
    return adapter


def _report(model: Any, adapter: Adapter, words: str) -> None:
    total = sum(num_weights(parameter) for parameter in model.parameters())
    kept = adapter.trains
    whole = f"; {', '.join(kept[:3])}{' …' if len(kept) > 3 else ''} in full" if kept else ""
    num_parameters = adapter.num_parameters
    say(f"adapter: {words}{whole}; {num_parameters:,} trainable parameters ({num_parameters / max(1, total):.2%})")
    num_rows = grown_rows(model)
    if num_rows and not model.get_input_embeddings().weight.requires_grad:
        embeddings = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is embeddings)
        say(f"adapter: {num_rows} new rows of the embeddings are frozen; to train them: adapter.trains: [{name}]")


def load_adapter(model: torch.nn.Module, folder: str | os.PathLike[str], trainable: bool = False) -> Adapter:
    """Load a PEFT folder, written by trimtab or another program, or a side network into a base model.

    Args:
        model: The base model, unchanged since it was loaded.
        folder: Folder with adapter_config.json or side_network.json and the weights.
        trainable: Whether the adapter and its whole modules are trainable; otherwise the whole model is frozen.

    Raises:
        ModelError: The folder contains no LoRA or IA3 adapter, or one of another model.
    """
    from peft import PeftConfig, PeftType
    from peft.utils.save_and_load import load_peft_weights

    if adapter_of(model) is not None:
        raise ModelError(f"{type(model).__name__} already has an adapter", "load the base model again")
    place = Path(folder)
    if is_side_network(place):
        return _load_side(model, place, trainable)
    if not (place / PEFT_CONFIG).is_file():
        raise ModelError(f"{place} contains no adapter: it has no {PEFT_CONFIG}", "pass the folder of an adapter")
    with peft_errors_explained(place):
        config = PeftConfig.from_pretrained(str(place))
        if config.peft_type not in (PeftType.LORA, PeftType.IA3, *_VIRTUAL):
            raise ModelError(f"{place} contains a {config.peft_type} adapter", "use LoRA, IA3, prompt or prefix tuning")
        weights = load_peft_weights(str(place), device="cpu")
    if config.peft_type in _VIRTUAL:
        return _load_virtual(model, config, weights, place, trainable)
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
    whole = {name: tensor for name, tensor in weights.items() if not is_small(name)}
    kept = _modules_of(model, whole, place)
    with kept_names(are_names_of(model, set(weights) - set(whole))):
        adapter = _inject(model, config, None, kept, place / PEFT_CONFIG)
        _read_weights(model, weights, whole, place)
    if trainable:
        _make_trainable(model, adapter)
    else:
        model.requires_grad_(False)
    return adapter


def _load_virtual(
    model: Any, config: Any, weights: Mapping[str, torch.Tensor], place: Path, trainable: bool
) -> Adapter:
    shape = (config.num_virtual_tokens, model.get_input_embeddings().weight.shape[1])
    if config.peft_type == _PREFIX_TUNING:
        own = prefix_config(model, config.num_virtual_tokens, (None, None))
        shape = (config.num_virtual_tokens, own.num_layers * 2 * own.token_dim)
    if set(weights) != {IN_FILE} or tuple(weights[IN_FILE].shape) != shape:
        raise ModelError(
            f"{place} does not contain {shape[0]} virtual tokens of width {shape[1]}", "load its base model"
        )
    (check_prefix if config.peft_type == _PREFIX_TUNING else check_prompt)(model, [])
    adapter = _attach_virtual(model, config)
    model.get_submodule(VIRTUAL_MODULE).weight.data = weights[IN_FILE].float()
    if trainable:
        _make_trainable(model, adapter)
    else:
        model.requires_grad_(False)
    return adapter


def _load_side(model: Any, place: Path, trainable: bool) -> Adapter:
    config, weights = SideConfig.read(place), read_side_weights(place)
    whole = {name: tensor for name, tensor in weights.items() if not name.startswith(f"{SIDE_MODULE}.")}
    kept = _modules_of(model, whole, place)
    adapter = _attach_side(model, config, kept)
    fill_side_network(model, weights, place)
    _copy_whole(model, whole)
    if trainable:
        _make_trainable(model, adapter)
    else:
        model.requires_grad_(False)
    return adapter


def _inject(
    model: Any, config: Any, targets: Sequence[str] | None, kept: Sequence[str], place: Any = "the adapter"
) -> Adapter:
    """Wrap linear modules and experts in PEFT's modules, and check that they are exactly `targets` if given."""
    from peft import inject_adapter_in_model
    from peft.tuners.ia3 import IA3Layer
    from peft.tuners.lora import LoraLayer

    injected = resolve_patterns(config, model, place)
    # Modules that are trained in full are not wrapped: PEFT's wrapper would hold a second copy of them.
    injected.modules_to_save = None
    if hasattr(injected, "ensure_weight_tying"):
        injected.ensure_weight_tying = False
    injected.inference_mode = False
    with peft_errors_explained("the adapter"):
        inject_adapter_in_model(injected, model, NAME)
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer | IA3Layer)
    }
    if targets is not None and (adapted := adapted_names(layers)) != set(targets):
        odd = sorted(adapted ^ set(targets))
        raise RecipeError(
            f"adapter.targets: PEFT cannot distinguish {odd[0]} from other modules", "choose other modules"
        )
    for layer in layers.values():
        layer.train(layer.get_base_layer().training)  # new modules are in training mode
        if isinstance(layer, LoraLayer):
            bind_product(layer)
            if is_nf4(layer.get_base_layer()):
                _bind_dequantization(layer.get_base_layer())
    adapter = Adapter(model, config, Base(config.base_model_name_or_path, config.revision), list(layers), kept)
    model.__dict__[_ATTRIBUTE] = adapter
    return adapter


def _bind_dequantization(base: Any) -> None:
    """Make DoRA read 4-bit weights with our function: bitsandbytes' is wrong for some shapes on a CPU.

    PEFT calls `dequantize` of modules that have an attribute `W_q`.
    """
    base.W_q, base.dequantize = None, MethodType(_dequantize, base)


def _dequantize(base: Any) -> torch.Tensor:
    return dequantized(base.weight, base.compute_dtype)


def _make_trainable(model: Any, adapter: Adapter) -> None:
    """Freeze all except the adapter, and convert trainable parameters to fp32 even if the base is in half precision."""
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
        for name in (*adapter.trains, *tied_to(model, adapter.trains)):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(_cast_inputs_to_fp32)
            if module is not output:
                module.register_forward_hook(partial(_cast_output, dtype=next(iter(half))))


def _cast_inputs_to_fp32(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Cast half-precision inputs of an fp32 module, which it does not accept outside autocast."""
    if torch.is_autocast_enabled(next(module.parameters()).device.type):
        return None
    return tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype in _HALF else x for x in args)


def _cast_output(module: torch.nn.Module, args: Any, output: Any, dtype: torch.dtype) -> Any:
    """Cast an fp32 output (of embeddings) to the dtype of the model; otherwise its activations would be fp32."""
    is_single = isinstance(output, torch.Tensor) and output.dtype is torch.float32
    return output.to(dtype) if is_single else output


def _read_weights(
    model: Any, weights: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], place: Path
) -> None:
    from peft import set_peft_model_state_dict

    small = {name: tensor for name, tensor in weights.items() if name not in whole}
    # PEFT creates the matrices in the dtype of the base; they are saved in fp32 and stay fp32.
    convert_to_fp32([p for name, p in model.named_parameters() if f".{NAME}" in name and is_small(name)])
    with peft_errors_explained(place):
        result: Any = set_peft_model_state_dict(model, dict(small), NAME)
    missing = [name for name in result.missing_keys if is_small(name)]
    if missing or result.unexpected_keys:
        odd = (missing or result.unexpected_keys)[0]
        raise ModelError(
            f"{place} is not an adapter of this {type(model).__name__}: "
            f"{odd} is {'missing in it' if missing else 'not in the model'}",
            f"load its base model: {model.__dict__[_ATTRIBUTE].base.name}",
        )
    _copy_whole(model, whole)


def _copy_whole(model: Any, whole: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights of modules that were trained in full."""
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
