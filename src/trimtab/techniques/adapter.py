"""LoRA and QLoRA: small trainable matrices added to frozen weights, which QLoRA keeps in 4 bits.

Adapters change the method, so only the user chooses them; a plan only shows what they would need.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from trimtab.log import say
from trimtab.model import adapters, lora_product, nf4
from trimtab.model.adapters import LoraSpec, add_adapter
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

_WORDS = {"lora": "LoRA", "qlora": "QLoRA"}
_USUAL_LR = 1e-4  # adapters learn slowly below this rate
_BLOCK, _NESTED_BLOCK = 64, 256  # weights that share a scale, and scales that share one


def adapter_settings(recipe: Recipe) -> AdapterSettings | None:
    """The adapter of a recipe with all its settings, or None."""
    if isinstance(recipe.adapter, AdapterSettings):
        return recipe.adapter
    return None if recipe.adapter == "none" else AdapterSettings(kind=recipe.adapter)


def has_4bit_base(recipe: Recipe) -> bool:
    """Whether the frozen weights of a recipe's model are kept in 4 bits."""
    settings = adapter_settings(recipe)
    return settings is not None and settings.kind == "qlora"


class AdapterTechnique(Technique):
    """Train low-rank matrices added to frozen weights."""

    key = "adapter"
    setting = "adapter"
    effect = "method"
    phase = Phase.ADAPTERS

    def values(self, case: Case) -> tuple[str, ...]:
        """Only the recipe's value."""
        settings = None if case.recipe is None else adapter_settings(case.recipe)
        return ("none" if settings is None else settings.kind,)

    def suggest(self, spec: StepSpec, case: Case) -> Iterator[Suggestion]:
        """LoRA and QLoRA, where all weights train on a GPU; a loop of the user's own adds its adapters itself."""
        if case.recipe is not None and spec[self.key] == "none" and case.accelerator.is_cuda:
            for kind in _WORDS:
                yield Suggestion(f"adapter: {kind}", spec.having({self.key: kind}))

    def precision(self, value: str, precision: str) -> str:
        """Adapters are kept in fp32, so that bf16-pure means the same as bf16."""
        return "bf16" if value != "none" and precision == "bf16-pure" else precision

    def in_recipe(self, recipe: Recipe, value: str) -> Recipe:
        """The recipe with the adapter, its default optimizer, and no other frozen parameters."""
        train = recipe.train.model_copy(update={"freeze": {}, "optimizer": "auto"})
        return recipe.model_copy(update={"adapter": value, "train": train})

    def load(self, value: str, options: LoadOptions, half: torch.dtype) -> LoadOptions:
        """Frozen weights need no fp32: matrix products round them in any case."""
        if value == "none":
            return options
        return replace(options, dtype=half, quantization=nf4.Nf4(compute_dtype=half) if value == "qlora" else None)

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Add the adapter. In a trace, also quantize the base to 4 bits, which a run does while it loads weights."""
        assert site.recipe is not None
        settings = adapter_settings(site.recipe) or AdapterSettings(kind=value)  # type: ignore[arg-type]
        if not site.is_traced:
            _add_adapter(settings, model)
            _give_advice(site.recipe)
            return
        model.requires_grad_(False)
        if value == "qlora":
            _quantize_traced(model, site.compute_dtype or torch.float32)
        if settings.layers is not None and site.kept_blocks is not None:
            first, last = (number % (1 + max(site.kept_blocks)) for number in settings.layers)
            inside = [index for index, number in enumerate(site.kept_blocks) if first <= number <= last]
            settings = settings.model_copy(update={"layers": [inside[0], inside[-1]]})
        with torch.device("meta"):
            _add_adapter(settings, model)

    def patches(self, recorder: TraceRecorder, accelerator: Accelerator) -> Iterator[Patch]:
        """Dequantization needs data; messages would describe the shortened model of the trace."""
        yield adapters, "say", lambda *_: None
        yield lora_product, "dequantized", _dequantize_traced
        yield nf4, "dequantized", _dequantize_traced

    def block_mark(self, value: str, num_blocks: int, recipe: Recipe | None) -> Callable[[int], Any] | None:
        """Blocks with an adapter are not like blocks without."""
        settings = None if recipe is None else adapter_settings(recipe)
        if settings is None or settings.layers is None or not num_blocks:
            return None
        first, last = (number % num_blocks for number in settings.layers)
        return range(first, last + 1).__contains__

    def names_blocks(self, recipe: Recipe | None) -> bool:
        """Patterns with a digit may mean single blocks."""
        settings = None if recipe is None else adapter_settings(recipe)
        if settings is None:
            return False
        patterns = f"{settings.targets} {settings.ranks} {settings.alphas} {settings.trains}"
        return any(letter.isdigit() for letter in patterns)

    def loads_kernels(self, value: str) -> bool:
        """4-bit weights need the kernels of bitsandbytes."""
        return value == "qlora"

    def host_use(self, value: str, model: Any, weight_bytes: int) -> HostUse:
        """4-bit weights are quantized one by one while loading; only the adapter is exported."""
        return HostUse(streams_weights=value == "qlora", exports_trainable=value != "none")

    def describe(self, value: str) -> str:
        """Such as "LoRA"."""
        return _WORDS.get(value, value)

    def plan_text(self, value: str, recipe: Recipe | None) -> str:
        """With its rank."""
        settings = None if recipe is None else adapter_settings(recipe)
        if settings is None or value == "none":
            return value
        return f"{value}, rank {settings.rank}" + (", rslora" if settings.rslora else "")

    def value_in(self, text: str) -> str:
        """Its kind alone."""
        return text.partition(",")[0]

    def on_resume(self, old: Any, new: Any) -> OnResume:
        """Another adapter is another run."""
        return "refused"


def _add_adapter(settings: AdapterSettings, model: torch.nn.Module) -> None:
    spec = {name: value for name, value in settings.model_dump().items() if name != "kind"}
    if settings.layers is not None:
        spec["layers"] = (settings.layers[0], settings.layers[1])
    add_adapter(model, LoraSpec(**spec))


def _give_advice(recipe: Recipe) -> None:
    if isinstance(recipe.model, ModelSettings) and recipe.model.config:
        say("the model is built from a config and is not saved, so its adapter alone cannot be loaded afterwards")
    if recipe.train.lr < _USUAL_LR:
        say(f"train.lr is {recipe.train.lr:g}; adapters usually learn best with 1e-4 to 3e-4")


# ---------------------------------------------------------------------- 4-bit weights in a trace


def quantization_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Scales and lookup tables of 4-bit weights, which are not parameters."""
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from state.tensors


def _dequantize_traced(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """Allocate as bitsandbytes does: fp32 scales first, then the matrix."""
    shape = weight.quant_state.shape
    scales = torch.empty(math.ceil(math.prod(shape) / _BLOCK), device="meta")
    scales = scales + 0.0
    return torch.empty(shape, dtype=weight.quant_state.dtype, device="meta").to(dtype)


def _quantize_traced(model: Any, compute_dtype: torch.dtype) -> None:
    """Replace the linear modules of the base by modules with 4-bit weights on `meta`."""
    from transformers.pytorch_utils import Conv1D

    for name in nf4.quantizable(model):
        module = model.get_submodule(name)
        num_in, num_out = module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape)
        linear = torch.nn.Linear(num_in, num_out, module.bias is not None, device="meta", dtype=compute_dtype)
        linear.weight = _packed(num_in, num_out, compute_dtype)
        linear.compute_dtype = compute_dtype  # type: ignore[assignment]
        linear.forward = MethodType(_forward_4bit, linear)  # type: ignore[method-assign]
        if linear.bias is not None:
            linear.bias.requires_grad_(False)
        model.set_submodule(name, linear)
    model.is_loaded_in_4bit = True


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


def _forward_4bit(module: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.to(module.compute_dtype)
    matrix = _dequantize_traced(module.weight, module.compute_dtype)
    with torch.autocast("meta", enabled=False):
        return functional.linear(rows, matrix, module.bias).to(x.dtype)
