"""`trimtab merge`: an adapter and its base become one plain model, written only if it answers as the adapter did.

The base is merged module by module, in fp32, and rounded once to the dtype in which it is stored. As it will be stored
it is then compared, on rows of the run's own data, with the model that was trained: for QLoRA, the base as 4 bits hold
it, with the adapter beside it. Weights stay on the host; each module computes on the device in its turn.
"""

import dataclasses
import gc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.build import build_data
from trimtab.checkpoint.export import export_model
from trimtab.data.tasks.base import Task
from trimtab.data.tokens import TokenDataset, cached
from trimtab.errors import DataError, ModelError, RecipeError
from trimtab.hardware.inventory import find_device
from trimtab.inference.adapted import AdapterSource, load_base, read_adapter_source, tokenizer_of
from trimtab.inference.closeness import Closeness, Questions
from trimtab.log import say
from trimtab.model.adapters import Adapter, load_adapter
from trimtab.model.hub import is_adapter
from trimtab.model.load import load_config, max_positions, resolve_source
from trimtab.model.nf4 import Nf4, quantizable, rounded
from trimtab.recipe.schema import Recipe
from trimtab.tracking.mlflow.registry import local_source

# Measured on the CPU, KL and share of equal answers. LoRA in fp32: 1e-11 or less, 100%; in bf16: a Llama of 260k 1e-4,
# 99.2%, SmolLM2-135M 3e-3, 97.5%. QLoRA onto the values of 4 bits: as LoRA. QLoRA onto the original base: MiniLM
# (a classifier) 4e-3, 96.9%; SmolLM2-135M 0.23, 69%; the Llama of 260k 0.17, 71%, and there a held-out loss of 2.58
# became 2.74. The limits lie between those that can take each other's place and those that cannot.
MAX_KL = 0.02
MIN_AGREEMENT = 0.9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OF_AN_ADAPTER = ("base", "base_revision", "kind", "head", "adapter")  # facts that a merged model does not have


@dataclass(frozen=True)
class Merged:
    """A model that was merged and written.

    Args:
        folder: Where it is.
        base: The model that the adapter belongs to.
        onto: "original" or "dequantized".
        dtype: In which its weights are stored: "fp32", "bf16" or "fp16".
        closeness: How near it is to the model that was trained; None where that was not measured.
    """

    folder: Path
    base: str
    onto: str
    dtype: str
    closeness: Closeness | None


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
        run: A run, the folder of an adapter, or one on a tracking server (best:EXPERIMENT).
        folder: Where to write; it has to be new or empty.
        onto: "original", the base as it is stored; or, for an adapter that was trained on a base of 4 bits,
            "dequantized", the values that those 4 bits stand for.
        num_rows: On how many rows of the run's data the two are compared: held-out rows, else rows of the training.
        max_kl: The largest mean KL divergence that is written.
        min_agreement: The smallest share of equal answers that is written.
        force: Write it however far they are apart, also where that cannot be measured.
        dtype: "auto" (that of the base), "fp32", "bf16" or "fp16".
        device: Where to compute; found by itself if left out.
        trust_remote_code: Whether Python code that lies beside the base may run.

    Raises:
        ModelError: If `run` is no adapter, its base is gone, or the two differ too much; nothing is written then.
    """
    target = Path(folder)
    _check(onto, dtype, num_rows, target)
    place = resolve_source(local_source(str(run)), adapters=True)
    if not Path(place).is_dir():
        raise ModelError(f"there is no run or folder {run}", "name the folder of a run with an adapter")
    if not is_adapter(place):
        raise ModelError(f"{run} is a whole model: there is no adapter to merge", "use it as it is")
    source = read_adapter_source(place, trust_remote_code=trust_remote_code)
    if onto == "dequantized" and source.nf4 is None:
        raise ModelError(f"the base of {run} was not quantized", "--onto original")
    merging = _Merging(source, find_device(device), trust_remote_code)
    stored = merging.own_dtype if dtype == "auto" else DTYPES[dtype]
    questions = merging.ask(num_rows, force)
    model = merging.merged(onto, stored)
    closeness = None if questions is None else questions.compare(model)
    if closeness is not None and not force:
        _judge(closeness, max_kl, min_agreement, onto, source)
    name = next(name for name, known in DTYPES.items() if known is stored)
    merged = Merged(target, source.base, onto, name, closeness)
    facts = {key: value for key, value in source.facts.items() if key not in _OF_AN_ADAPTER}
    about = dataclasses.asdict(merged) | {"adapter": str(source.folder)}
    del about["folder"]
    export_model(target, model, merging.tokenizer, card=facts | {"merged": about})
    return merged


def _check(onto: str, dtype: str, num_rows: int, target: Path) -> None:
    if onto not in ("original", "dequantized"):
        raise RecipeError(f"--onto {onto} is not known", "use original or dequantized")
    if dtype != "auto" and dtype not in DTYPES:
        raise RecipeError(f"--dtype {dtype} is not known", f"use auto, {', '.join(DTYPES)}")
    if num_rows < 1:
        raise RecipeError(f"--rows {num_rows}: without rows nothing can be compared", "use 1 or more")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecipeError(f"{target} is not empty", "name a new folder")


def _judge(found: Closeness, max_kl: float, min_agreement: float, onto: str, source: AdapterSource) -> None:
    """Refuse a merged model that answers otherwise; a number that is NaN is never near enough."""
    if found.kl_mean <= max_kl and found.agreement >= min_agreement:
        return
    ways = ["--force to write it all the same"]
    if source.nf4 is not None and onto == "original":
        ways.insert(0, "--onto dequantized, which keeps what the adapter was trained beside")
    raise ModelError(
        f"the merged model answers otherwise than the adapter: KL {found.kl_mean:.3g} (at most {max_kl:g}), the same "
        f"answer in {found.agreement:.2%} (at least {min_agreement:.2%}) of {found.num_answers:,}; nothing was written",
        "; or ".join(ways),
    )


@dataclass(frozen=True)
class _Form:
    """How a base is held: in which dtype, and whether its values are those that 4 bits stand for."""

    dtype: torch.dtype
    is_nf4: bool


class _Merging:
    """One adapter on its way into its base; there is never more than one model in memory."""

    def __init__(self, source: AdapterSource, device: torch.device, trust_remote_code: bool) -> None:
        self.tokenizer = tokenizer_of(source, trust_remote_code=trust_remote_code)
        self._source, self._device, self._trust = source, device, trust_remote_code
        own = getattr(load_config(source.base, trust_remote_code=trust_remote_code), "dtype", None)
        # the dtype of the base's files: nothing is rounded, and nothing takes more memory than it has to
        self.own_dtype = own if isinstance(own, torch.dtype) and own in DTYPES.values() else torch.float32
        # a base that was held in fp32 has the values of its files; 4 bits stand for values of the dtype they came from
        is_nf4 = source.nf4 is not None
        in_own = source.base_dtype is torch.float32 and not is_nf4
        self._trained_form = _Form(self.own_dtype if in_own else source.base_dtype, is_nf4)
        self._current: tuple[_Form, Any, Adapter] | None = None

    def ask(self, num_rows: int, force: bool) -> Questions | None:
        """Ask the model that was trained; None where that cannot be done and `force` goes on without."""
        try:
            return self._asked(num_rows)
        except (RecipeError, DataError) as error:
            if not force:
                cure = "; or ".join(filter(None, [error.cure, "--force to merge without a comparison"]))
                raise RecipeError(f"the two models cannot be compared: {error.problem}", cure) from error
            say(f"not compared: {error.problem}")
            return None

    def _asked(self, num_rows: int) -> Questions:
        facts = self._source.facts
        if not isinstance(facts.get("recipe"), Mapping):
            raise RecipeError(f"{self._source.folder} does not say on which rows it was trained")
        data = build_data(Recipe(**facts["recipe"]))
        task, rows, tokenizer = data.task, data.eval or data.train, self.tokenizer
        model, _ = self._model(self._trained_form)
        task.bind(tokenizer, model.config)
        length = min(filter(None, [facts.get("max_length"), max_positions(model)]), default=512)
        key = [task.name, task.settings, rows, tokenizer, length]  # as the run had it: the tokens may be in the cache
        tokens: TokenDataset = cached(key, lambda: task.encode(rows, tokenizer, length))
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))[:num_rows].tolist()
        questions = Questions(task, [tokens[row] for row in sorted(order)], _num_outputs(model, task), self._device)
        if not questions.ask_first(model):
            raise RecipeError(f"{len(order)} rows of {rows.origin} have no label to ask for", "more --rows")
        return questions

    def merged(self, onto: str, dtype: torch.dtype) -> Any:
        """The model with the adapter merged, each weight rounded to `dtype` once."""
        form = self._trained_form if onto == "dequantized" else _Form(self.own_dtype, is_nf4=False)
        model, adapter = self._model(form)
        self._current = None
        merge_in_place(model, adapter, dtype)
        return model

    def _model(self, form: _Form) -> tuple[Any, Adapter]:
        """The base in that form with the adapter beside its modules."""
        if self._current is None or self._current[0] != form:
            self._current = None
            gc.collect()  # the other one, which holds itself, leaves before this one comes
            model = load_base(self._source, self.tokenizer, dtype=form.dtype, trust_remote_code=self._trust)
            if form.is_nf4 and self._source.nf4 is not None:
                round_to_nf4(model, self._source.nf4, self._device)
            self._current = form, model, lay_on(model, self._source)
        return self._current[1], self._current[2]


def _num_outputs(model: Any, task: Task) -> int:
    head = model.get_output_embeddings() if task.loss_kind == "token-cross-entropy" else None
    return model.config.num_labels if head is None else head.weight.shape[0]  # type: ignore[no-any-return]


@torch.no_grad()
def merge_in_place(model: Any, adapter: Adapter, dtype: torch.dtype) -> None:
    """Make plain modules of those that have an adapter, and round all weights to `dtype`.

    One module at a time is in fp32. Weights that are tied stay tied.

    Args:
        model: A model with an adapter on a base that is not quantized.
        adapter: The adapter, frozen.
        dtype: Of all weights afterwards.
    """
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    places = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for name in adapter.targets:
        layer = model.get_submodule(name)
        base = layer.get_base_layer()
        if holders[id(base.weight)] > 1:
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
def round_to_nf4(model: Any, nf4: Nf4, device: torch.device) -> None:
    """Give the linear modules of a base the values that 4 bits stand for, as they had them in training.

    Args:
        model: The base, not quantized, in the dtype that it was quantized from.
        nf4: How it was quantized.
        device: Where to quantize, one module at a time.
    """
    for name in quantizable(model):
        module: Any = model.get_submodule(name)
        is_linear = isinstance(module, torch.nn.Linear)  # else transformers' Conv1D, whose weight lies the other way
        weight = module.weight.data if is_linear else module.weight.data.T
        weight.copy_(rounded(weight.to(device), nf4))
        if module.bias is not None:
            module.bias.copy_(module.bias.to(nf4.compute_dtype))


def lay_on(model: Any, source: AdapterSource) -> Adapter:
    """Lay an adapter onto its base; what it holds whole keeps the fp32 in which it was trained."""
    from safetensors import safe_open

    adapter = load_adapter(model, source.folder)
    path = source.folder / "adapter_model.safetensors"
    if path.is_file():
        tensors = adapter.tensors()
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name = key.removeprefix("base_model.model.")
                if name in tensors and ".lora_" not in name:
                    tensors[name].data = file.get_tensor(key)
    return adapter
