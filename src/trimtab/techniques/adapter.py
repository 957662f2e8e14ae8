"""Adapters: LoRA on frozen weights (also in fp8, or QLoRA in 4 bits), IA3, side networks and prompt tuning.

Adapters change the training method, so only the user chooses them; a plan only shows what they would need.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.model import adapters, fp8, lora_product, nf4
from trimtab.model.adapter_configs import Ia3Spec, LoraSpec
from trimtab.model.adapter_targets import ALL_LINEAR
from trimtab.model.adapters import add_adapter
from trimtab.model.fp8 import Fp8
from trimtab.model.nf4 import Nf4
from trimtab.model.prefix_tuning import PrefixSpec
from trimtab.model.quantization import Quantization, quantizable
from trimtab.model.side_network import SideSpec
from trimtab.model.virtual_tokens import PromptSpec
from trimtab.recipe.schema import AdapterSettings, ModelSettings, Recipe
from trimtab.techniques.base import (
    Accelerator,
    Case,
    HostUse,
    LoadOptions,
    OnResume,
    Patch,
    Phase,
    Site,
    StepSpec,
    Suggestion,
    Technique,
    TraceRecorder,
)

_FP8 = "lora-fp8"
_SUGGESTED = {"lora": "LoRA", _FP8: "LoRA on fp8 weights", "qlora": "QLoRA"}
_SIDE = "side"
_PROMPT, _PREFIX = "prompt", "prefix"
_WORDS = _SUGGESTED | {"ia3": "IA3", _SIDE: "side network", _PROMPT: "prompt tuning", _PREFIX: "prefix tuning"}
_QUANTIZATIONS: dict[str, type[Quantization]] = {_FP8: Fp8, "qlora": Nf4}
_USUAL_LR = 1e-4  # adapters learn slowly with a lower learning rate
_BLOCK, _NESTED_BLOCK = 64, 256  # the number of weights that share a scale, and of scales that share a scale


def adapter_settings(recipe: Recipe) -> AdapterSettings | None:
    """The adapter of a recipe with all its settings, or None."""
    if recipe.adapter == "none":
        return None
    is_word = isinstance(recipe.adapter, str)
    settings = AdapterSettings(kind=recipe.adapter) if is_word else recipe.adapter  # type: ignore[arg-type]
    assert isinstance(settings, AdapterSettings)
    is_lora = settings.kind in ("lora", "qlora")
    return settings.model_copy(update={"targets": ALL_LINEAR}) if is_lora and settings.targets is None else settings


def has_4bit_base(recipe: Recipe) -> bool:
    """Whether the frozen weights of a recipe's model are kept in 4 bits."""
    settings = adapter_settings(recipe)
    return settings is not None and settings.kind == "qlora"


def has_quantized_base(recipe: Recipe) -> bool:
    """Whether the frozen weights of a recipe's model are kept in 8 or 4 bits."""
    settings = adapter_settings(recipe)
    return settings is not None and (settings.base is not None or settings.kind == "qlora")


def has_plain_lora(recipe: Recipe) -> bool:
    """Whether the adapter of a recipe is LoRA in a form that supports compiled blocks."""
    settings = adapter_settings(recipe)
    return settings is not None and settings.kind in ("lora", "qlora") and not (settings.dora or settings.experts)


def num_virtual_tokens(recipe: Recipe | None) -> int:
    """The number of tokens that an adapter puts before each row."""
    settings = None if recipe is None else adapter_settings(recipe)
    return settings.tokens if settings is not None and settings.kind in (_PROMPT, _PREFIX) else 0


def learning_rates(recipe: Recipe, model: torch.nn.Module) -> dict[int, float]:
    """The learning rates of parameters that do not use `train.lr`, by parameter id (LoRA+)."""
    settings = adapter_settings(recipe)
    if settings is None or settings.lr_ratio == 1:
        return {}
    rate = settings.lr_ratio * recipe.train.lr
    return {id(parameter): rate for name, parameter in model.named_parameters() if ".lora_B." in name}


class AdapterTechnique(Technique):
    """Train a small adapter on frozen weights."""

    key = "adapter"
    setting = "adapter"
    effect = "method"
    phase = Phase.ADAPTERS

    def values(self, case: Case) -> tuple[str, ...]:
        """Return only the recipe's value."""
        settings = None if case.recipe is None else adapter_settings(case.recipe)
        value = "none" if settings is None else settings.kind if settings.base is None else _FP8
        if value == _FP8 and not _can_have_fp8(case.accelerator):
            raise RecipeError(
                f"adapter.base: fp8 needs an NVIDIA GPU of compute capability 8.9 or higher, but this device "
                f"{_describe_device(case.accelerator)}",
                "remove adapter.base (adapter: lora), or use adapter: qlora",
            )
        return (value,)

    def refuse(self, spec: StepSpec, case: Case) -> str | None:
        """Refuse compiled blocks with a side network or with the keys and values of a prefix: not tested."""
        if spec[self.key] == _PREFIX and spec["compile"] != "off":
            compiled = f"train.compile: {spec['compile']}"
            return f"adapter: prefix gives blocks keys and values through a cache, which {compiled} does not support"
        if spec[self.key] == _SIDE and spec["compile"] != "off":
            compiled = f"train.compile: {spec['compile']}"
            return f"adapter: side runs the blocks of the base without gradients, which {compiled} does not support"
        return None

    def suggest(self, spec: StepSpec, case: Case) -> Iterator[Suggestion]:
        """Suggest all adapters if all weights are trained on a GPU; a user's own loop adds its adapters itself."""
        if case.recipe is not None and spec[self.key] == "none" and case.accelerator.is_cuda:
            for value in _SUGGESTED:
                if value != _FP8 or _can_have_fp8(case.accelerator):
                    yield Suggestion(f"adapter: {_as_setting(value)}", spec.having({self.key: value}))

    def precision(self, value: str, precision: str) -> str:
        """Return bf16 for bf16-pure: adapters are kept in fp32, so both mean the same."""
        return "bf16" if value != "none" and precision == "bf16-pure" else precision

    def in_recipe(self, recipe: Recipe, value: str) -> Recipe:
        """Return the recipe with the adapter, its default optimizer, and no other frozen parameters."""
        train = recipe.train.model_copy(update={"freeze": {}, "optimizer": "auto"})
        adapter = AdapterSettings(kind="lora", base="fp8") if value == _FP8 else value
        return recipe.model_copy(update={"adapter": adapter, "train": train})

    def load(self, value: str, options: LoadOptions, half: torch.dtype) -> LoadOptions:
        """Load frozen weights in half precision: matrix products round them in any case."""
        if value == "none":
            return options
        quantization = _QUANTIZATIONS.get(value)
        return replace(options, dtype=half, quantization=None if quantization is None else quantization(half))

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Add the adapter. In a trace, also quantize the base, which a run does while it loads weights."""
        assert site.recipe is not None
        settings = adapter_settings(site.recipe) or AdapterSettings()
        if not site.is_traced:
            _add_adapter(settings, model)
            _give_advice(site.recipe)
            return
        model.requires_grad_(False)
        if value in _QUANTIZATIONS:
            _quantize_traced(model, _QUANTIZATIONS[value](site.compute_dtype or torch.float32))
        if settings.layers is not None and site.kept_blocks is not None:
            first, last = (number % (1 + max(site.kept_blocks)) for number in settings.layers)
            inside = [index for index, number in enumerate(site.kept_blocks) if first <= number <= last]
            settings = settings.model_copy(update={"layers": [inside[0], inside[-1]]})
        with torch.device("meta"):
            _add_adapter(settings, model)

    def patches(self, recorder: TraceRecorder, accelerator: Accelerator) -> Iterator[Patch]:
        """Replace dequantization, which needs data, and mute messages, which would describe a shortened model."""
        yield adapters, "say", lambda *_: None
        yield lora_product, "dequantized", _dequantize_traced
        yield nf4, "dequantized", _dequantize_traced
        yield fp8, "quantized_rows", _quantize_rows_traced

    def block_mark(self, value: str, num_blocks: int, recipe: Recipe | None) -> Callable[[int], Any] | None:
        """Distinguish blocks with an adapter from blocks without one."""
        settings = None if recipe is None else adapter_settings(recipe)
        if settings is None or settings.layers is None or not num_blocks:
            return None
        first, last = (number % num_blocks for number in settings.layers)
        return range(first, last + 1).__contains__

    def names_blocks(self, recipe: Recipe | None) -> bool:
        """Return whether patterns with a digit may name single blocks; side networks and prefixes span all blocks."""
        settings = None if recipe is None else adapter_settings(recipe)
        if settings is None:
            return False
        if settings.kind in (_SIDE, _PREFIX):  # a prefix is one tensor for all blocks
            return True
        patterns = f"{settings.targets} {settings.ranks} {settings.alphas} {settings.trains}"
        return any(letter.isdigit() for letter in patterns)

    def loads_kernels(self, value: str) -> bool:
        """Return True for 4-bit weights, which need bitsandbytes' kernels, and for fp8 weights, which need Triton's."""
        return value in _QUANTIZATIONS

    def host_use(self, value: str, model: Any, weight_bytes: int) -> HostUse:
        """Account for weights that are quantized one by one while loading, and for an export of the adapter alone."""
        return HostUse(streams_weights=value in _QUANTIZATIONS, exports_trainable=value != "none")

    def describe(self, value: str) -> str:
        """Return a text such as "LoRA"."""
        return _WORDS.get(value, value)

    def plan_text(self, value: str, recipe: Recipe | None) -> str:
        """Return the kind of the adapter and its rank."""
        settings = None if recipe is None else adapter_settings(recipe)
        if settings is None or value == "none":
            return value
        if settings.kind == _SIDE:
            return f"{value}, reduction {settings.reduction}, every {settings.every}"
        if settings.kind in (_PROMPT, _PREFIX):
            return f"{value}, {settings.tokens} tokens"
        if "rank" not in _spec_fields(settings):
            return value
        init = "" if settings.init == "zero" else settings.init
        options = ["rslora" if settings.rslora else "", "dora" if settings.dora else "", init]
        options.append("experts" if settings.experts else "")
        return ", ".join([value, f"rank {settings.rank}", *filter(None, options)])

    def value_in(self, text: str) -> str:
        """Return only the kind of the adapter."""
        return text.partition(",")[0]

    def on_resume(self, old: Any, new: Any) -> OnResume:
        """Forbid a change: a run with another adapter is a new run."""
        return "refused"


_SPECS: dict[str, type[Any]] = {
    "lora": LoraSpec,
    "qlora": LoraSpec,
    "ia3": Ia3Spec,
    _SIDE: SideSpec,
    _PROMPT: PromptSpec,
    _PREFIX: PrefixSpec,
}


def _spec_fields(settings: AdapterSettings) -> set[str]:
    """The settings that apply to this kind of adapter."""
    return {each.name for each in fields(_SPECS[settings.kind])}


def _add_adapter(settings: AdapterSettings, model: torch.nn.Module) -> None:
    names = _spec_fields(settings)
    spec = {name: value for name, value in settings.model_dump().items() if name in names}
    if settings.layers is not None:
        spec["layers"] = (settings.layers[0], settings.layers[1])
    add_adapter(model, _SPECS[settings.kind](**spec))


def _give_advice(recipe: Recipe) -> None:
    if isinstance(recipe.model, ModelSettings) and recipe.model.config:
        say("the model is built from a config and is not saved, so its adapter alone cannot be loaded afterwards")
    if recipe.train.lr < _USUAL_LR:
        say(f"train.lr is {recipe.train.lr:g}; adapters usually learn best with 1e-4 to 3e-4")


def _as_setting(value: str) -> str:
    return "{kind: lora, base: fp8}" if value == _FP8 else value


def _can_have_fp8(accelerator: Accelerator) -> bool:
    """Whether a device can use fp8 weights; a CPU emulates them."""
    return accelerator.type == "cpu" or (accelerator.is_cuda and fp8.is_supported(accelerator.capability))


def _describe_device(accelerator: Accelerator) -> str:
    if not accelerator.is_cuda or accelerator.capability is None:
        return f"is of type {accelerator.type}"
    return "has {}.{}".format(*accelerator.capability)


# ---------------------------------------------------------------------- quantized weights in a trace


def quantization_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Scales and lookup tables of 4-bit weights, which are not parameters."""
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from state.tensors


def _dequantize_traced(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """Allocate like bitsandbytes: fp32 scales first, then the matrix."""
    shape = weight.quant_state.shape
    scales = torch.empty(math.ceil(math.prod(shape) / _BLOCK), device="meta")
    scales = scales + 0.0
    return torch.empty(shape, dtype=weight.quant_state.dtype, device="meta").to(dtype)


def _quantize_rows_traced(x: torch.Tensor, factors: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate like the Triton kernel; `empty_like` counts as an operation that reads `x` and writes the codes."""
    if torch.compiler.is_compiling():  # compiled blocks do not use the kernel
        return fp8.rounded_rows(x.contiguous(), factors)
    codes = torch.empty_like(x, dtype=torch.uint8, memory_format=torch.contiguous_format).view(fp8.FP8)
    return codes, x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _quantize_traced(model: Any, quantization: Quantization) -> None:
    """Replace the linear modules of the base with modules that have quantized weights on `meta`."""
    for name in quantizable(model):
        module, dtype = model.get_submodule(name), quantization.compute_dtype
        new = _make_4bit(module, dtype) if isinstance(quantization, Nf4) else quantization.quantize(module)
        model.set_submodule(name, new.requires_grad_(False))
    model.is_loaded_in_4bit = isinstance(quantization, Nf4)


def _make_4bit(module: Any, compute_dtype: torch.dtype) -> torch.nn.Module:
    from transformers.pytorch_utils import Conv1D

    num_in, num_out = module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape)
    linear: Any = torch.nn.Linear(num_in, num_out, module.bias is not None, device="meta", dtype=compute_dtype)
    linear.weight = _packed(num_in, num_out, compute_dtype)
    linear.compute_dtype = compute_dtype
    linear.forward = MethodType(_forward_4bit, linear)
    # DoRA reads the weights of the base; PEFT calls `dequantize` of modules with this attribute
    linear.dequantize = MethodType(_dequantize_module, linear)
    linear.__dict__["W_q"] = linear.weight  # not a second parameter
    return linear  # type: ignore[no-any-return]


def _packed(num_in: int, num_out: int, compute_dtype: torch.dtype) -> Any:
    count = num_in * num_out
    num_scales = math.ceil(count / _BLOCK)
    packed: Any = torch.nn.Parameter(
        torch.empty((math.ceil(count / 2), 1), dtype=torch.uint8, device="meta"), requires_grad=False
    )
    packed.quant_state = SimpleNamespace(
        shape=torch.Size((num_out, num_in)),
        dtype=compute_dtype,
        tensors=[
            torch.empty(num_scales, dtype=torch.uint8, device="meta"),
            torch.empty(math.ceil(num_scales / _NESTED_BLOCK), device="meta"),
            torch.empty(16, device="meta"),
            torch.empty(256, device="meta"),
            torch.empty((), device="meta"),
        ],
    )
    return packed


def _dequantize_module(module: Any) -> torch.Tensor:
    return _dequantize_traced(module.weight, module.compute_dtype)


def _forward_4bit(module: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.to(module.compute_dtype)
    matrix = _dequantize_traced(module.weight, module.compute_dtype)
    with torch.autocast("meta", enabled=False):
        return functional.linear(rows, matrix, module.bias).to(x.dtype)
