"""`trimtab merge`: merge an adapter into its base, and write the model only if its predictions stay the same.

Modules are merged one at a time, in fp32, and rounded once to the dtype in which they are stored. The result, in that
dtype, is compared with the trained model on rows of the run's own data; for a quantized base, the trained model is the
adapter on the quantized values. Weights stay on the host; modules are moved to the device one at a time.
"""

import dataclasses
import gc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.build.data import build_data
from trimtab.checkpoint.export import export_model
from trimtab.checkpoint.folder import refuse_unwritable
from trimtab.data.tasks.base import Task
from trimtab.data.tokens import TokenDataset, cached
from trimtab.errors import DataError, ModelError, RecipeError
from trimtab.hardware.inventory import find_device
from trimtab.inference.adapted import (
    AdapterSource,
    load_adapter_tokenizer,
    load_base,
    read_adapter_source,
    refuse_unmergeable,
)
from trimtab.inference.comparison import ModelComparison, OutputDivergence
from trimtab.log import say
from trimtab.model.adapter_configs import is_small
from trimtab.model.adapters import Adapter, load_adapter
from trimtab.model.expert_weights import adapted_parameter
from trimtab.model.hub import is_adapter
from trimtab.model.load import load_config, max_positions, resolve_source
from trimtab.model.quantization import Quantization, quantizable
from trimtab.recipe.schema import Recipe
from trimtab.tracking.mlflow.registry import local_source

# Measured on the CPU: KL divergence and share of equal predictions. LoRA in fp32: 1e-11 or less, 100%; in bf16: a Llama
# of 260k parameters 1e-4, 99.2%, SmolLM2-135M 3e-3, 97.5%. QLoRA onto the dequantized base: as LoRA. QLoRA onto the
# original base: MiniLM (a classifier) 4e-3, 96.9%; SmolLM2-135M 0.23, 69%; the Llama of 260k 0.17, 71%, where the
# held-out loss rose from 2.58 to 2.74. That Llama on an fp8 base: dequantized 7e-5, 99.3%; original 7.5e-3, 91.9%.
# The limits separate merges that can replace the adapter from those that cannot.
MAX_KL = 0.02
MIN_AGREEMENT = 0.9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ADAPTER_FACTS = ("base", "base_revision", "kind", "head", "adapter")  # facts that do not apply to a merged model


@dataclass(frozen=True)
class Merged:
    """A merged model that was written."""

    folder: Path
    base: str  # the model that the adapter belongs to
    onto: str  # "original" or "dequantized"
    dtype: str  # "fp32", "bf16" or "fp16"
    # closeness of its predictions to those of the trained model; None if not measured
    closeness: OutputDivergence | None


def merge(
    run: str | Path,
    folder: str | Path,
    *,
    onto: str = "original",
    num_rows: int = 64,
    max_kl: float = MAX_KL,
    min_agreement: float = MIN_AGREEMENT,
    force: bool = False,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> Merged:
    """Merge an adapter into its base and write a plain Hugging Face folder.

    Args:
        run: A run, the folder of an adapter, or a run on a tracking server (best:EXPERIMENT).
        folder: Where to write; it must be new or empty.
        onto: "original" for the stored base; or, for an adapter that was trained on a quantized base, "dequantized" for
            the values of that base.
        num_rows: Number of rows of the run's data on which to compare the models: held-out rows, or training rows if
            there are none.
        max_kl: The largest accepted mean KL divergence.
        min_agreement: The smallest accepted share of equal predictions.
        force: Whether to write the model even if the difference is large or cannot be measured.
        dtype: "auto" (the dtype of the base), "fp32", "bf16" or "fp16".
        device: The device to compute on; None chooses one.
        trust_remote_code: Whether Python code in the folder of the base may run.

    Raises:
        ModelError: `run` is not an adapter, its base is missing, or the models differ too much. Nothing is written.
    """
    target = Path(folder)
    _check_arguments(onto, dtype, num_rows, target)
    place = resolve_source(local_source(str(run)), adapters=True)
    if not Path(place).is_dir():
        raise ModelError(f"there is no run or folder {run}", "pass the folder of a run with an adapter")
    if not is_adapter(place):
        raise ModelError(f"{run} is a whole model: there is no adapter to merge", "use it without merging")
    refuse_unmergeable(place)
    source = read_adapter_source(place, trust_remote_code=trust_remote_code)
    if onto == "dequantized" and source.quantization is None:
        raise ModelError(f"the base of {run} was not quantized", "--onto original")
    merging = _AdapterMerge(source, find_device(device), trust_remote_code)
    stored = merging.own_dtype if dtype == "auto" else DTYPES[dtype]
    questions = merging.ask(num_rows, force)
    model = merging.merged(onto, stored)
    closeness = None if questions is None else questions.compare(model)
    if closeness is not None and not force:
        _check_closeness(closeness, max_kl, min_agreement, onto, source)
    name = next(name for name, known in DTYPES.items() if known is stored)
    merged = Merged(target, source.base, onto, name, closeness)
    facts = {key: value for key, value in source.facts.items() if key not in _ADAPTER_FACTS}
    about = dataclasses.asdict(merged) | {"adapter": str(source.folder)}
    del about["folder"]
    export_model(target, model, merging.tokenizer, card=facts | {"merged": about})
    return merged


def _check_arguments(onto: str, dtype: str, num_rows: int, target: Path) -> None:
    if onto not in ("original", "dequantized"):
        raise RecipeError(f"--onto {onto} is not valid", "--onto original or --onto dequantized")
    if dtype != "auto" and dtype not in DTYPES:
        raise RecipeError(f"--dtype {dtype} is not valid", f"use one of auto, {', '.join(DTYPES)}")
    if num_rows < 1:
        raise RecipeError(f"--rows {num_rows} compares nothing", "--rows 1 or more")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecipeError(f"{target} is not empty", "pass a new folder")
    refuse_unwritable(target)


def _check_closeness(
    found: OutputDivergence, max_kl: float, min_agreement: float, onto: str, source: AdapterSource
) -> None:
    """Refuse a merged model whose predictions differ too much; NaN is never close enough."""
    if found.kl_mean <= max_kl and found.agreement >= min_agreement:
        return
    ways = ["--force to write it anyway"]
    if source.quantization is not None and onto == "original":
        ways.insert(0, "--onto dequantized, which keeps the base that the adapter was trained on")
    raise ModelError(
        f"the merged model differs from the adapter: KL {found.kl_mean:.3g} (at most {max_kl:g}), the same prediction "
        f"in {found.agreement:.2%} (at least {min_agreement:.2%}) of {found.num_answers:,}; nothing was written",
        "; or ".join(ways),
    )


@dataclass(frozen=True)
class _BaseForm:
    """The dtype of a base, and how its values are rounded."""

    dtype: torch.dtype
    quantization: Quantization | None = None


class _AdapterMerge:
    """Load the models that a merge needs, never more than one at a time."""

    def __init__(self, source: AdapterSource, device: torch.device, trust_remote_code: bool) -> None:
        self.tokenizer = load_adapter_tokenizer(source, trust_remote_code=trust_remote_code)
        self._source, self._device, self._trust = source, device, trust_remote_code
        own = getattr(load_config(source.base, trust_remote_code=trust_remote_code), "dtype", None)
        # the dtype of the base's files: no rounding, and no more memory than necessary
        self.own_dtype = own if isinstance(own, torch.dtype) and own in DTYPES.values() else torch.float32
        # a base that was trained in fp32 has the values of its files; others were quantized from `base_dtype`
        in_own = source.base_dtype is torch.float32 and source.quantization is None
        self._trained_form = _BaseForm(self.own_dtype if in_own else source.base_dtype, source.quantization)
        self._current: tuple[_BaseForm, Any, Adapter] | None = None

    def ask(self, num_rows: int, force: bool) -> ModelComparison | None:
        """Compute the predictions of the trained model; None if this is not possible and `force` is set."""
        try:
            return self._asked(num_rows)
        except (RecipeError, DataError) as error:
            if not force:
                cure = "; or ".join(filter(None, [error.cure, "--force to merge without a comparison"]))
                raise RecipeError(f"the models cannot be compared: {error.problem}", cure) from error
            say(f"not compared: {error.problem}")
            return None

    def _asked(self, num_rows: int) -> ModelComparison:
        facts = self._source.facts
        if not isinstance(facts.get("recipe"), Mapping):
            raise RecipeError(f"{self._source.folder} has no record of the rows it was trained on")
        data = build_data(Recipe(**facts["recipe"]))
        task, rows, tokenizer = data.task, data.eval or data.train, self.tokenizer
        model, _ = self._model(self._trained_form)
        task.bind(tokenizer, model.config)
        length = min(filter(None, [facts.get("max_length"), max_positions(model)]), default=512)
        key = [
            task.name,
            task.settings,
            rows,
            tokenizer,
            length,
        ]  # that of the run: the tokens may be cached
        tokens: TokenDataset = cached(key, lambda: task.encode(rows, tokenizer, length))
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))[:num_rows].tolist()
        questions = ModelComparison(
            task, [tokens[row] for row in sorted(order)], _num_outputs(model, task), self._device
        )
        if not questions.record_reference(model):
            raise RecipeError(f"{len(order)} rows of {rows.origin} have no labels to predict", "increase --rows")
        return questions

    def merged(self, onto: str, dtype: torch.dtype) -> Any:
        """Return the model with the adapter merged, each weight rounded to `dtype` once."""
        form = self._trained_form if onto == "dequantized" else _BaseForm(self.own_dtype)
        model, adapter = self._model(form)
        self._current = None
        merge_in_place(model, adapter, dtype)
        return model

    def _model(self, form: _BaseForm) -> tuple[Any, Adapter]:
        """Return the base in a form, with the adapter attached."""
        if self._current is None or self._current[0] != form:
            self._current = None
            gc.collect()  # frees the previous model, which has reference cycles
            model = load_base(self._source, self.tokenizer, dtype=form.dtype, trust_remote_code=self._trust)
            if form.quantization is not None:
                round_base(model, form.quantization, self._device)
            self._current = form, model, attach_adapter(model, self._source)
        return self._current[1], self._current[2]


def _num_outputs(model: Any, task: Task) -> int:
    head = model.get_output_embeddings() if task.loss_kind == "token-cross-entropy" else None
    return model.config.num_labels if head is None else head.weight.shape[0]  # type: ignore[no-any-return]


@torch.no_grad()
def merge_in_place(model: Any, adapter: Adapter, dtype: torch.dtype) -> None:
    """Replace modules that have an adapter with plain modules, and round all weights to `dtype`.

    Only one module at a time is in fp32. Tied weights stay tied.

    Args:
        model: A model with an adapter; its base is not quantized.
        adapter: The adapter, frozen.
        dtype: The dtype of all weights afterwards.
    """
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    places = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for name, layer in [(name, model.get_submodule(name)) for name in adapter.targets]:  # they can be nested
        base = layer.get_base_layer()
        if holders[id(adapted_parameter(layer))] > 1:
            raise ModelError(
                f"{name} shares its weight with another module, so its adapter cannot be merged", "keep the adapter"
            )
        base.float()
        layer.merge()
        base.to(dtype)
        for parent, last, child in places:
            if child is layer:
                setattr(parent, last, base)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for name, value in list(vars(model).items()):
        if value is adapter or name == "peft_config":
            delattr(model, name)


@torch.no_grad()
def round_base(model: Any, quantization: Quantization, device: torch.device) -> None:
    """Round the linear modules of a base to the values that they had in training.

    Args:
        model: The base, not quantized, in the dtype that it was quantized from.
        quantization: How it was quantized.
        device: Where to quantize, one module at a time.
    """
    for name in quantizable(model):
        module: Any = model.get_submodule(name)
        is_linear = isinstance(module, torch.nn.Linear)  # otherwise transformers' Conv1D, whose weight is transposed
        weight = module.weight.data if is_linear else module.weight.data.T
        weight.copy_(quantization.rounded(weight.to(device)))
        if module.bias is not None:
            module.bias.copy_(module.bias.to(quantization.compute_dtype))


def attach_adapter(model: Any, source: AdapterSource) -> Adapter:
    """Attach an adapter to its base. Modules that were trained in full keep the fp32 values of the adapter's file."""
    from safetensors import safe_open

    adapter = load_adapter(model, source.folder)
    path = source.folder / "adapter_model.safetensors"
    if path.is_file():
        tensors = adapter.tensors()
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name = key.removeprefix("base_model.model.")
                if name in tensors and not is_small(name):
                    tensors[name].data = file.get_tensor(key)
    return adapter
