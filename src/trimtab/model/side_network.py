"""A side network: a narrow stack of blocks that reads the hidden states of a frozen model (ladder side-tuning).

Backward never enters the base: its blocks run without gradients, and the side network reads their detached outputs. Its
result is added to the output of the last block, before the final norm, the pooler and the head; the last projection
starts as zero, so training starts with the outputs of the base. Blocks of the side network compute each token
separately: they never see later tokens or other rows, with and without padding, and need no cache to generate text.

Shapes: hidden (…, tokens, hidden size), state (…, tokens, width).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trimtab.errors import ModelError, RecipeError
from trimtab.model.blocks import stacks_of
from trimtab.model.hub import SIDE_CONFIG

SIDE_WEIGHTS = "side_network.safetensors"
SIDE_MODULE = "side_network"  # its name in the model
_OWN_FORWARD = "_trimtab_forward_with_gradients"
_EXPANSION = 4  # inner width of the MLP of a side block


@dataclass(frozen=True)
class SideSpec:
    """Configuration of a side network.

    Attributes:
        reduction: Its width is the hidden size of the model divided by this.
        every: It reads every n-th block of the model, always including the last.
        dropout: Dropout probability of the hidden states that it reads.
        trains: Patterns of modules to train in full, besides newly initialized modules, which always are.
    """

    reduction: int = 8
    every: int = 1
    dropout: float = 0.0
    trains: Sequence[str] = ()


@dataclass(frozen=True)
class SideConfig:
    """The contents of side_network.json.

    Attributes:
        base_model_name_or_path: Folder or Hub name of the base; None for a model that was built from a config.
        revision: The Hub commit that was loaded, if known.
        hidden_size: Hidden size of the base.
        num_blocks: Number of blocks of the base.
        reduction: As in `SideSpec`.
        every: As in `SideSpec`.
        dropout: As in `SideSpec`.
    """

    base_model_name_or_path: str | None
    revision: str | None
    hidden_size: int
    num_blocks: int
    reduction: int
    every: int
    dropout: float

    @property
    def width(self) -> int:
        """Width of the side network."""
        return max(1, self.hidden_size // self.reduction)

    @property
    def taps(self) -> list[int]:
        """Numbers of the blocks of the base that the side network reads."""
        last = self.num_blocks - 1
        return [number for number in range(last) if (number + 1) % self.every == 0] + [last]

    def save_pretrained(self, folder: str) -> None:
        """Write the config, as PEFT's configs do."""
        text = json.dumps({"format": 1, **asdict(self)}, indent=1)
        (Path(folder) / SIDE_CONFIG).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "SideConfig":
        """Read the config in a folder.

        Raises:
            ModelError: It is damaged.
        """
        path = folder / SIDE_CONFIG
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found = cls(**{name: values[name] for name in cls.__dataclass_fields__})
            numbers = [found.hidden_size, found.num_blocks, found.reduction, found.every]
            if not all(type(number) is int and number > 0 for number in numbers) or not 0 <= found.dropout < 1:
                raise ValueError("its numbers are not positive")
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ModelError(f"{path} cannot be read: {error}", "export or download the side network again") from error
        return found


class _SideBlock(nn.Module):
    """Add the projected hidden states of one block of the base, and an MLP of the state, to the state."""

    def __init__(self, hidden_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden_size, width)
        self.input_norm = nn.LayerNorm(width)
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, _EXPANSION * width)
        self.narrow = nn.Linear(_EXPANSION * width, width)

    def forward(self, state: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
        """Return the new state."""
        # Backward needs the input of a projection, so this is the only tensor of the base that is saved.
        read = self.input_norm(self.down(self.dropout(hidden)))
        state = read if state is None else state + read
        changed: torch.Tensor = state + self.narrow(functional.gelu(self.widen(self.norm(state))))
        return changed


class SideNetwork(nn.Module):
    """The side network of a model.

    Args:
        config: Its sizes.
    """

    def __init__(self, config: SideConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.blocks = nn.ModuleList(_SideBlock(config.hidden_size, width, config.dropout) for _ in config.taps)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, config.hidden_size)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)
        self._at = {number: index for index, number in enumerate(config.taps)}
        self._next, self._state = 0, None

    _next: int
    _state: torch.Tensor | None

    def read(self, number: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Read the output of a block of the base; for the last block, return its replacement.

        Raises:
            ModelError: The base does not run its blocks once each, one after another.
        """
        if number == 0:
            self.forget()
        if number != self._next or hidden.shape[-1] != self.config.hidden_size:
            raise ModelError(
                f"block {number} of the base ran where block {self._next} was expected, or has hidden states of "
                "another size: a side network cannot read it",
                "adapter: lora",
            )
        self._next += 1
        if number in self._at:
            self._state = self.blocks[self._at[number]](self._state, self._as_read(hidden.detach()))
        if number < self.config.num_blocks - 1:
            return None
        state = self._state
        self.forget()
        assert state is not None, "the last block is always read"
        added: torch.Tensor = self.up(self.norm(state))
        return hidden.detach() + added.to(hidden.dtype)

    def _as_read(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states in the dtype of the side network; under autocast, autocast does the cast."""
        is_autocast = torch.is_autocast_enabled(hidden.device.type)
        return hidden if is_autocast else hidden.to(self.up.weight.dtype)

    def forget(self, *_: Any) -> None:
        """Discard the states read so far, also after a forward that failed."""
        self._next, self._state = 0, None


class _Tap:
    """A forward hook of a block of the base; an object, because `copy.deepcopy` copies objects but not closures."""

    def __init__(self, network: SideNetwork, number: int) -> None:
        self._network, self._number = network, number

    def __call__(self, block: nn.Module, args: Any, output: Any) -> Any:
        is_tuple = isinstance(output, tuple)
        changed = self._network.read(self._number, output[0] if is_tuple else output)
        return None if changed is None else (changed, *output[1:]) if is_tuple else changed


def plan_side_network(model: Any, spec: SideSpec, base: tuple[str | None, str | None]) -> SideConfig:
    """Find the sizes of the side network of a model.

    Args:
        model: A transformers model.
        spec: Configuration of the side network.
        base: Name and revision of the model.

    Raises:
        RecipeError: The model is not one stack of blocks that run once each.
    """
    name, cure = type(model).__name__, "adapter: lora"
    stacks = stacks_of(model)
    if len(stacks) != 1:
        has = f"{len(stacks)} stacks" if stacks else "no stack"
        raise RecipeError(f"adapter: side needs one stack of blocks, but {name} has {has}", cure)
    num_blocks, config = len(stacks[0][1]), model.config.get_text_config()
    num_layers = getattr(config, "num_hidden_layers", num_blocks)
    if num_layers != num_blocks:
        raise RecipeError(
            f"adapter: side reads blocks that run once, but {name} runs {num_blocks} of them {num_layers} times", cure
        )
    if getattr(config, "layerdrop", 0):
        raise RecipeError(f"adapter: side reads every block, but {name} leaves out some at random (layerdrop)", cure)
    hidden_size = getattr(config, "hidden_size", None)
    if not isinstance(hidden_size, int):
        raise RecipeError(f"adapter: side needs the hidden size of {name}, which its config does not contain", cure)
    return SideConfig(base[0], base[1], hidden_size, num_blocks, spec.reduction, spec.every, spec.dropout)


def attach_side_network(model: Any, config: SideConfig) -> None:
    """Add a side network to a model in place: a module, a forward without gradients and a hook for every block.

    Raises:
        ModelError: The sizes of the model are different.
    """
    (_, blocks), *others = stacks_of(model) or [("", [])]
    size = getattr(model.config.get_text_config(), "hidden_size", None)
    if others or (len(blocks), size) != (config.num_blocks, config.hidden_size):
        raise ModelError(
            f"the side network belongs to a model with {config.num_blocks} blocks of width {config.hidden_size}, and "
            f"{type(model).__name__} has {len(blocks)} of width {size}",
            "load the base model that it was trained on",
        )
    home = next(blocks[0].parameters()).device
    network = SideNetwork(config).to(home)  # drawn on the host: the same values on every device
    network.train(model.training)
    setattr(model, SIDE_MODULE, network)
    for number, block in enumerate(blocks):
        block.__dict__[_OWN_FORWARD] = block.forward
        block.forward = MethodType(_forward_without_gradients, block)
        block.register_forward_hook(_Tap(network, number))
    model.register_forward_hook(network.forget, always_call=True)


@torch.no_grad()
def _forward_without_gradients(block: Any, *args: Any, **kwargs: Any) -> Any:
    return block.__dict__[_OWN_FORWARD](*args, **kwargs)


def check_whole_modules(model: Any, names: Sequence[str]) -> None:
    """Refuse modules to train in full whose gradients would have to pass through the base.

    Raises:
        RecipeError: A module is in a block or before the blocks, or shares a weight with one that is.
    """
    (_, blocks), *_ = stacks_of(model)
    before = {id(p) for module in (*blocks, model.get_input_embeddings()) for p in module.parameters()}
    for name in names:
        if any(id(parameter) in before for parameter in model.get_submodule(name).parameters()):
            raise RecipeError(
                f"adapter.trains: backward of a side network does not reach {name}, or a weight that it shares",
                f"remove {name}, or adapter: lora",
            )


def read_side_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a side network and of modules that were trained in full.

    Raises:
        ModelError: The file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / SIDE_WEIGHTS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "export or download the side network again") from error


def fill_side_network(model: Any, weights: Mapping[str, torch.Tensor], place: Path) -> None:
    """Copy the weights of a side network into a model that has one.

    Raises:
        ModelError: Names or shapes differ.
    """
    own = getattr(model, SIDE_MODULE).state_dict(prefix=f"{SIDE_MODULE}.", keep_vars=True)
    stored = {name: tensor for name, tensor in weights.items() if name.startswith(f"{SIDE_MODULE}.")}
    different = [name for name in own.keys() | stored.keys() if _shape(own, name) != _shape(stored, name)]
    if different:
        raise ModelError(
            f"{place / SIDE_WEIGHTS} does not match {SIDE_CONFIG}: {sorted(different)[0]}",
            "export or download the side network again",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
