"""Adapters that PEFT provides: their settings, PEFT's configs for them, and their initial values.

LoRA (also with magnitudes, DoRA, and with matrices taken from the base weights, PiSSA and OLoRA) and IA3. PiSSA and
OLoRA subtract their initial product from the base, so that the sum is unchanged; `delta_of` turns the trained matrices
into a LoRA adapter of twice the rank on the original base.
"""

import copy
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from trimtab.errors import ModelError, RecipeError
from trimtab.model.adapter_targets import (
    ALL_LINEAR,
    match_values,
    select_experts,
    select_scaled_inputs,
    select_scaled_modules,
    select_targets,
    shorten_names,
)
from trimtab.model.expert_weights import refuse_settings, shorten_parameter_names

WEIGHTS_FILE = "adapter_model.safetensors"
NAME = "default"  # PEFT's name of the only adapter of a model; not part of the names in its files
ZERO = "zero"
_PEFT_INITS = {"pissa": "pissa", "pissa-fast": "pissa_niter_16", "olora": "olora"}
_TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
}
_SMALL = re.compile(r"\.(lora_\w+|ia3_l)(\.|$)")


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
        experts: Whether fused expert weights get an adapter as well: two matrices for each expert.
        layers: First and last transformer block to adapt, counted from 0, both inclusive; negative values count from
            the end; encoder blocks come before decoder blocks. None for all.
        ranks: Other ranks by pattern on names of modules and of expert weights; the last matching pattern applies.
        alphas: Other alphas by pattern, in the same way.
        trains: Patterns of modules to train in full, besides newly initialized modules, which always are.
        rslora: Scale by alpha / sqrt(rank) instead.
        dora: Train the norm of each row of the weights separately.
        init: "zero" (the product starts as zero), or what the matrices are taken from: "pissa" and "pissa-fast" (the
            largest singular values of the base weight, exact or estimated) or "olora" (its QR decomposition).
    """

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | Sequence[str] = ALL_LINEAR
    experts: bool = False
    layers: tuple[int, int] | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    trains: Sequence[str] = ()
    rslora: bool = False
    dora: bool = False
    init: str = ZERO

    def __post_init__(self) -> None:
        for key, rank in {"rank": self.rank, **{f"ranks.{name}": rank for name, rank in self.ranks.items()}}.items():
            if rank < 1:
                raise RecipeError(f"adapter.{key} is {rank}", "use a whole number of at least 1")
        if not 0 <= self.dropout < 1:
            raise RecipeError(f"adapter.dropout is {self.dropout}", "use a share from 0 up to, but not including, 1")
        if self.init != ZERO and self.init not in _PEFT_INITS:
            raise RecipeError(f"adapter.init is {self.init!r}", f"use one of {', '.join((ZERO, *_PEFT_INITS))}")
        if self.experts:
            refuse_settings(self.dropout, self.dora, None if self.init == ZERO else self.init)


@dataclass(frozen=True)
class Ia3Spec:
    """Configuration of an IA3 adapter: one trainable factor for each output, or input, of a linear module.

    Attributes:
        targets: As in `LoraSpec`; None for the modules that PEFT chooses for the type of the model: keys, values and
            the second layer of the MLP.
        layers: As in `LoraSpec`.
        trains: As in `LoraSpec`.
    """

    targets: str | Sequence[str] | None = None
    layers: tuple[int, int] | None = None
    trains: Sequence[str] = ()


@dataclass(frozen=True)
class Base:
    """The base model of an adapter.

    Attributes:
        name: Its folder or Hub name; None for a model built from a config.
        revision: The Hub commit that was loaded, if known.
    """

    name: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class AdapterPlan:
    """The changes that an adapter makes to a model.

    Attributes:
        config: PEFT's config, as it is saved.
        targets: Names of the modules and of the expert weights that get an adapter.
        words: Description of the adapter for the log.
    """

    config: Any
    targets: Sequence[str]
    words: str


def is_small(name: str) -> bool:
    """Whether a name in an adapter's file is one of the adapter's own tensors, not of a module that is saved whole."""
    return _SMALL.search(name) is not None


def plan_adapter(model: Any, spec: LoraSpec | Ia3Spec, kept: Sequence[str]) -> AdapterPlan:
    """Select the modules that get an adapter and build PEFT's config.

    Args:
        model: A transformers model.
        spec: Configuration of the adapter.
        kept: Names of the modules that are trained in full.

    Raises:
        RecipeError: A pattern matches nothing, or a module that cannot have such an adapter.
    """
    return _plan_lora(model, spec, kept) if isinstance(spec, LoraSpec) else _plan_ia3(model, spec, kept)


def _plan_lora(model: Any, spec: LoraSpec, kept: Sequence[str]) -> AdapterPlan:
    from peft import LoraConfig

    experts = select_experts(model, spec.layers, kept) if spec.experts else []
    modules = list(select_targets(model, spec.targets, spec.layers, kept, experts))
    targets = [*modules, *experts]
    ranks = dict.fromkeys(targets, spec.rank) | match_values(targets, spec.ranks, "adapter.ranks")
    alphas: dict[str, Any] = {name: 2 * ranks[name] if spec.alpha is None else spec.alpha for name in targets}
    alphas |= match_values(targets, spec.alphas, "adapter.alphas")
    if spec.init != ZERO:
        _check_init(model, spec.init, ranks)
    common_rank, common_alpha = statistics.mode(ranks.values()), statistics.mode(alphas.values())
    with peft_errors_explained("the adapter"):
        config = LoraConfig(
            r=common_rank,
            lora_alpha=common_alpha,
            lora_dropout=spec.dropout,
            target_modules=shorten_names(modules, model),
            target_parameters=shorten_parameter_names(experts, model) or None,
            rank_pattern={re.escape(name): rank for name, rank in ranks.items() if rank != common_rank},
            alpha_pattern={re.escape(name): alpha for name, alpha in alphas.items() if alpha != common_alpha},
            use_rslora=spec.rslora,
            use_dora=spec.dora,
            **_common_settings(model, modules, kept),
        )
    low, high = min(ranks.values()), max(ranks.values())
    rank = str(low) if low == high else f"{low} to {high}"
    words = f"{'DoRA' if spec.dora else 'LoRA'} of rank {rank} on {len(modules)} modules"
    words += f" and {len(experts)} fused expert weights" if experts else ""
    return AdapterPlan(_with_base(config, model), targets, words)


def _plan_ia3(model: Any, spec: Ia3Spec, kept: Sequence[str]) -> AdapterPlan:
    from peft import IA3Config

    targets = list(select_scaled_modules(model, spec.targets, spec.layers, kept))
    inputs = select_scaled_inputs(model, targets)
    short, short_inputs = shorten_names(targets, model), shorten_names(inputs, model)
    if not set(short_inputs) <= set(short):  # a last part that matches modules of both kinds
        short, short_inputs = targets, inputs
    with peft_errors_explained("the adapter"):
        config = IA3Config(
            target_modules=short, feedforward_modules=short_inputs, **_common_settings(model, targets, kept, ties=False)
        )
    return AdapterPlan(_with_base(config, model), targets, f"IA3 on {len(targets)} modules")


def _common_settings(model: Any, targets: Sequence[str], kept: Sequence[str], *, ties: bool = True) -> dict[str, Any]:
    whole = sorted({*kept, *tied_to(model, kept)})
    linear = [model.get_submodule(name) for name in targets]
    settings = {
        "fan_in_fan_out": all(not isinstance(module, torch.nn.Linear) for module in linear),
        "modules_to_save": whole or None,
        "task_type": _task_type(model, kept),
        "inference_mode": True,
    }
    return settings | ({"ensure_weight_tying": _peft_can_tie(model, whole)} if ties else {})


def _with_base(config: Any, model: Any) -> Any:
    base = base_of(model)
    config.base_model_name_or_path, config.revision = base.name, base.revision
    return config


# ---------------------------------------------------------------------- initial values


def initialize_lora(model: torch.nn.Module, targets: Sequence[str], spec: LoraSpec) -> dict[str, torch.Tensor]:
    """Set the initial values of low-rank matrices and magnitudes, in fp32.

    Returns:
        The initial matrices on the host, by name, if their product was subtracted from the base; else empty.
    """
    starts: dict[str, torch.Tensor] = {}
    for name in targets:
        layer: Any = model.get_submodule(name)
        down, up = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        # an adapter on meta (for a plan) draws no numbers, so planning does not change the random numbers of a run
        drawn = torch.empty(down.shape, dtype=torch.float32, device="meta" if down.is_meta else "cpu")
        torch.nn.init.kaiming_uniform_(drawn, a=5**0.5)
        down.data, up.data = drawn.to(down.device), torch.zeros_like(up, dtype=torch.float32)
        if spec.init != ZERO and not down.is_meta:
            _take_from_base(layer, spec.init)
            for part in ("lora_A", "lora_B"):
                starts[f"{name}.{part}.{NAME}.weight"] = getattr(layer, part)[NAME].weight.detach().cpu().clone()
        if spec.dora and not down.is_meta:
            layer.lora_magnitude_vector[NAME].update_layer(
                base_layer=layer.get_base_layer(),
                lora_A=layer.lora_A[NAME].weight,
                lora_B=layer.lora_B[NAME].weight,
                scaling=layer.scaling[NAME],
            )
    return starts


def _take_from_base(layer: Any, init: str) -> None:
    """Let PEFT compute the matrices, and subtract their product from the base weight in fp32, rounding once."""
    base = layer.get_base_layer()
    dtype = base.weight.dtype
    base.float()
    if init == "olora":
        layer.olora_init(NAME)
    else:
        layer.pissa_init(NAME, _PEFT_INITS[init])
    base.to(dtype)
    for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
        part.weight.data = part.weight.data.float().contiguous()


def _check_init(model: Any, init: str, ranks: Mapping[str, int]) -> None:
    """Refuse modules whose matrices cannot be taken from the base weight."""
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for name, rank in ranks.items():
        module = model.get_submodule(name)
        if not module.weight.is_floating_point() or not isinstance(module.weight, torch.nn.Parameter):
            raise RecipeError(f"adapter.init: {init} changes the base, but {name} is quantized", "adapter.init: zero")
        if init == "olora" and not isinstance(module, torch.nn.Linear):
            raise RecipeError(
                f"adapter.init: olora cannot be used with {name}, a {type(module).__name__}", "adapter.init: pissa"
            )
        if rank > min(module.weight.shape):
            raise RecipeError(
                f"adapter.init: {init} needs a rank of at most {min(module.weight.shape)} in {name}, but it is {rank}",
                "set a smaller adapter.rank, or adapter.init: zero",
            )
        if holders[id(module.weight)] > 1:
            raise RecipeError(
                f"adapter.init: {init} changes the base, but {name} shares its weight with another module",
                "adapter.init: zero",
            )


def delta_of(
    config: Any, tensors: Mapping[str, torch.Tensor], starts: Mapping[str, torch.Tensor]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Convert an adapter on a base from which its initial product was subtracted to one on the original base.

    The difference of two products is one product of twice the rank: B A - B0 A0 = [B, -B0] [A; A0]. PEFT converts
    PiSSA and OLoRA in the same way.

    Args:
        config: PEFT's LoRA config; it is not changed.
        tensors: The tensors of the adapter, by name.
        starts: The result of `initialize_lora`.

    Returns:
        Config and tensors of a plain LoRA adapter.
    """
    wide = copy.deepcopy(config)
    factor = 2**0.5 if wide.use_rslora else 2  # keeps the scale of the product
    wide.r, wide.lora_alpha = 2 * wide.r, factor * wide.lora_alpha
    wide.rank_pattern = {name: 2 * rank for name, rank in wide.rank_pattern.items()}
    wide.alpha_pattern = {name: factor * alpha for name, alpha in wide.alpha_pattern.items()}
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    for name, start in starts.items():
        is_down = ".lora_A." in name
        start = start.to(found[name].device)
        found[name] = torch.cat([found[name], start if is_down else -start], dim=0 if is_down else 1)
    return wide, found


# ---------------------------------------------------------------------- the base model


def tied_to(model: Any, kept: Sequence[str]) -> list[str]:
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
    """Whether PEFT's ensure_weight_tying works: it ties only lm_head, and makes a tied embedding a linear module."""
    embeddings = model.get_input_embeddings()
    modules = {name: model.get_submodule(name) for name in whole}
    tied = {
        name: module
        for name, module in modules.items()
        if module is not embeddings and getattr(module, "weight", None) is embeddings.weight
    }
    known = any(name.rpartition(".")[2] == "lm_head" for name in tied)
    return known and all(isinstance(module, torch.nn.Linear) for module in tied.values())


def base_of(model: Any) -> Base:
    """The folder or Hub name that a model was loaded from."""
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
def peft_errors_explained(what: Any) -> Iterator[None]:
    """Suppress PEFT's warnings (about defaults that it corrects itself) and turn its errors into ModelErrors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UnpicklingError as error:
        raise ModelError(
            f"{what}: its weights are a pickle with more than tensors, and loading it could execute any code",
            f"get a version of the adapter with {WEIGHTS_FILE}",
        ) from error
    except (SafetensorError, EOFError) as error:
        raise ModelError(f"the weights in {what} cannot be read: {error}", "download or save them again") from error
    except (ValueError, TypeError, KeyError, RuntimeError, OSError) as error:
        raise ModelError(f"PEFT cannot use {what}: {error}", "fix the value named in the message") from error
