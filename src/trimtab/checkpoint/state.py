"""The state of a run in parts: each can be captured, checked against the objects that are there, and applied.

All parts are read and checked before the first is applied, so that a checkpoint of another run changes nothing. Tensors
are copied into the memory that is there (never swapped in), so that dtype, device, sharing and alignment stay.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from trimtab.checkpoint.codec import Encoded, Tree, decode, encode, entries, is_tensor, tensor_form
from trimtab.checkpoint.frozen_base import FrozenBase, different_from, frozen_parameters, left_out
from trimtab.checkpoint.store import StoredCheckpoint, TensorReader, write_checkpoint
from trimtab.errors import CheckpointError
from trimtab.optim.quantized import allocate_state, wait_for_paged
from trimtab.randomness import diverge, random_state, restore_random_state

TensorSource = Callable[[str], torch.Tensor]


class Part(Protocol):
    """One part of the state of a run."""

    name: str

    def capture(self) -> Any:
        """The state now, as plain values and tensors."""

    def check(self, tree: Tree) -> None:
        """Raise if a saved state does not belong to the objects that are there; change nothing."""

    def apply(self, tree: Tree, tensor: TensorSource) -> None:
        """Restore a saved state."""


class ModelPart:
    """The weights of a model that train, and its persistent buffers. A frozen base is recognised, never written.

    Args:
        name: The part's name.
        model: The model.
        also: Frozen parameters that are written all the same: those that begin to train later, if a run may go back to
            a state from before that.
        base: What was frozen when the model was prepared. With it, parameters that have changed since then are written
            although they do not train now; without it, all that do not train are left out.
    """

    # no module can have this name, because names hold no dots
    _LEFT_OUT = ".frozen"

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        *,
        also: Iterable[torch.nn.Parameter] = (),
        base: FrozenBase | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._also = list(also)
        self._base = base

    def capture(self) -> Any:
        """The state dict without what is frozen, of which only a likeness is kept; tied weights are written once."""
        known = left_out(self._model, self._also, self._base)
        state: dict[str, Any] = {
            key: value for key, value in self._model.state_dict().items() if not _belongs_to(key, known)
        }
        if known:
            state[self._LEFT_OUT] = {name: likeness.as_list() for name, likeness in known.items()}
        return state

    def check(self, tree: Tree) -> None:
        """Names, shapes and dtypes have to be the same, and the frozen base has to be the one of the run."""
        saved = dict(entries(tree))
        known = entries(saved.pop(self._LEFT_OUT, {}))
        current = self._model.state_dict()
        missing = sorted(key for key in current.keys() - saved.keys() if not _belongs_to(key, known))
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        unknown = sorted((saved.keys() - current.keys()) | (known.keys() - parameters))
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint is of another model: {_listed('without', missing)}{_listed('with', unknown)}",
                "build the model from the same config, with the same adapters",
            )
        self._check_frozen(known)
        for key, value in current.items():
            if key not in saved or not isinstance(value, torch.Tensor):
                continue
            if not is_tensor(saved[key]):
                raise CheckpointError(f"{key} is no tensor in the checkpoint", "take an older checkpoint")
            form = tensor_form(saved[key])
            here = (str(value.dtype).removeprefix("torch."), list(value.shape))
            if form is not None and form != here:
                raise CheckpointError(
                    f"{key} is {form[0]} {form[1]} in the checkpoint and {here[0]} {here[1]} in the model",
                    "build the model from the same config, in the same dtype",
                )

    def _check_frozen(self, known: Mapping[str, Tree]) -> None:
        """What the checkpoint leaves out has to be frozen here, too, and to be the same."""
        frozen = frozen_parameters(self._model)
        training = sorted(known.keys() - frozen.keys())
        if training:
            raise CheckpointError(
                f"the checkpoint does not hold {training[0]}, which was frozen when it was saved and trains here"
                + (f"; so it is with {len(training) - 1} more" if len(training) > 1 else ""),
                "freeze the same parameters as in the run that was saved",
            )
        different = different_from(known, {name: frozen[name] for name in known})
        if different:
            name = next(iter(different))
            forms = [f"{form[0]} {form[1]}" for form in (known[name], different[name].as_list())]
            how = f"is {forms[0]} there and {forms[1]} here" if forms[0] != forms[1] else "has other values"
            raise CheckpointError(
                f"the frozen base is not the one of the checkpoint: {len(different)} of {len(known)} frozen parameters "
                f"differ, and {name} {how}",
                "load the model that the run began with, in the same precision",
            )

    @torch.no_grad()
    def apply(self, tree: Tree, tensor: TensorSource) -> None:
        """Copy tensor by tensor into the weights that are there."""
        extra, trees = {}, entries(tree)
        for key, value in self._model.state_dict().items():
            if key not in trees:
                continue  # frozen, and the same
            saved = decode(trees[key], tensor)
            if isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor):
                value.copy_(saved)
            else:
                extra[key] = saved
        if extra:  # what modules keep beside tensors, through their set_extra_state
            self._model.load_state_dict(extra, strict=False)


def _belongs_to(key: str, names: Container[str]) -> bool:
    """Whether a key of a state dict is one of these parameters, or something that goes with one (its quantization)."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in names for end in range(1, len(parts) + 1))


class OptimizerPart:
    """The state of an optimizer, keyed by the names of its parameters, and the gradients that wait for its step."""

    # how a step is computed belongs to the optimizer that is there, not to the one that was saved
    _IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._models = models

    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for index, group in enumerate(self._optimizer.param_groups):
            names.update({id(p): f"group{index}.{position}" for position, p in enumerate(group["params"])})
        for index, model in enumerate(self._models):
            prefix = f"{index}:" if len(self._models) > 1 else ""
            names.update({id(p): prefix + name for name, p in model.named_parameters() if id(p) in names})
        return names

    def capture(self) -> Any:
        """Options of each group, and the state of each parameter; in the middle of a window, also its gradient."""
        wait_for_paged(self._optimizer)
        names = self._names()
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [names[id(p)] for p in group["params"]],
            }
            for group in self._optimizer.param_groups
        ]
        for group in groups:
            for key in self._IMPLEMENTATION:
                group.pop(key, None)
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = self._optimizer.state
        return {
            "kind": type(self._optimizer).__qualname__,
            "groups": groups,
            "shapes": {names[id(p)]: list(p.shape) for p in held},
            "state": {names[id(p)]: dict(state[p]) for p in held if p in state},
            "own": {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)},
            "gradients": {names[id(p)]: p.grad for p in held if p.grad is not None},
        }

    def check(self, tree: Tree) -> None:
        """The same kind of optimizer over the same parameters in the same groups."""
        kind = type(self._optimizer).__qualname__
        if tree["kind"] != kind:
            raise CheckpointError(
                f"the checkpoint is of the optimizer {tree['kind']}, not {kind}", f"use {tree['kind']}"
            )
        names = self._names()
        here = [{names[id(p)] for p in group["params"]} for group in self._optimizer.param_groups]
        saved = [set(group["params"]) for group in tree["groups"]]
        if len(here) != len(saved):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(saved)} parameter groups, this one {len(here)}",
                "group the parameters as in the run that was saved",
            )
        for index, (ours, theirs) in enumerate(zip(here, saved, strict=True)):
            if ours != theirs:
                missing, unknown = sorted(ours - theirs), sorted(theirs - ours)
                raise CheckpointError(
                    f"parameter group {index} differs: {_listed('without', missing)}{_listed('with', unknown)}",
                    "give the optimizer the same parameters as in the run that was saved",
                )
        for values in entries(tree["state"]).values():
            entries(values)
        for name, gradient in entries(tree["gradients"]).items():
            if not is_tensor(gradient):
                raise CheckpointError(f"the gradient of {name} is no tensor", "take an older checkpoint")
        shapes = entries(tree["shapes"])
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            name = names[id(parameter)]
            if shapes[name] != list(parameter.shape):
                raise CheckpointError(
                    f"the optimizer's {name} is {shapes[name]} in the checkpoint and {list(parameter.shape)} here",
                    "build the model from the same config",
                )

    @torch.no_grad()
    def apply(self, tree: Tree, tensor: TensorSource) -> None:
        """Restore options, and copy the state of each parameter into memory of the optimizer's own, or shaped like it.

        Parameters without saved state get none: it is made with their first gradient.
        """
        names, states, gradients = self._names(), entries(tree["state"]), entries(tree["gradients"])
        wait_for_paged(self._optimizer)
        held = (p for group in self._optimizer.param_groups for p in group["params"])
        allocate_state(self._optimizer, [p for p in held if names[id(p)] in states])
        for group, saved in zip(self._optimizer.param_groups, tree["groups"], strict=True):
            for key, value in entries(saved).items():
                if key != "params":
                    _assign(group, key, decode(value, tensor))
            for parameter in group["params"]:
                name = names[id(parameter)]
                on_device = bool(group.get("fused") or group.get("capturable"))
                self._apply_state(parameter, states.get(name), tensor, on_device)
                _apply_gradient(parameter, decode(gradients.get(name), tensor))
        for key in [key for key in self._optimizer.state if not isinstance(key, torch.Tensor)]:
            del self._optimizer.state[key]
        self._optimizer.state.update(decode(tree["own"], tensor))

    def _apply_state(self, parameter: torch.Tensor, saved: Tree, tensor: TensorSource, on_device: bool) -> None:
        if saved is None:
            self._optimizer.state.pop(parameter, None)
            return
        state, values = self._optimizer.state[parameter], entries(saved)
        for key in [key for key in state if key not in values]:
            del state[key]
        for key, value in values.items():
            home = parameter if key != "step" or on_device else torch.empty(0)
            _assign(state, key, decode(value, tensor), home)


def _apply_gradient(parameter: torch.Tensor, saved: torch.Tensor | None) -> None:
    if saved is None:
        parameter.grad = None
    elif saved.layout is torch.strided:
        place = {"grad": parameter.grad}
        _assign(place, "grad", saved, parameter)
        parameter.grad = place["grad"]
    else:
        parameter.grad = saved.to(parameter.device)


def _assign(place: dict[str, Any], key: str, value: Any, home: torch.Tensor | None = None) -> None:
    """Put a value into a dict; a tensor goes into the memory that is there, or into new memory laid out like `home`."""
    existing: Any = place.get(key)
    if not isinstance(value, torch.Tensor):
        place[key] = value if home is None else _moved(value, home.device)
    elif type(existing) is type(value) and existing.shape == value.shape and existing.dtype == value.dtype:
        existing.copy_(value)
    elif home is not None and type(value) is torch.Tensor and value.shape == home.shape:
        place[key] = torch.empty_like(home, dtype=value.dtype, requires_grad=False).copy_(value)
    else:
        place[key] = value if home is None else value.to(home.device)


def _moved(value: Any, device: torch.device) -> Any:
    """`value` with the tensors in it on `device`, as LBFGS keeps them in lists."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    return value


class StatefulPart:
    """Anything with `state_dict` and `load_state_dict`: schedulers, loaders, the user's own objects."""

    def __init__(self, name: str, owner: Any) -> None:
        self.name = name
        self._owner = owner

    def capture(self) -> Any:
        """What the object says its state is."""
        return self._owner.state_dict()

    def check(self, tree: Tree) -> None:
        """Only the object itself can tell, when it loads."""

    def apply(self, tree: Tree, tensor: TensorSource) -> None:
        """Let the object load."""
        state = decode(tree, tensor)
        try:
            self._owner.load_state_dict(state)
        except CheckpointError:  # an object of ours, which knows the cure
            raise
        except Exception as error:  # whatever an object of the user's may raise
            raise CheckpointError(
                f"{self.name} ({type(self._owner).__name__}) cannot load its state: {type(error).__name__} {error}",
                "prepare and register the same objects, in the same order, as in the run that was saved",
            ) from error

    def undo_point(self) -> Callable[[], None]:
        """A function that brings the object back to its state of now."""
        if hasattr(type(self._owner), "undo_point"):
            undo: Callable[[], None] = self._owner.undo_point()
            return undo
        now = encode(self.capture())
        tensors = {name: tensor.clone() for name, tensor in now.tensors.items()}
        return lambda: self.apply(now.tree, tensors.__getitem__)


class RandomPart:
    """Every random number generator of every process.

    Args:
        rank: This process among them.
    """

    name = "random"

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self.of_all: list[Any] | None = None  # what the processes exchanged before a save

    def capture(self) -> Any:
        """All generators, of every process that was asked."""
        return self.of_all or [random_state()]

    def check(self, tree: Tree) -> None:
        """Generators fit any run; those of the host are always there."""
        if not isinstance(tree, list) or not tree or not {"python", "torch"} <= entries(tree[0]).keys():
            raise CheckpointError("the checkpoint holds no random state", "take an older checkpoint")

    def apply(self, tree: Tree, tensor: TensorSource) -> None:
        """Put all generators back; a process that was not there when the state was saved gets numbers of its own."""
        restore_random_state(decode(tree[min(self._rank, len(tree) - 1)], tensor))
        if self._rank >= len(tree):
            diverge(self._rank)


def _listed(word: str, names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"it is {word} {shown}; "


def save_parts(folder: str | Path, parts: Sequence[Part], facts: Mapping[str, Any] | None = None) -> Path:
    """Write every part to a folder, with facts for those who look for a checkpoint without loading it."""
    return write_checkpoint(folder, encode_parts(parts), facts)


def encode_parts(parts: Sequence[Part]) -> dict[str, Encoded]:
    """The state of every part now, by name; its tensors are the living ones, not copies."""
    return {part.name: _encoded(part) for part in parts}


def num_bytes_of_parts(parts: Sequence[Part]) -> int:
    """How large a checkpoint of these parts is now, but for a little JSON."""
    tensors = [tensor for part in encode_parts(parts).values() for tensor in part.tensors.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _encoded(part: Part) -> Encoded:
    try:
        return encode(part.capture())
    except CheckpointError as error:
        raise CheckpointError(f"{part.name}: {error.problem}", error.cure) from error


def load_parts(folder: str | Path | StoredCheckpoint, parts: Sequence[Part]) -> None:
    """Restore every part from a folder, or change nothing.

    Parts that can refuse only while loading come first in `parts`, those that are checked beforehand last.
    """
    apply_parts(checked_parts(folder, parts), parts)


def checked_parts(folder: str | Path | StoredCheckpoint, parts: Sequence[Part]) -> StoredCheckpoint:
    """A checkpoint that was found to fit the parts that are there; nothing is changed.

    Args:
        folder: Where it is, or the checkpoint as it was opened: its files were verified then.
        parts: What it should fit.
    """
    stored = folder if isinstance(folder, StoredCheckpoint) else StoredCheckpoint(folder)
    expected, found = [part.name for part in parts], list(stored.trees)
    if set(expected) != set(found):
        missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        raise CheckpointError(
            f"{stored.folder} does not hold what was prepared here: "
            f"{_listed('without', missing)}{_listed('with', unknown)}",
            "prepare and register the same objects, in the same order, as in the run that was saved",
        )
    for part in parts:
        _check(part, stored.trees[part.name], stored.tensor_reader(part.name))
    return stored


def apply_parts(stored: StoredCheckpoint, parts: Sequence[Part]) -> None:
    """Restore every part from a checkpoint that was checked."""
    readers = {part.name: stored.tensor_reader(part.name) for part in parts}
    undo = [part.undo_point() for part in parts if isinstance(part, StatefulPart)]
    try:
        for part in parts:
            part.apply(stored.trees[part.name], readers[part.name])
    except BaseException:
        for bring_back in undo:
            with suppress(CheckpointError):  # an object that refuses its own state, too, is left to itself
                bring_back()
        raise


def _check(part: Part, tree: Tree, reader: TensorReader) -> None:
    try:
        reader.check(tree)
        part.check(tree)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the saved {part.name} is damaged: {type(error).__name__} {error}", "take an older checkpoint"
        ) from error
